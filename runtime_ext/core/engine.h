// Engine: runs a Program on devices, step after step. One loop thread launches; it is parked between steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "program.h"

namespace disco {

// Which of the ready vertices of a resource (all compute streams of a device; each copy lane) is launched
// next.
enum class Dispatch : std::uint8_t {
  kPriority,     // the first in serial order
  kRandom,       // any, by a seeded generator
  kFixed,        // each resource runs its vertices in serial order, whatever is ready
  kSynchronous,  // one vertex at a time in serial order; nothing overlaps
};

struct EngineOptions {
  Dispatch dispatch = Dispatch::kPriority;
  std::uint64_t seed = 0;  // of kRandom; step i uses a stream of its own, so steps differ
  // K: kernels queued on a stream beyond the running one, and more on a GPU while they are short
  // (kHorizonNs); 0 = launch after completion.
  int lookahead = 2;
  // Copies, pieces of them, or batches of small ones (Device::batch_limits), that a lane has at once, the
  // running one included.
  int copy_depth = 2;
  // Bytes of a piece of a copy from or to the host; 0 = copies are not cut. Behind each piece the first ready
  // copy in serial order goes on: one that becomes ready waits for pieces, not for whole copies.
  std::int64_t copy_piece = 0;
  double stall_timeout =
      120;                // seconds without a completion while work is in flight and no host op is running
  bool graphs = false;    // kernels that follow each other are launched as one where the device can
  bool time_ops = false;  // measure StepCounters::op_ns also when not tracing (about 50 ns per vertex)
};

enum class Status : std::uint8_t {
  kDone,     // what was waited for has happened
  kTimeout,  // not yet; wait again
  kFailed,   // a vertex failed; see last_error(). Everything has drained unless `draining` is set there
  kStalled,  // no progress; see last_error()
  kAborted,  // abort() was called
  kIdle,     // no step was begun
};

// What the caller does after begin() or deliver().
enum class Next : std::uint8_t {
  kAnything,
  kWait,  // waits, at once: the loop thread need not be woken if the caller's can do its work
};

// A vertex that was not launched, and one of its predecessors that had not finished; -1 if all had.
struct Waiting {
  std::int32_t vertex = -1;
  std::int32_t waits_for = -1;
  bool operator==(const Waiting&) const = default;
};

// Vertices that had not finished when a step ended early: the first kNamed of each kind, and how many there
// were.
struct Unfinished {
  static constexpr std::int32_t kNamed = 8;

  std::vector<std::int32_t> in_flight;
  std::vector<Waiting> waiting;
  std::int32_t in_flight_count = 0;
  std::int32_t waiting_count = 0;
};

// Why the last step ended early.
struct EngineError {
  Status status = Status::kDone;  // kFailed, kStalled or kAborted
  std::int32_t vertex = -1;       // index in the Program; -1 if none can be named
  bool draining = false;  // something is still in flight and does not end; begin() is refused until it does
  bool lost = false;      // kFailed: a device refuses all further work of this process
  bool later = false;     // kFailed: found by a device after the launch, so the vertex is a guess
  std::string message;    // the op's own message
  Unfinished unfinished = {};  // kStalled; of a failure found `later` the vertices in flight alone
};

// One vertex of a traced step, nanoseconds since Engine::begin(). Inputs have no event, except residents
// being loaded.
struct TraceEvent {
  std::int32_t vertex = -1;
  std::int16_t device = 0;
  std::int16_t stream = 0;  // stream of the device: compute streams first, then the lanes (Device::lane)
  std::int64_t ready = 0;   // its last predecessor ended. Look-ahead may issue a kernel before that
  std::int64_t issue = 0;   // handed to the device
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::int64_t bytes = 0;  // of copies
};

// Of the last step.
struct StepCounters {
  std::uint64_t steps = 0;          // steps that ran to their end, since construction
  std::int64_t vertices = 0;        // launched in the last step
  std::int64_t offload_bytes = 0;   // device to host
  std::int64_t reload_bytes = 0;    // host to device, residents' loads included
  std::int64_t transfer_bytes = 0;  // device to device
  std::int64_t launches = 0;        // of kernels, those of several as one
  std::int64_t changes = 0;         // of `vertices`: those that change a state, were it but in part
  std::int64_t step_ns = 0;         // begin() to the end of the last vertex, the wait for deliver() included
  std::int64_t gate_ns = 0;         // of step_ns: nothing left to do but wait for deliver()
  std::int64_t op_ns = 0;           // inside inline ops; 0 unless time_ops or tracing
  std::int64_t parked_ns = 0;       // the loop thread slept: nothing to launch. 0 unless time_ops or tracing
  // The engine's own cost: step_ns - op_ns - parked_ns. 0 unless time_ops or tracing.
  std::int64_t loop_ns = 0;
};

// Life of a step:  begin() -> wait_out() -> deliver() -> wait_end()  -> begin() ...
// A program without late inputs needs no deliver(). After kFailed / kStalled / kAborted the step is over; the
// next begin() loads the residents again.
//
// Threads: meant for one caller at a time, and abort() from any thread. Calls from several threads do no
// harm: each has its effect, or is refused with std::logic_error. In a process forked after the constructor
// every call throws std::logic_error, and the destructor leaves the engine's memory behind: its threads
// stayed in the parent.
//
// Starts a vertex only when all its predecessors have finished, or, within the look-ahead window, when those
// that have not are kernels already issued to the same device, which the stream then waits for. Never queues
// behind a copy. In a step the engine allocates nothing.
class Engine {
 public:
  // Throws std::invalid_argument with Program::validate's message.
  Engine(Program program, std::vector<std::unique_ptr<Device>> devices, OpRunner& runner,
         EngineOptions options);
  ~Engine();  // aborts a running step and waits until it has drained
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts a step and returns at once. Memory written by the caller before is visible to the ops.
  // Throws std::logic_error if the step before has not ended, or is still draining after a stall, or if
  // another thread waits inside.
  void begin(Next next = Next::kAnything);
  // Returns when every out vertex has finished. Meanwhile and afterwards whatever is ready is launched.
  // timeout in seconds; 0 polls. Where ops run inline, the caller's thread may run them itself meanwhile
  // (OpRunner::enter): the loop thread takes over when it returns. Otherwise it sleeps.
  Status wait_out(double timeout);
  // Opens the gate: completes the late inputs. Throws std::logic_error if no step is running or it was done
  // already; does nothing in a step that has failed.
  void deliver(Next next = Next::kAnything);
  Status wait_end(double timeout);
  // Stops launching and waits until what runs has finished. False if that took longer than timeout seconds
  // (the step is still draining; call again). Without a running step returns true at once.
  bool abort(double timeout);
  // From now on copy `vertex` reads from `src`: foreign memory that changes from step to step. Call between
  // steps, or before deliver() for a copy that waits for a late input; else it throws std::logic_error.
  void set_source(std::int32_t vertex, const void* src);
  // The same for where it writes to.
  void set_target(std::int32_t vertex, void* dst);
  // The arena's residents no longer hold what the host holds: the next begin() loads them again, all but
  // those `in_place`, which the caller knows to hold it. That list is for that step alone, and a later call
  // replaces it. Throws std::out_of_range for a vertex that does not exist.
  void invalidate(const std::vector<std::int32_t>& in_place = {});
  // Whether the residents hold what the host held when they were loaded: the last step ran to its end, and
  // nothing has invalidated them since. False while a step runs.
  bool holds_residents() const;

  EngineError last_error() const;
  const Program& program() const;
  StepCounters counters() const;  // call between steps
  // Of the last step: ops that a device in host memory has run to their end. Call between steps. Throws
  // std::out_of_range for a device that does not exist.
  std::int64_t ops_run(int device) const;
  // Whether `vertex`, no input, has run to its end in the last step. Call between steps.
  bool ran(std::int32_t vertex) const;
  // Of all devices together; `refused` is that of the first that has one. Call between steps.
  GraphFigures graph_figures() const;
  void set_tracing(bool on);  // call between steps
  // Of the last step if it was traced, by start time. Throws std::logic_error while a step runs.
  std::vector<TraceEvent> events() const;

 private:
  class Loop;
  Loop& loop() const;
  std::unique_ptr<Loop> loop_;
  long pid_;  // of the process that has the threads
};

}  // namespace disco
