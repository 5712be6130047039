#include "engine_settings.h"

#include <array>
#include <utility>

#include "../core/peer_copies.h"
#include "ops.h"

namespace disco {
namespace {

using Setter = void (*)(Settings&, double);

// Every option that Python gives, by name.
constexpr std::array<std::pair<const char*, Setter>, 14> kOptions = {{
    {"dispatch",
     [](Settings& to, double v) { to.engine.dispatch = static_cast<Dispatch>(static_cast<int>(v)); }},
    {"seed", [](Settings& to, double v) { to.engine.seed = static_cast<std::uint64_t>(v); }},
    {"lookahead", [](Settings& to, double v) { to.engine.lookahead = static_cast<int>(v); }},
    {"copy_piece", [](Settings& to, double v) { to.engine.copy_piece = static_cast<std::int64_t>(v); }},
    {"launch_graphs", [](Settings& to, double v) { to.engine.graphs = v != 0; }},
    {"stall_timeout", [](Settings& to, double v) { to.engine.stall_timeout = v; }},
    {"time_ops", [](Settings& to, double v) { to.engine.time_ops = v != 0; }},
    {"compute_threads", [](Settings& to, double v) { to.compute_threads = static_cast<int>(v); }},
    {"compute_streams", [](Settings& to, double v) { to.host.compute_streams = static_cast<int>(v); }},
    {"inline_compute", [](Settings& to, double v) { to.host.inline_compute = v != 0; }},
    {"host_threads", [](Settings& to, double v) { to.host_threads = static_cast<int>(v); }},
    {"link_jitter", [](Settings& to, double v) { to.host.link_jitter = v; }},
    {"link_jitter_seed",
     [](Settings& to, double v) { to.host.link_jitter_seed = static_cast<std::uint64_t>(v); }},
    {"graph_bytes", [](Settings& to, double v) { to.graph_bytes = static_cast<std::int64_t>(v); }},
}};

template <typename Enum>
std::int64_t number(Enum value) {
  return static_cast<std::int64_t>(value);
}

}  // namespace

Settings read_settings(const c10::Dict<std::string, double>& values) {
  Settings settings;
  for (const auto& [name, set] : kOptions) set(settings, values.at(name));
  return settings;
}

c10::Dict<std::string, std::int64_t> engine_numbers() {
  c10::Dict<std::string, std::int64_t> numbers;
  const std::pair<const char*, std::int64_t> named[] = {
      {"columns.vertices", kVertexColumns},
      {"columns.edges", kEdgeColumns},
      {"columns.copied", kCopiedColumns},
      {"columns.events", kEventColumns},
      {"kind.INPUT", number(Kind::kInput)},
      {"kind.KERNEL", number(Kind::kKernel)},
      {"kind.COPY", number(Kind::kCopy)},
      {"flag.LATE", number(kLate)},
      {"flag.OUT", number(kOut)},
      {"flag.CHANGES", number(kChanges)},
      {"result.PLACED", number(ResultMode::kPlaced)},
      {"result.COPIED", number(ResultMode::kCopied)},
      {"result.IGNORED", number(ResultMode::kIgnored)},
      {"status.DONE", number(Status::kDone)},
      {"status.TIMEOUT", number(Status::kTimeout)},
      {"status.FAILED", number(Status::kFailed)},
      {"status.STALLED", number(Status::kStalled)},
      {"status.ABORTED", number(Status::kAborted)},
      {"status.IDLE", number(Status::kIdle)},
      {"dispatch.PRIORITY", number(Dispatch::kPriority)},
      {"dispatch.RANDOM", number(Dispatch::kRandom)},
      {"dispatch.FIXED", number(Dispatch::kFixed)},
      {"dispatch.SYNCHRONOUS", number(Dispatch::kSynchronous)},
      {"lane.H2D", number(Direction::kHostToDevice)},
      {"lane.D2H", number(Direction::kDeviceToHost)},
      {"lane.P2P", number(Direction::kPeer)},
      {"peer.DIRECT", number(PeerPath::kDirect)},
      {"peer.NO_ACCESS", number(PeerPath::kNoAccess)},
      {"peer.WRONG_BYTES", number(PeerPath::kWrongBytes)},
  };
  for (const auto& [name, value] : named) numbers.insert(name, value);
  for (std::size_t i = 0; i < kOptions.size(); ++i) {
    numbers.insert(std::string("option.") + kOptions[i].first, static_cast<std::int64_t>(i));
  }
  return numbers;
}

}  // namespace disco
