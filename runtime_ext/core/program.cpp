#include "program.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace disco {
namespace {

const char* name_of(const Program& program, std::int32_t v) {
  if (program.kind[v] == Kind::kInput) return "input";
  if (program.kind[v] == Kind::kKernel) return "kernel";
  if (program.goes(v, Direction::kHostToDevice)) return "copy from the host";
  if (program.goes(v, Direction::kDeviceToHost)) return "copy to the host";
  return program.goes(v, Direction::kPeer) ? "copy between devices" : "unknown";
}

std::string at_vertex(const Program& program, std::int32_t v, const std::string& what) {
  return "vertex " + std::to_string(v) + " (" + name_of(program, v) + "): " + what;
}

std::string check_lengths(const Program& p) {
  const std::size_t n = p.kind.size();
  if (p.device.size() != n || p.op.size() != n || p.dst.size() != n || p.src.size() != n ||
      p.bytes.size() != n || p.ns.size() != n || p.flags.size() != n || p.direction.size() != n ||
      p.in_degree.size() != n) {
    return "program: arrays differ in length";
  }
  if (p.successor_begin.size() != n + 1 || p.successor_begin.front() != 0 ||
      static_cast<std::size_t>(p.successor_begin.back()) != p.successors.size() ||
      !std::is_sorted(p.successor_begin.begin(), p.successor_begin.end())) {
    return "program: successor_begin is not an index of successors";
  }
  return {};
}

std::string check_vertex(const Program& p, std::int32_t v, int devices) {
  if (p.kind[v] > Kind::kCopy || p.direction[v] > Direction::kPeer) return at_vertex(p, v, "no such kind");
  if (p.device[v] < 0 || p.device[v] >= devices) {
    return at_vertex(p, v, "device " + std::to_string(p.device[v]) + " of " + std::to_string(devices));
  }
  if (p.bytes[v] < 0) return at_vertex(p, v, "negative size");
  if (p.ns[v] < 0) return at_vertex(p, v, "negative time");
  if (p.kind[v] == Kind::kKernel) {
    if (p.op[v] < 0) return at_vertex(p, v, "no op");
  } else if (p.bytes[v] > 0 && (p.dst[v] == nullptr || p.src[v] == nullptr)) {
    return at_vertex(p, v, "a copy without addresses");
  }
  if (p.late(v) && p.kind[v] != Kind::kInput) return at_vertex(p, v, "only inputs can be late");
  if (p.late(v) && p.bytes[v] > 0) return at_vertex(p, v, "a late input cannot be loaded from the host");
  if (p.changes(v) && p.kind[v] != Kind::kKernel && !p.goes(v, Direction::kDeviceToHost)) {
    return at_vertex(p, v, "only kernels and copies to the host change states");
  }
  return {};
}

std::string check_edges(const Program& p) {
  const std::int32_t n = p.size();
  std::vector<std::int32_t> in_degree(n, 0);
  for (std::int32_t v = 0; v < n; ++v) {
    for (const std::int32_t s : p.successors_of(v)) {
      if (s < 0 || s >= n) return at_vertex(p, v, "successor " + std::to_string(s) + " does not exist");
      if (s <= v)
        return at_vertex(p, v, "successor " + std::to_string(s) + " comes before it in the serial order");
      if (p.kind[s] == Kind::kInput)
        return at_vertex(p, s, "an input cannot wait for vertex " + std::to_string(v));
      ++in_degree[s];
    }
  }
  for (std::int32_t v = 0; v < n; ++v) {
    if (in_degree[v] != p.in_degree[v]) return at_vertex(p, v, "in_degree differs from the edges");
  }
  return {};
}

std::string range_of(const void* ptr, std::int64_t bytes) {
  return std::to_string(bytes) + " bytes at " + std::to_string(reinterpret_cast<std::uintptr_t>(ptr));
}

}  // namespace

Ranges::Ranges(std::vector<Range> ranges, Adjacent adjacent) {
  std::erase_if(ranges, [](const Range& range) { return range.bytes <= 0; });
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.base < b.base; });
  for (const Range& range : ranges) {
    const auto base = reinterpret_cast<std::uintptr_t>(range.base);
    const auto size = static_cast<std::uintptr_t>(range.bytes);
    const std::uintptr_t joined = adjacent == Adjacent::kJoined ? 1 : 0;
    if (!spans_.empty() && base - spans_.back().first < spans_.back().second + joined) {
      spans_.back().second = std::max(spans_.back().second, base - spans_.back().first + size);
    } else {
      spans_.emplace_back(base, size);
    }
  }
}

bool Ranges::hold(const void* ptr, std::int64_t bytes) const {
  if (bytes <= 0) return bytes == 0;
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto next = std::upper_bound(spans_.begin(), spans_.end(), address,
                               [](std::uintptr_t value, const auto& span) { return value < span.first; });
  if (next == spans_.begin()) return false;
  const auto& [base, size] = *--next;
  const std::uintptr_t offset = address - base;
  return offset <= size && static_cast<std::uintptr_t>(bytes) <= size - offset;
}

std::string Memory::check_states() const {
  std::vector<std::pair<Range, bool>> all;  // with whether it is a home
  for (const Range& range : arenas) all.emplace_back(range, false);
  all.emplace_back(host, false);
  for (const Range& range : clean) all.emplace_back(range, false);
  for (const Range& range : states) all.emplace_back(range, true);
  std::erase_if(all, [](const auto& each) { return each.first.bytes <= 0; });
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first.base < b.first.base; });
  // Of what begins before a range, only what reaches furthest, home or not, can overlap it.
  std::uintptr_t end = 0, home_end = 0;
  for (const auto& [range, home] : all) {
    const auto base = reinterpret_cast<std::uintptr_t>(range.base);
    if (base < home_end || (home && base < end)) {
      return "memory: the home of a state shares bytes with " + range_of(range.base, range.bytes);
    }
    const std::uintptr_t behind = base + static_cast<std::uintptr_t>(range.bytes);
    end = std::max(end, behind);
    if (home) home_end = std::max(home_end, behind);
  }
  return {};
}

std::string Program::validate_memory(const Memory& memory) const {
  if (std::string message = memory.check_states(); !message.empty()) return message;
  const Ranges clean(memory.clean);
  const Ranges homes(memory.states, Ranges::Adjacent::kApart);
  std::vector<Range> hosts = memory.arenas;
  hosts.push_back(memory.host);
  const Ranges to_host(hosts);
  hosts.insert(hosts.end(), memory.clean.begin(), memory.clean.end());
  const Ranges from_host(std::move(hosts));
  const Ranges everywhere(memory.arenas);
  std::vector<Ranges> arenas;
  for (const Range& arena : memory.arenas) arenas.emplace_back(std::vector<Range>{arena});
  for (std::int32_t v = 0; v < size(); ++v) {
    if (bytes[v] == 0 || kind[v] == Kind::kKernel) continue;
    if (device[v] < 0 || static_cast<std::size_t>(device[v]) >= arenas.size()) {
      return at_vertex(*this, v, "device " + std::to_string(device[v]) + " has no arena");
    }
    const Ranges& arena = arenas[static_cast<std::size_t>(device[v])];
    const Ranges* target = &arena;
    const Ranges* source = &everywhere;
    if (kind[v] == Kind::kInput) source = &clean;
    if (goes(v, Direction::kHostToDevice)) source = &from_host;
    if (goes(v, Direction::kPeer)) target = &everywhere;
    if (goes(v, Direction::kDeviceToHost)) {
      target = &to_host;
      source = &arena;
    }
    const bool from_home = kind[v] == Kind::kInput || goes(v, Direction::kHostToDevice);
    const bool reads_home = from_home && homes.hold(src[v], bytes[v]);
    const bool writes_home = goes(v, Direction::kDeviceToHost) && changes(v) && homes.hold(dst[v], bytes[v]);
    if (!writes_home && !target->hold(dst[v], bytes[v])) {
      return at_vertex(*this, v, "writes " + range_of(dst[v], bytes[v]) + ", outside the memory of this run");
    }
    if (!reads_home && !source->hold(src[v], bytes[v])) {
      return at_vertex(*this, v, "reads " + range_of(src[v], bytes[v]) + ", outside the memory of this run");
    }
  }
  return {};
}

std::string Program::validate(int devices) const {
  if (std::string message = check_lengths(*this); !message.empty()) return message;
  for (std::int32_t v = 0; v < size(); ++v) {
    if (std::string message = check_vertex(*this, v, devices); !message.empty()) return message;
  }
  if (std::string message = check_edges(*this); !message.empty()) return message;
  std::vector<bool> gated(size(), false);
  for (std::int32_t v = 0; v < size(); ++v) {
    if (late(v)) gated[v] = true;
    if (!gated[v]) continue;
    if (out(v))
      return at_vertex(*this, v, "handed out before the late inputs arrive, but waits for one of them");
    for (const std::int32_t s : successors_of(v)) gated[s] = true;
  }
  return {};
}

void ProgramBuilder::reserve(std::size_t vertices, std::size_t edges) {
  program_.kind.reserve(vertices);
  program_.device.reserve(vertices);
  program_.op.reserve(vertices);
  program_.dst.reserve(vertices);
  program_.src.reserve(vertices);
  program_.bytes.reserve(vertices);
  program_.ns.reserve(vertices);
  program_.flags.reserve(vertices);
  program_.direction.reserve(vertices);
  edges_.reserve(edges);
}

std::int32_t ProgramBuilder::add(const VertexDesc& vertex) {
  program_.kind.push_back(vertex.kind);
  program_.device.push_back(vertex.device);
  program_.op.push_back(vertex.op);
  program_.dst.push_back(vertex.dst);
  program_.src.push_back(vertex.src);
  program_.bytes.push_back(vertex.bytes);
  program_.ns.push_back(vertex.ns);
  program_.flags.push_back(vertex.flags);
  program_.direction.push_back(vertex.direction);
  return program_.size() - 1;
}

Program ProgramBuilder::build() && {
  const std::int32_t n = program_.size();
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  program_.in_degree.assign(n, 0);
  program_.successor_begin.assign(n + 1, 0);
  program_.successors.reserve(edges_.size());
  for (const auto& [from, to] : edges_) {
    if (from < 0 || from >= n || to < 0 || to >= n) {
      throw std::invalid_argument("edge " + std::to_string(from) + " -> " + std::to_string(to) +
                                  " of a program of " + std::to_string(n) + " vertices");
    }
    program_.successors.push_back(to);
    ++program_.successor_begin[from + 1];
    ++program_.in_degree[to];
  }
  for (std::int32_t v = 0; v < n; ++v) program_.successor_begin[v + 1] += program_.successor_begin[v];
  return std::move(program_);
}

}  // namespace disco
