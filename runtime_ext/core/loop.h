// Engine::Loop: the loop thread, its state, and how callers and device threads talk to it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "schedule.h"
#include "scope.h"
#include "timing.h"

namespace disco {

// What failed, as far as there is memory to say so: the loop goes on whatever happens.
inline DeviceFailure failure_of(const Device& device) noexcept {
  try {
    return device.failure();
  } catch (const std::bad_alloc&) {
    return {-1, kOutOfMemory};
  }
}

// Three groups of state, each with its own lock, taken in this order if together:
// 1. the step (state_mutex_): held by the loop thread except while it sleeps and while an inline op runs
// beside copies.
//    A device thread that has just finished something stands in for a loop thread that is busy or asleep
//    (on_progress): it books what has completed and launches what that made ready. So a copy never waits for
//    an op to end. Device threads only try the lock; one that fails leaves a note in pending_, which whoever
//    unlocks must read.
// 2. what the caller sees (caller_mutex_).
// 3. the sleep of whoever runs the loop (Sleeper) and the commands that end it.
//
// A caller that waits while the loop thread sleeps runs the loop in its place (drive), which saves two
// hand-offs between threads for each wait. `driven_` says so; the loop thread then stays asleep until the
// caller is gone.
class Engine::Loop final : public ProgressListener {
 public:
  Loop(Program program, std::vector<std::unique_ptr<Device>> devices, OpRunner& runner,
       EngineOptions options);
  ~Loop() override;

  void begin(Next next);
  Status wait_out(double timeout);
  void deliver(Next next);
  Status wait_end(double timeout);
  bool abort(double timeout);
  void set_source(std::int32_t vertex, const void* src);
  void set_target(std::int32_t vertex, void* dst);
  void invalidate(const std::vector<std::int32_t>& in_place);
  bool holds_residents() const;
  EngineError last_error() const;
  StepCounters counters() const;
  std::int64_t ops_run(int device) const { return devices_.at(static_cast<std::size_t>(device))->ops_run(); }
  bool ran(std::int32_t vertex) const;
  void set_tracing(bool on);
  std::vector<TraceEvent> events() const;
  GraphFigures graph_figures() const;
  const Program& program() const { return program_; }

  void on_progress() noexcept override;

 private:
  enum class Phase : std::uint8_t { kIdle, kLoading, kRunning, kDraining };
  enum class State : std::uint8_t { kWaiting, kCandidate, kReady, kIssued, kDone };
  enum Command : std::uint32_t { kBegin = 1, kDeliver = 2, kAbort = 4, kQuit = 8 };
  using Lock = std::unique_lock<std::mutex>;

  // loop.cpp: the thread, and a caller in its place
  void run();
  void attach();
  bool obey();
  bool turn(Lock& lock);
  bool drive(std::int64_t deadline_ns, bool for_end);
  bool told(bool for_end);
  void hand_back(Lock& lock);
  void park(Lock& lock, std::int64_t deadline_ns);
  void sleep(Lock& lock, std::int64_t deadline_ns, std::int64_t due_ns = kNever);
  std::int64_t next_due(std::int64_t now) const;
  void poll_later(Lock& lock);
  void wake();
  void command(Command bit, Next next = Next::kAnything);
  bool wake_needed();
  void require_not_running(std::int32_t vertex, const char* what) const;
  bool inline_ready();
  bool at_gate() const { return in_flight_ == 0 && !gate_open_ && outs_left_ == 0; }

  // loop.cpp: the life of a step
  void start_step();
  void list_loads();
  void start_running();
  void open_gate();
  void settle();
  void end_step();
  void stop(Status status, std::int32_t vertex, std::string message, Unfinished unfinished = {});
  void tell_outs();
  void tell_of_drain();
  bool stalled_for(std::int64_t now);
  void stall();
  Unfinished unfinished() const;
  Status wait(double timeout, bool for_end);
  std::vector<std::int64_t> ready_times() const;

  // launch.cpp: completions and launches
  bool pump();
  bool poll();
  bool poll_stream(StreamState& stream);
  void finish(std::int32_t v);
  void make_ready(std::int32_t v);
  void make_candidate(std::int32_t v);
  bool issue();
  bool issue_loads();
  bool issue_kernels(Resource& resource);
  std::int32_t next_ready(Resource& resource);
  std::int32_t next_candidate(Resource& resource);
  void take(Resource& resource, ReadyQueue& queue);
  int stream_for_candidate(Resource& resource, std::int32_t v);
  bool may_queue(Resource& resource, const StreamState& stream, std::int32_t v);
  bool is_next(Resource& resource, std::int32_t v);
  void stop(DeviceFailure failure);
  void refuse(Device& device, std::int32_t v, std::string message);
  bool launch_kernel(Resource& resource, ReadyQueue& queue, std::int32_t v, int stream);
  bool launch_alone(const Resource& resource, std::int32_t v, int stream, bool overtakes);
  bool launch_segment(const Resource& resource, const Segment& segment, int stream, bool overtakes);
  void tell_of_launch(std::int32_t v);
  void cut_segments();
  bool launch(std::int32_t v, int stream) { return launch(v, stream, program_.bytes[v]); }
  bool launch(std::int32_t v, int stream, std::int64_t bytes);
  // Whether a copy has pieces in its lane, or behind it, and others that are still to come.
  bool partly_launched(std::int32_t v) const {
    return handed_over_[v] > 0 && handed_over_[v] < program_.bytes[v];
  }
  void note_issued(std::int32_t v, int index);

  // launch_copies.cpp
  bool issue_copies(Resource& resource);
  bool launch_next_piece(Resource& resource, std::int32_t v);
  bool may_join(const Resource& resource, std::int32_t v, std::int64_t bytes) const;
  bool launch_batch(Resource& resource, std::int32_t v);
  Copy next_piece(std::int32_t v, std::int64_t bytes) const;
  void count_bytes(std::int32_t v, std::int64_t bytes);
  void book_if_done(StreamState& stream);

  bool run_inline(Lock& lock);
  void run_inline_vertex(Resource& resource, std::int32_t v, Lock& lock);
  bool sequential() const { return options_.dispatch >= Dispatch::kFixed; }

  Program program_;
  const EngineOptions options_;
  std::vector<std::unique_ptr<Device>> devices_;
  Schedule schedule_;
  bool notified_ =
      true;  // every device tells of its progress, so the loop thread may sleep while work is in flight
  bool drivable_ = false;  // its ops run on the thread that runs the loop, and it is told of all progress
  bool timed_ = false;
  OpRunner& runner_;

  std::mutex state_mutex_;
  std::atomic<bool> pending_{false};
  Phase phase_ = Phase::kIdle;
  bool asleep_ = false;              // whoever runs the loop
  std::atomic<bool> driven_{false};  // a caller runs the loop; changes under state_mutex_
  bool gate_open_ = false;
  bool outs_told_ = false;
  bool drain_told_ = false;  // that what is in flight does not end
  bool residents_valid_ =
      false;  // changes while active_: who finds that false, under caller_mutex_, may read it
  bool traced_ = false;
  bool barred_ = false;  // kernels that can be in no segment from the next step on
  std::vector<State> state_;
  std::vector<std::int32_t> waiting_;
  std::vector<std::int32_t> unissued_;
  std::vector<std::int16_t> stream_of_;
  std::vector<Token> token_of_;
  std::vector<std::int64_t> handed_over_;  // of each copy: bytes that its lane has been given
  std::vector<std::int64_t> issued_ns_;    // while tracing
  std::vector<Span> spans_;                // while tracing
  Random random_;
  std::size_t serial_next_ = 0;
  std::vector<std::int32_t> loads_;  // residents that this step begins with loading
  std::size_t loads_issued_ = 0;
  std::int32_t loads_left_ = 0;
  std::int32_t left_ = 0;
  std::int32_t outs_left_ = 0;
  std::int32_t in_flight_ = 0;
  bool ended_at_once_ = false;  // pump() is not done: a copy has ended since it last looked for what is ready
  std::uint64_t completions_ = 0;
  std::uint64_t completions_seen_ = 0;
  std::int64_t quiet_since_ns_ = 0;
  std::int64_t begin_ns_ = 0;
  std::int64_t gate_since_ns_ = 0;
  std::int64_t parked_since_ns_ = 0;
  std::int64_t gate_opened_ns_ = 0;  // while tracing
  std::int64_t running_ns_ = 0;      // while tracing: the residents were in place
  int polls_ = 0;
  StepCounters step_;

  mutable std::mutex caller_mutex_;
  std::condition_variable caller_wakes_;
  int waiters_ = 0;          // callers inside wait()
  std::uint64_t epoch_ = 0;  // steps begun
  bool begun_ = false;
  bool active_ = false;
  bool outs_done_ = false;
  bool ended_ = false;
  bool delivered_ = false;
  bool invalidated_ = false;
  std::vector<bool> in_place_;  // while invalidated_: residents that need no load
  bool tracing_ = false;
  EngineError error_;
  StepCounters counters_;

  Sleeper loop_sleeper_;
  Sleeper caller_sleeper_;
  std::atomic<std::uint32_t> commands_{0};

  std::string attach_error_;
  std::thread thread_;
};

}  // namespace disco
