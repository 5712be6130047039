#include "schedule.h"

namespace disco {
namespace {

constexpr int kLanes = 3;

// Vertices that some out vertex waits for, itself included. Closed under predecessors.
std::vector<bool> out_ancestors(const Program& program) {
  std::vector<bool> needed(program.size(), false);
  for (std::int32_t v = program.size() - 1; v >= 0; --v) {
    needed[v] = program.out(v);
    for (const std::int32_t s : program.successors_of(v)) needed[v] = needed[v] || needed[s];
  }
  return needed;
}

std::vector<bool> gated(const Program& program) {
  std::vector<bool> result(program.size(), false);
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (program.late(v)) result[v] = true;
    if (!result[v]) continue;
    for (const std::int32_t s : program.successors_of(v)) result[s] = true;
  }
  return result;
}

}  // namespace

Schedule::Schedule(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                   OpRunner& runner, const EngineOptions& options) {
  make_resources(program, devices, options);
  count_edges(program);
  make_orders(program);
  find_repeating(program, devices, runner, options);
  cut_segments(program);
}

void Schedule::make_resources(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                              const EngineOptions& options) {
  const bool synchronous = options.dispatch == Dispatch::kSynchronous;
  bool any_asynchronous = false;
  std::vector<int> first_resource;
  for (int d = 0; d < static_cast<int>(devices.size()); ++d) {
    any_inline = any_inline || devices[d]->runs_inline();
    any_asynchronous = any_asynchronous || !devices[d]->runs_inline();
    first_resource.push_back(static_cast<int>(resources.size()));
    const int compute_window = devices[d]->runs_inline() || synchronous ? 1 : 1 + options.lookahead;
    const int room = compute_window > 1 ? std::max(devices[d]->queue_room(), compute_window) : compute_window;
    for (int r = 0; r <= kLanes; ++r) {
      Resource resource;
      resource.device = d;
      resource.copy = r > 0;
      resource.first_stream = static_cast<int>(streams.size());
      resource.stream_count = resource.copy ? 1 : devices[d]->compute_streams();
      resource.room = room;
      resource.window = resource.copy ? (synchronous ? 1 : options.copy_depth) : compute_window;
      resource.horizon_ns = !resource.copy && room > compute_window ? kHorizonNs : 0;
      // A copy between two devices has pieces of its own, where it needs any.
      const bool peer = r == 1 + static_cast<int>(Direction::kPeer);
      resource.piece = resource.copy && !peer ? options.copy_piece : 0;
      if (resource.copy && !synchronous) resource.batch = devices[d]->batch_limits();
      // No copy waits for a batch longer than for a piece.
      if (resource.piece > 0) resource.batch.all = std::min(resource.batch.all, resource.piece);
      for (int i = 0; i < resource.stream_count; ++i) {
        StreamState stream;
        stream.device = d;
        stream.stream = resource.copy ? devices[d]->compute_streams() + r - 1 : i;
        // A segment is launched one by one, too, if there is room for a kernel.
        stream.ring.resize(resource.copy ? resource.window : room + kMostKernels);
        if (resource.batch.copies > 1) stream.batches.resize(stream.ring.size() * kMostCopies);
        streams.push_back(std::move(stream));
      }
      resources.push_back(std::move(resource));
    }
  }
  lookahead = any_asynchronous && options.lookahead > 0 && !synchronous;
  resource_of.assign(program.size(), -1);
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (program.kind[v] == Kind::kInput) continue;
    const int offset = program.kind[v] == Kind::kKernel ? 0 : 1 + static_cast<int>(program.direction[v]);
    resource_of[v] = static_cast<std::int16_t>(first_resource[program.device[v]] + offset);
  }
}

void Schedule::count_edges(const Program& program) {
  const std::int32_t n = program.size();
  predecessor_begin.assign(n + 1, 0);
  for (std::int32_t v = 0; v < n; ++v) {
    const bool input = program.kind[v] == Kind::kInput;
    for (const std::int32_t s : program.successors_of(v)) {
      if (!input) ++predecessor_begin[s + 1];
    }
    if (input) {
      if (program.late(v)) late.push_back(v);
      if (program.bytes[v] > 0) residents.push_back(v);
      continue;
    }
    ++runnable;
    outs += program.out(v) ? 1 : 0;
  }
  for (std::int32_t v = 0; v < n; ++v) predecessor_begin[v + 1] += predecessor_begin[v];
  expected_ns.assign(n, 0);
  leaves.assign(n, false);
  for (std::int32_t v = 0; v < n; ++v) {
    if (program.kind[v] != Kind::kKernel) continue;
    expected_ns[v] = std::clamp(program.ns[v], kShortestNs, kHorizonNs);
    const Resource& own = resources[resource_of[v]];
    leaves[v] = program.out(v);
    for (const std::int32_t s : program.successors_of(v)) {
      leaves[v] = leaves[v] || own.stream_count > 1 || resource_of[s] != resource_of[v];
    }
  }
  predecessors.resize(predecessor_begin[n]);
  std::vector<std::int32_t> cursor(predecessor_begin.begin(), predecessor_begin.end() - 1);
  for (std::int32_t v = 0; v < n; ++v) {
    if (program.kind[v] == Kind::kInput) continue;
    for (const std::int32_t s : program.successors_of(v)) predecessors[cursor[s]++] = v;
  }
}

void Schedule::make_orders(const Program& program) {
  const std::vector<bool> needed = out_ancestors(program);
  behind_gate = gated(program);
  // A fixed order with a vertex behind the gate ahead of one that an out vertex needs would never open the
  // gate.
  bool gate_seen = false;
  bool out_first = false;
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (program.kind[v] == Kind::kInput) continue;
    gate_seen = gate_seen || behind_gate[v];
    out_first = out_first || (gate_seen && needed[v]);
    serial.push_back(v);
  }
  if (out_first)
    std::stable_partition(serial.begin(), serial.end(), [&](std::int32_t v) { return needed[v]; });
  for (const std::int32_t v : serial) resources[resource_of[v]].order.push_back(v);
  for (const Resource& resource : resources) {
    // The step's end need not wait until the device sees that nothing more comes.
    if (!resource.order.empty()) leaves[resource.order.back()] = true;
  }
}

}  // namespace disco
