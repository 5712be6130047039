// Device: streams on which ops and copies run in order, with monotone sequence numbers instead of callbacks.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "program.h"
#include "segments.h"

namespace disco {

// Runs the kernels of a program. Implemented by whoever knows what an op is (the torch side, a test).
class OpRunner {
 public:
  virtual ~OpRunner() = default;
  // Runs (host) or launches (cuda) op number `op` on compute stream `stream` of device `device`. Called by
  // one thread at a time per stream, always the same thread for a stream unless enter() allows others.
  // Failure is a std::exception; its what() reaches the user.
  virtual void run(std::int32_t op, int device, int stream) = 0;
  // Asked on the thread of a caller that waits: may it run ops in the loop thread's place, until leave()?
  // One thread at a time is inside.
  virtual bool enter() { return false; }
  virtual void leave() {}

  // Whether launches of `op` are alike in all steps in which it depends on the same (see depends_on): then
  // they may be recorded once and repeated.
  virtual bool repeats(std::int32_t /*op*/, int /*device*/) { return false; }
  // Before launches on a stream are recorded. What this launches is recorded too, and never run.
  virtual void before_recording(int /*device*/, int /*stream*/) {}
  // Appends what a launch of `op` depends on now beside the plan, always as many words: addresses of memory
  // that the caller gives anew for each step.
  virtual void depends_on(std::int32_t /*op*/, std::vector<std::uint64_t>& /*words*/) {}
  // The same for all ops: settings of the process by which kernels are chosen.
  virtual void settings(std::vector<std::uint64_t>& /*words*/) {}
};

// Position in a stream, counted from 1. A stream's work up to token t has finished when completed(stream) >=
// t.
using Token = std::uint64_t;

// Nanoseconds of std::chrono::steady_clock.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a lane is given to copy: all bytes of a vertex, or one of the pieces that it is copied in. Pieces of
// one vertex come in order; those of others may come between them.
struct Copy {
  std::int32_t vertex = -1;
  void* dst = nullptr;
  const void* src = nullptr;
  std::int64_t bytes = 0;
  std::int64_t before = 0;  // bytes of the vertex in earlier pieces
  std::int64_t behind = 0;  // in later ones

  bool first() const { return before == 0; }
  bool last() const { return behind == 0; }
};

constexpr int kMostCopies = 16;  // of one call

// How many whole copies a lane is given in one call, at most kMostCopies, and their bytes.
struct BatchLimits {
  int copies = 1;
  std::int64_t each = 0;
  std::int64_t all = 0;
};

// When one vertex ran, in steady_clock nanoseconds. Filled by the device while tracing.
struct Span {
  std::int64_t start = 0;
  std::int64_t end = 0;
};

// What went wrong on a device, of the first failure only.
struct DeviceFailure {
  std::int32_t vertex = -1;  // -1 if the device cannot tell
  std::string message;
  bool lost = false;   // the device refuses all further work of this process
  bool later = false;  // found after the launch: the message does not begin with the op's name
  std::vector<std::int32_t> in_flight = {};  // vertices that may be to blame, if `later`: the first few
  std::int32_t in_flight_count = 0;          // how many there are
};

// A segment that was launched as one: its parts have the tokens from `first` on. 0: it was not, and its
// kernels must be launched one by one.
struct Repeated {
  Token first = 0;
  std::vector<std::int32_t> barred = {};  // vertices that can be in no segment from the next step on
};

// What a device has made of segments.
struct GraphFigures {
  std::int64_t graphs = 0;
  std::int64_t kernels = 0;  // in them
  std::int64_t bytes = 0;    // of the device's memory that they take
  std::string refused = {};  // why there are none, or why the first kernel that was barred is in none
};

// Told by devices with threads of their own that some stream got further. Called on the device's thread right
// after the completion became visible; must not block and must not throw.
class ProgressListener {
 public:
  virtual ~ProgressListener() = default;
  virtual void on_progress() noexcept = 0;
};

// Streams are numbered 0 .. compute_streams() - 1 for kernels, then one lane per Direction (see lane()).
// Work on one stream runs in the order it was enqueued; different streams are ordered only by wait().
//
// Threads: all calls come from one thread at a time (the engine holds its state lock), except connect() and
// the destructor (before and after any use). No call but the constructor may allocate 4 KiB or more.
class Device {
 public:
  virtual ~Device() = default;

  // Called before connect() by an engine that has several devices: its loop thread serves them all, so no op
  // may run inside enqueue_op.
  virtual void use_threads() {}
  // Called once by the engine before any work: `index` is this device's number in the engine.
  virtual void connect(int index, OpRunner& runner, ProgressListener& listener) = 0;
  // Called once on the engine's loop thread, which is the thread that later calls enqueue_op.
  virtual void attach_loop_thread() {}

  virtual int compute_streams() const = 0;
  int lane(Direction direction) const { return compute_streams() + static_cast<int>(direction); }
  int streams() const { return compute_streams() + 3; }
  // True if enqueue_op on a compute stream runs the op before it returns.
  virtual bool runs_inline() const { return false; }
  // True if on_progress() is called after every completion, so that the engine may sleep; else it polls. Work
  // that has completed when its enqueue returns is not told of.
  virtual bool notifies() const { return false; }
  // How many kernels a stream takes at once, the running one among them, where they are short (kHorizonNs);
  // 0: the look-ahead is all.
  virtual int queue_room() const { return 0; }
  // True while an op is being executed by a thread of this process: slow is then not stalled.
  virtual bool computing() const { return false; }
  // True while the device's work waits for other work of the caller: a step that makes no progress has not
  // stalled.
  virtual bool waiting_for_caller() const { return false; }

  // Throw std::exception if the work could not be handed over; the engine blames `vertex`.
  virtual Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) = 0;
  virtual Token enqueue_copy(int stream, const Copy& copy) = 0;
  // Of copies that are ready together.
  virtual BatchLimits batch_limits() const { return {}; }
  // Several of them, none of which is cut or depends on another, in any order. All have finished when the
  // token has. If this throws, `blamed` is the vertex of the copy that was refused.
  virtual Token enqueue_copies(int stream, std::span<const Copy> copies, std::int32_t& blamed) {
    Token last = 0;
    for (const Copy& copy : copies) {
      blamed = copy.vertex;
      last = enqueue_copy(stream, copy);
    }
    return last;
  }
  // Whether repeat() may launch segments.
  virtual bool repeats() const { return false; }
  // Launches a segment as one on compute stream `stream`, if it was launched one by one in an earlier step,
  // and nothing that its kernels depend on has changed since it was recorded. Its first launch as one records
  // it, which takes memory. Throws like an enqueue.
  virtual Repeated repeat(int /*stream*/, const Segment& /*segment*/) { return {}; }
  // Between steps: these are all segments from now on.
  virtual void keep_graphs(const std::vector<Segment>& /*segments*/) {}
  virtual GraphFigures graph_figures() const { return {}; }
  // Everything enqueued on `stream` from now on starts after `token` of stream `other` of this device has
  // finished.
  virtual void wait(int stream, int other, Token token) = 0;
  // Token of the last work on `stream` that is known to have finished. Polls. An exception means that the
  // device can no longer tell: the engine fails the step and forgets what was in flight on that stream.
  virtual Token completed(int stream) = 0;
  // The last work of `stream` is wanted as soon as it has finished, whatever is enqueued behind it. Where
  // that costs a call, completed() may tell of a kernel without a mark together with later ones. Without any
  // mark it tells in the end, if it is asked twice and nothing was enqueued in between. Copies need no mark.
  // Throws std::exception like an enqueue.
  virtual void mark(int /*stream*/) {}

  // When the vertex whose work was last enqueued on `stream` is expected to end, with the pieces that are
  // still to come, in the time of now_ns(); INT64_MAX if the device cannot tell.
  virtual std::int64_t expected_end(int /*stream*/) const { return INT64_MAX; }

  // True once some work failed. Work that failed still counts as completed; what is queued behind it, on any
  // stream, is skipped (where the device can) and completes too. A failure is visible before the completion
  // of the failed work.
  virtual bool failed() const = 0;
  virtual DeviceFailure failure() const = 0;  // call only if failed()
  // Skip whatever has not started (where the device can), and finish what runs as soon as possible.
  virtual void cancel() {}
  // After all streams drained: forget failure and cancellation.
  virtual void recover() = 0;

  // Called before the first work of each step; steps are counted from 0.
  virtual void begin_step(std::uint64_t /*step*/) {}
  // How many ops of the step have run to their end: enqueued ones are dropped when a step ends early. Call
  // when nothing is in flight; 0 for a device that does not count them.
  virtual std::int64_t ops_run() const { return 0; }
  // Whether `vertex`, whose work was handed over and has completed, was run to its end: it was not if it was
  // skipped or cut short. Call when nothing is in flight.
  virtual bool ran(std::int32_t /*vertex*/) const { return true; }
  // From here on write spans[vertex] for every vertex that runs; nullptr = stop. Only while no work is
  // enqueued.
  virtual void trace(Span* spans, std::int32_t vertices) = 0;
  // Called when the step's work has drained, before spans are read.
  virtual void finish_trace() {}
};

}  // namespace disco
