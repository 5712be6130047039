// Schedule: what the engine knows about a Program before any step, and the ready queues a step runs on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device.h"
#include "engine.h"
#include "program.h"
#include "random.h"
#include "segments.h"

namespace disco {

// Vertices that may be launched. Room for all of them is made once, so push never allocates.
class ReadyQueue {
 public:
  // With a generator the next vertex is any, otherwise the first in serial order.
  void prepare(std::size_t capacity, Random* random) {
    items_.reserve(capacity);
    random_ = random;
  }
  // `vertices` ascending.
  void assign(std::span<const std::int32_t> vertices) { items_.assign(vertices.begin(), vertices.end()); }
  void clear() { items_.clear(); }
  bool empty() const { return items_.empty(); }
  void push(std::int32_t v) {
    items_.push_back(v);
    if (random_ == nullptr) std::push_heap(items_.begin(), items_.end(), std::greater<>());
  }
  // The vertex that pop() would remove; in random mode the choice is made here.
  std::int32_t top() {
    if (random_ != nullptr) std::swap(items_.front(), items_[random_->below(items_.size())]);
    return items_.front();
  }
  // Removes the vertex that the last top() returned.
  void pop() {
    if (random_ == nullptr) {
      std::pop_heap(items_.begin(), items_.end(), std::greater<>());
    } else {
      std::swap(items_.front(), items_.back());
    }
    items_.pop_back();
  }

 private:
  std::vector<std::int32_t> items_;
  Random* random_ = nullptr;
};

// A stream of a device as the engine sees it: what is in flight on it, oldest first.
struct StreamState {
  struct Entry {
    std::int32_t vertex;
    Token token;
    std::int64_t due_ns;                        // Device::expected_end of a copy
    std::int64_t ns;                            // Schedule::expected_ns of a kernel
    bool last;                                  // no piece of the vertex comes behind it
    std::span<const std::int32_t> others = {};  // vertices that end with it, and were launched as one with it
  };

  int device = 0;
  int stream = 0;
  std::vector<Entry> ring;
  std::vector<std::int32_t> batches;  // of a copy lane: room for kMostCopies vertices of each entry
  int head = 0;
  int count = 0;
  std::int64_t queued_ns = 0;    // expected of all that is in flight
  std::int64_t unmarked_ns = 0;  // of what was launched since the last Device::mark

  const Entry& front() const { return ring[head]; }
  const Entry& entry(int i) const { return ring[(head + i) % static_cast<int>(ring.size())]; }
  // For the vertices of the entry that is pushed next.
  std::span<std::int32_t> next_batch() {
    const auto next = static_cast<std::size_t>(head + count) % ring.size();
    return std::span(batches).subspan(next * kMostCopies, kMostCopies);
  }
  void push(const Entry& entry) {
    ring[(head + count++) % static_cast<int>(ring.size())] = entry;
    queued_ns += entry.ns;
    unmarked_ns += entry.ns;
  }
  void pop() {
    queued_ns -= front().ns;
    head = head + 1 == static_cast<int>(ring.size()) ? 0 : head + 1;
    --count;
  }
};

// All compute streams of a device together, or one of its copy lanes: vertices of a resource compete for it.
struct Resource {
  int device = 0;
  int first_stream = 0;  // index into Schedule::streams
  int stream_count = 1;
  bool copy = false;
  int window = 1;                   // vertices, or pieces or batches of copies, in flight on one stream
  std::int64_t horizon_ns = 0;      // more kernels than that while those behind the running one are so short
  std::int64_t piece = 0;           // bytes; 0: copies are not cut
  BatchLimits batch;                // of copies in one call
  int room = 1;                     // kernels in flight on one stream, however short
  std::vector<std::int32_t> order;  // its vertices in the order of kFixed
  std::vector<std::int32_t> initial;  // ready when a step starts, ascending
  ReadyQueue ready;
  ReadyQueue candidates;  // kernels that wait only for kernels issued to the same device
  std::size_t next = 0;   // position in order: all before were launched

  bool has_room(const StreamState& stream) const {
    if (stream.count < window) return true;
    return stream.queued_ns - stream.front().ns < horizon_ns && stream.count < room;
  }
};

// What a stream that can take them has queued behind its running kernel. A GPU never idles if the loop thread
// comes back before the queue is empty. It hears of completions once for each half, so it has half of this: a
// turn submits some 3 kernels to each other device and 2 pieces to each lane, at 5 to 20 us each. Plans say
// more than a kernel's time where its launch takes longer, so that the queue may last half as long. A longer
// one gains nothing and delays the end of a step that is given up.
constexpr std::int64_t kHorizonNs = 200'000;
// No kernel takes less, with its start.
constexpr std::int64_t kShortestNs = 4'000;

// Everything derived from the program once; the arrays named initial_* are copied over the live ones at each
// begin.
struct Schedule {
  Schedule(const Program& program, const std::vector<std::unique_ptr<Device>>& devices, OpRunner& runner,
           const EngineOptions& options);
  // From the next cut_segments() on vertex `v` is in no segment.
  void bar(std::int32_t v) { may_repeat[v] = false; }
  // Between steps: finds the segments among what may be repeated. What waits for a kernel of a segment from
  // outside waits for its first: `leader` has it, and the counts below are of leaders alone.
  void cut_segments(const Program& program);

  std::vector<StreamState> streams;
  std::vector<Resource> resources;
  std::vector<bool> may_repeat;  // of each vertex: it may be in a segment
  std::vector<bool> begins;      // of each kernel: no segment goes on from the kernel before it
  std::vector<Segment> segments;
  std::vector<std::int32_t> segment_of;      // of the first vertex of each segment; -1 for all others
  std::vector<std::int32_t> follower_begin;  // rows of what waits for a vertex: leaders of other segments
  std::vector<std::int32_t> followers;
  std::vector<std::int32_t> leader;             // of each vertex: the first of its segment, or itself
  std::vector<std::int16_t> resource_of;        // of each vertex; -1 for inputs
  std::vector<std::int32_t> predecessor_begin;  // rows of predecessors, inputs left out
  std::vector<std::int32_t> predecessors;
  std::vector<std::int32_t> initial_waiting;  // predecessors yet to finish, inputs in place at begin left out
  std::vector<std::int32_t>
      initial_unissued;  // those of them that are not kernels of the same device, plus kernels not issued
  std::vector<std::int32_t> serial;  // every vertex that runs, in the order of kSynchronous
  std::vector<std::int32_t> late;
  std::vector<bool> leaves;               // of each kernel: somebody outside of its stream waits for its end
  std::vector<std::int64_t> expected_ns;  // of each kernel, from kShortestNs to kHorizonNs
  std::vector<bool> behind_gate;          // waits, however indirectly, for a late input
  std::vector<std::int32_t> residents;
  std::int32_t runnable = 0;  // vertices that are no inputs
  std::int32_t outs = 0;      // out vertices among them
  bool any_inline = false;    // some device runs ops on the loop thread
  bool lookahead = false;     // false where it cannot matter: K = 0, synchronous, inline compute

  std::span<const std::int32_t> followers_of(std::int32_t v) const {
    return {followers.data() + follower_begin[v], followers.data() + follower_begin[v + 1]};
  }
  std::span<const std::int32_t> predecessors_of(std::int32_t v) const {
    return {predecessors.data() + predecessor_begin[v], predecessors.data() + predecessor_begin[v + 1]};
  }

 private:
  void make_resources(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                      const EngineOptions& options);
  void count_edges(const Program& program);
  void make_orders(const Program& program);
  void find_repeating(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                      OpRunner& runner, const EngineOptions& options);
  void add_segment(const Program& program, std::span<const std::int32_t> vertices);
  bool waits_elsewhere(std::int32_t v) const;
  void count_waits(const Program& program);
};

}  // namespace disco
