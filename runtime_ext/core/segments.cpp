// The part of Schedule that finds segments.
#include "segments.h"

#include <algorithm>

#include "schedule.h"

namespace disco {

// Kernels of a stream that nobody shares, where later ones are queued behind the running one anyway and in no
// order that is fixed between streams.
void Schedule::find_repeating(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                              OpRunner& runner, const EngineOptions& options) {
  may_repeat.assign(program.size(), false);
  if (!options.graphs || !lookahead || options.dispatch >= Dispatch::kFixed) return;
  for (std::int32_t v = 0; v < program.size(); ++v) {
    const int d = program.device[v];
    if (program.kind[v] != Kind::kKernel || devices[d]->compute_streams() > 1) continue;
    may_repeat[v] = devices[d]->repeats() && runner.repeats(program.op[v], d);
  }
}

// Whether `v` waits for something else than kernels of its own stream. A late input counts as none: all come
// at once, so that a kernel behind the gate, which the first of its segment is too, need not wait for them.
bool Schedule::waits_elsewhere(std::int32_t v) const {
  const auto predecessors = predecessors_of(v);
  return std::any_of(predecessors.begin(), predecessors.end(),
                     [&](std::int32_t p) { return resource_of[p] != resource_of[v]; });
}

void Schedule::add_segment(const Program& program, std::span<const std::int32_t> vertices) {
  if (vertices.size() < kFewestKernels) return;
  Segment segment;
  std::int64_t ns = 0;
  for (const std::int32_t v : vertices) {
    leader[v] = vertices.front();
    segment.vertices.push_back(v);
    segment.ops.push_back(program.op[v]);
    ns += expected_ns[v];
    // As a kernel launched alone is marked.
    if (!leaves[v] && 2 * ns < kHorizonNs && v != vertices.back()) continue;
    segment.ends.push_back(static_cast<std::int32_t>(segment.vertices.size()));
    ns = 0;
  }
  segment_of[vertices.front()] = static_cast<std::int32_t>(segments.size());
  segments.push_back(std::move(segment));
}

// A segment waits for all that its kernels wait for outside of it. That makes no circle: a kernel behind the
// first waits outside for kernels that come before the first in the order, and so does whatever they wait
// for. It holds nobody up before the gate either, since it lies on one side of it. Where a segment began one
// begins again, so that all but those of barred kernels stay as they are.
void Schedule::cut_segments(const Program& program) {
  const std::int32_t n = program.size();
  segments.clear();
  segment_of.assign(n, -1);
  leader.resize(n);
  begins.resize(n, false);
  for (std::int32_t v = 0; v < n; ++v) leader[v] = v;
  for (const Resource& resource : resources) {
    if (resource.copy) continue;
    const std::vector<std::int32_t>& order = resource.order;
    std::size_t begin = 0;
    std::int64_t ns = 0;
    for (std::size_t i = 0; i <= order.size(); ++i) {
      const bool goes_on = i < order.size() && i > begin && may_repeat[order[i]] &&
                           may_repeat[order[begin]] && behind_gate[order[i]] == behind_gate[order[begin]] &&
                           i - begin < kMostKernels && ns + expected_ns[order[i]] <= kLongestNs &&
                           !begins[order[i]] && !waits_elsewhere(order[i]);
      if (!goes_on) {
        if (i < order.size()) begins[order[i]] = true;
        if (i > begin) add_segment(program, {order.data() + begin, order.data() + i});
        begin = i;
        ns = 0;
      }
      if (i < order.size()) ns += expected_ns[order[i]];
    }
  }
  count_waits(program);
}

void Schedule::count_waits(const Program& program) {
  initial_waiting.assign(program.size(), 0);
  follower_begin.assign(1, 0);
  followers.clear();
  for (std::int32_t v = 0; v < program.size(); ++v) {
    const bool in_place = program.kind[v] == Kind::kInput && !program.late(v);
    for (const std::int32_t s : program.successors_of(v)) {
      if (leader[s] == leader[v]) continue;
      followers.push_back(leader[s]);
      if (!in_place) ++initial_waiting[leader[s]];
    }
    follower_begin.push_back(static_cast<std::int32_t>(followers.size()));
  }
  initial_unissued = initial_waiting;
  for (Resource& resource : resources) {
    resource.initial.clear();
    for (const std::int32_t v : resource.order) {
      if (leader[v] == v && initial_waiting[v] == 0) resource.initial.push_back(v);
    }
    std::sort(resource.initial.begin(), resource.initial.end());
  }
}

}  // namespace disco
