#include "loop.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "scope.h"

namespace disco {
namespace {

constexpr int kSpins = 4096;                   // polls before the loop thread starts to sleep between them
constexpr std::int64_t kPollSleepNs = 50'000;  // that sleep

void check(const EngineOptions& options) {
  if (options.lookahead < 0) throw std::invalid_argument("engine: lookahead must not be negative");
  if (options.copy_depth < 1) throw std::invalid_argument("engine: copy_depth must be at least 1");
  if (options.copy_piece < 0) throw std::invalid_argument("engine: copy_piece must not be negative");
  if (!(options.stall_timeout > 0.0)) throw std::invalid_argument("engine: stall_timeout must be positive");
}

const Program& checked(const Program& program, const std::vector<std::unique_ptr<Device>>& devices,
                       const EngineOptions& options) {
  check(options);
  const std::string message = program.validate(static_cast<int>(devices.size()));
  if (!message.empty()) throw std::invalid_argument(message);
  if (devices.size() > 1) {
    for (const auto& device : devices) device->use_threads();
  }
  return program;
}

}  // namespace

Engine::Loop::Loop(Program program, std::vector<std::unique_ptr<Device>> devices, OpRunner& runner,
                   EngineOptions options)
    : program_(std::move(program)),
      options_(options),
      devices_(std::move(devices)),
      schedule_(checked(program_, devices_, options_), devices_, runner, options_),
      runner_(runner) {
  const auto n = static_cast<std::size_t>(program_.size());
  state_.resize(n);
  waiting_.resize(n);
  unissued_.resize(n);
  stream_of_.resize(n);
  token_of_.resize(n);
  handed_over_.resize(n);
  in_place_.resize(n);
  loads_.reserve(schedule_.residents.size());
  Random* random = options_.dispatch == Dispatch::kRandom ? &random_ : nullptr;
  for (Resource& resource : schedule_.resources) {
    resource.ready.prepare(resource.order.size(), random);
    resource.candidates.prepare(resource.copy ? 0 : resource.order.size(), random);
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    devices_[i]->connect(static_cast<int>(i), runner, *this);
    notified_ = notified_ && devices_[i]->notifies();
  }
  drivable_ = notified_ && devices_.size() == 1 && devices_.front()->runs_inline();
  thread_ = std::thread([this] { run(); });
  Lock lock(caller_mutex_);
  caller_wakes_.wait(lock, [this] { return ended_; });
  if (attach_error_.empty()) return;
  lock.unlock();
  thread_.join();
  throw std::runtime_error(attach_error_);
}

Engine::Loop::~Loop() {
  abort(1e9);
  {
    const Lock lock(caller_mutex_);
    command(kQuit);
  }
  thread_.join();
  devices_
      .clear();  // their threads may still be inside on_progress(): nothing else of this object may go before
}

void Engine::Loop::attach() {
  std::string error;
  try {
    for (auto& device : devices_) device->attach_loop_thread();
  } catch (const std::exception& failure) {
    error = what_of(failure);
  }
  const Lock lock(caller_mutex_);
  attach_error_ = std::move(error);
  ended_ = true;
  caller_wakes_.notify_all();
}

void Engine::Loop::run() {
  want_exact_timers();
  attach();
  if (!attach_error_.empty()) return;
  Lock lock(state_mutex_);
  for (;;) {
    if (commands_.load(std::memory_order_relaxed) != 0 && !obey()) return;
    if (!turn(lock) && commands_.load(std::memory_order_relaxed) == 0) park(lock, kNever);
  }
}

// Launches what is ready, or runs one inline op. Returns whether anything happened.
bool Engine::Loop::turn(Lock& lock) {
  const bool pumped = pump();
  const bool moved = (phase_ == Phase::kRunning && run_inline(lock)) || pumped;
  if (moved) polls_ = 0;
  return moved;
}

// Runs the loop on a caller's thread, until it has what it waits for or the deadline is over. False without
// having done anything if the loop thread is at work, or if the ops must run on that. What enter() throws
// leaves the step to the loop thread.
bool Engine::Loop::drive(std::int64_t deadline_ns, bool for_end) {
  Lock lock(state_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  bool entered = false;
  {
    const Finally refused([&] {
      if (entered) return;
      lock.unlock();
      if (pending_.exchange(false)) on_progress();
    });
    entered = !driven_ && asleep_ && runner_.enter();
  }
  if (!entered) return false;
  const int timers = want_exact_timers();
  driven_ = true;
  asleep_ = false;
  const Finally driven([&] {
    runner_.leave();
    hand_back(lock);
    put_timers_back(timers);
  });
  if (timed_ && phase_ != Phase::kIdle) step_.parked_ns += now_ns() - parked_since_ns_;
  do {
    // kQuit is for the loop thread.
    if ((commands_.load() & ~kQuit) != 0) obey();
    if (!turn(lock) && (commands_.load() & ~kQuit) == 0 && !told(for_end)) park(lock, deadline_ns);
  } while (!told(for_end) && now_ns() < deadline_ns);
  return true;
}

// Whether a caller that waits has its answer.
bool Engine::Loop::told(bool for_end) {
  if (phase_ == Phase::kIdle || (outs_told_ && !for_end)) return true;
  if (phase_ != Phase::kDraining) return false;
  const Lock lock(caller_mutex_);
  return error_.draining;
}

// The loop thread takes over, and stays asleep if there is nothing to do before the next command.
void Engine::Loop::hand_back(Lock& lock) {
  while (pump()) {
  }
  const std::int64_t now = now_ns();
  const bool gated = phase_ == Phase::kRunning && at_gate() && !inline_ready();
  if (gated && gate_since_ns_ == 0) gate_since_ns_ = now;
  const bool rest = phase_ == Phase::kIdle || gated;
  parked_since_ns_ = now;
  asleep_ = true;
  driven_ = false;
  lock.unlock();
  if (pending_.exchange(false) || !rest || commands_.load() != 0) loop_sleeper_.wake();
}

bool Engine::Loop::obey() {
  const std::uint32_t commands = commands_.fetch_and(driven_ ? std::uint32_t{kQuit} : 0U);
  if ((commands & kBegin) != 0) start_step();
  if ((commands & kDeliver) != 0) open_gate();
  if ((commands & kAbort) != 0 && phase_ != Phase::kIdle) stop(Status::kAborted, -1, "aborted");
  return driven_ || (commands & kQuit) == 0;
}

// Under caller_mutex_, so that a command can only reach the step it was meant for: begin() drops those of the
// step before.
void Engine::Loop::command(Command bit, Next next) {
  if (bit == kBegin) commands_.store(0);
  commands_.fetch_or(bit);
  if (next != Next::kWait || !drivable_) wake();
}

void Engine::Loop::wake() { (driven_ ? caller_sleeper_ : loop_sleeper_).wake(); }

// Nothing to launch and nothing has completed: sleep, at most until the deadline, or find out that nothing
// ever will.
void Engine::Loop::park(Lock& lock, std::int64_t deadline_ns) {
  const std::int64_t now = now_ns();
  parked_since_ns_ = now;
  if (phase_ == Phase::kIdle) {
    sleep(lock, deadline_ns);
  } else if (at_gate()) {
    if (gate_since_ns_ == 0) gate_since_ns_ = now;
    sleep(lock, deadline_ns);
  } else if (phase_ == Phase::kRunning && in_flight_ == 0) {
    stall();
    return;
  } else if (!drain_told_ && stalled_for(now)) {
    stall();
    return;
  } else if (notified_) {
    const auto timeout = static_cast<std::int64_t>(std::min(options_.stall_timeout, 1e9) * 1e9);
    const std::int64_t stalled = drain_told_ ? kNever : quiet_since_ns_ + timeout;
    sleep(lock, std::min(deadline_ns, stalled), next_due(now));
  } else {
    poll_later(lock);
  }
  if (timed_) step_.parked_ns += now_ns() - parked_since_ns_;
}

// Until wake() or `deadline_ns`. `due_ns`: when wake() is expected; kNever if nobody knows.
void Engine::Loop::sleep(Lock& lock, std::int64_t deadline_ns, std::int64_t due_ns) {
  const bool driver = driven_;
  Sleeper& sleeper = driver ? caller_sleeper_ : loop_sleeper_;
  polls_ = 0;
  asleep_ = true;
  lock.unlock();
  bool noted = pending_.exchange(false);
  if (!noted) sleeper.doze(deadline_ns, due_ns);
  lock.lock();
  while (!driver && driven_) {
    lock.unlock();
    // What was noted before, or while this thread had the lock, is for the caller.
    if (pending_.exchange(false) || std::exchange(noted, false)) on_progress();
    sleeper.doze(kNever, kNever);
    lock.lock();
  }
  asleep_ = false;
}

// When the next copy should end, where ops run on this thread and may be waiting for it.
std::int64_t Engine::Loop::next_due(std::int64_t now) const {
  std::int64_t due = kNever;
  if (phase_ != Phase::kRunning || !schedule_.any_inline) return due;
  for (const StreamState& stream : schedule_.streams) {
    if (stream.count > 0) due = std::min(due, std::max(now, stream.front().due_ns));
  }
  return due;
}

// For devices that must be asked: at first at once, then with the processor offered to others, at last with
// naps.
void Engine::Loop::poll_later(Lock& lock) {
  if (++polls_ < kSpins) {
    if (polls_ > kSpins / 16) std::this_thread::yield();
    return;
  }
  const int polls = polls_;
  sleep(lock, now_ns() + kPollSleepNs);
  polls_ = polls;
}

bool Engine::Loop::wake_needed() {
  if (phase_ == Phase::kIdle) return false;
  if (in_flight_ == 0) return true;  // the end, a gate to time, or a stall
  if (sequential()) return true;
  return inline_ready();
}

bool Engine::Loop::inline_ready() {
  for (Resource& resource : schedule_.resources) {
    if (resource.copy || !devices_[resource.device]->runs_inline()) continue;
    if (sequential() ? next_ready(resource) >= 0 : !resource.ready.empty()) return true;
  }
  return false;
}

void Engine::Loop::on_progress() noexcept {
  for (;;) {
    pending_.exchange(true);
    if (!notified_ || !state_mutex_.try_lock()) return;
    pending_.exchange(false);
    const bool outs_told = outs_told_;
    pump();
    const bool caller_done = driven_ && (phase_ == Phase::kIdle || outs_told_ != outs_told);
    const bool wake_up = asleep_ && (caller_done || wake_needed());
    state_mutex_.unlock();
    if (wake_up) wake();
    if (!pending_.exchange(false)) return;
  }
}

void Engine::Loop::start_step() {
  {
    const Lock lock(caller_mutex_);
    list_loads();
    traced_ = tracing_;
  }
  const std::uint64_t steps = step_.steps;
  step_ = {};
  step_.steps = steps;
  timed_ = traced_ || options_.time_ops;
  std::string refused;
  try {
    if (barred_) cut_segments();
    if (traced_) {
      issued_ns_.assign(state_.size(), 0);
      spans_.assign(state_.size(), Span{});
    }
    for (auto& device : devices_) device->begin_step(steps);
    for (auto& device : devices_) device->trace(traced_ ? spans_.data() : nullptr, program_.size());
  } catch (const std::exception& error) {
    refused = what_of(error);
    traced_ = false;  // there may be no room for what would be recorded
  }
  std::fill(state_.begin(), state_.end(), State::kWaiting);
  std::fill(handed_over_.begin(), handed_over_.end(), 0);
  std::copy(schedule_.initial_waiting.begin(), schedule_.initial_waiting.end(), waiting_.begin());
  std::copy(schedule_.initial_unissued.begin(), schedule_.initial_unissued.end(), unissued_.begin());
  random_.seed(options_.seed * 0x100000001b3ULL + steps);
  serial_next_ = loads_issued_ = 0;
  loads_left_ = static_cast<std::int32_t>(loads_.size());
  left_ = schedule_.runnable + static_cast<std::int32_t>(schedule_.late.size());
  outs_left_ = schedule_.outs;
  gate_open_ = schedule_.late.empty();
  outs_told_ = drain_told_ = false;
  gate_since_ns_ = 0;
  quiet_since_ns_ = begin_ns_;
  completions_seen_ = completions_;
  if (loads_left_ > 0) {
    phase_ = Phase::kLoading;
  } else {
    start_running();
  }
  if (!refused.empty()) stop(Status::kFailed, -1, std::move(refused));
}

// With caller_mutex_. A step that ends early has torn what it found in place: the one behind it loads all.
void Engine::Loop::list_loads() {
  loads_.clear();
  if (invalidated_ || !residents_valid_) {
    for (const std::int32_t v : schedule_.residents) {
      if (!invalidated_ || !in_place_[v]) loads_.push_back(v);
    }
  }
  invalidated_ = false;
}

void Engine::Loop::start_running() {
  phase_ = Phase::kRunning;
  if (traced_) running_ns_ = now_ns();
  for (Resource& resource : schedule_.resources) {
    resource.next = 0;
    resource.candidates.clear();
    resource.ready.clear();
    if (!sequential()) resource.ready.assign(resource.initial);
    for (const std::int32_t v : resource.initial) state_[v] = State::kReady;
  }
  // Look-ahead candidates need an unissued predecessor to start from, so there are none yet. A gate that was
  // opened while the residents were being loaded is booked now.
  if (gate_open_) {
    for (const std::int32_t v : schedule_.late) finish(v);
  }
}

void Engine::Loop::open_gate() {
  if (phase_ == Phase::kIdle || phase_ == Phase::kDraining || gate_open_) return;
  gate_open_ = true;
  if (traced_) gate_opened_ns_ = now_ns();
  if (gate_since_ns_ != 0) step_.gate_ns = now_ns() - gate_since_ns_;
  if (phase_ != Phase::kRunning) return;
  for (const std::int32_t v : schedule_.late) finish(v);
}

void Engine::Loop::settle() {
  if (phase_ == Phase::kRunning) {
    if (!outs_told_ && outs_left_ == 0) tell_outs();
    if (left_ == 0) end_step();
  } else if (phase_ == Phase::kDraining && in_flight_ == 0) {
    end_step();
  }
}

void Engine::Loop::tell_outs() {
  outs_told_ = true;
  const Lock lock(caller_mutex_);
  outs_done_ = true;
  caller_wakes_.notify_all();
}

void Engine::Loop::end_step() {
  const bool whole = phase_ == Phase::kRunning;
  bool lost = false;
  for (auto& device : devices_) {
    if (traced_) device->finish_trace();
    if (whole) continue;
    device->recover();
    lost = lost || (device->failed() && failure_of(*device).lost);
  }
  residents_valid_ = whole;
  phase_ = Phase::kIdle;
  step_.steps += whole ? 1 : 0;
  const std::int64_t now = now_ns();
  step_.step_ns = now - begin_ns_;
  if (timed_ && asleep_) step_.parked_ns += now - parked_since_ns_;  // a device thread has ended the step
  if (timed_) step_.loop_ns = step_.step_ns - step_.op_ns - step_.parked_ns;
  const Lock lock(caller_mutex_);
  counters_ = step_;
  error_.draining = false;
  error_.lost = error_.lost || lost;
  active_ = false;
  ended_ = true;
  caller_wakes_.notify_all();
}

// Launches nothing more; the step ends when what is in flight has drained.
void Engine::Loop::stop(Status status, std::int32_t vertex, std::string message, Unfinished unfinished) {
  if (phase_ == Phase::kDraining || phase_ == Phase::kIdle) return;
  phase_ = Phase::kDraining;
  for (auto& device : devices_) device->cancel();
  const Lock lock(caller_mutex_);
  error_ = {status,
            vertex,
            status == Status::kStalled && in_flight_ > 0,
            false,
            false,
            std::move(message),
            std::move(unfinished)};
  drain_told_ = error_.draining;
  quiet_since_ns_ = now_ns();
  if (status == Status::kStalled) caller_wakes_.notify_all();  // what hangs may never drain
}

// A step that was ended early does not drain either.
void Engine::Loop::tell_of_drain() {
  drain_told_ = true;
  const Lock lock(caller_mutex_);
  error_.draining = true;
  caller_wakes_.notify_all();
}

bool Engine::Loop::stalled_for(std::int64_t now) {
  const auto busy = [](const auto& device) { return device->computing() || device->waiting_for_caller(); };
  if (completions_ != completions_seen_ || std::any_of(devices_.begin(), devices_.end(), busy)) {
    completions_seen_ = completions_;
    quiet_since_ns_ = now;
  }
  return static_cast<double>(now - quiet_since_ns_) >= options_.stall_timeout * 1e9;
}

void Engine::Loop::stall() {
  if (phase_ == Phase::kDraining) {
    tell_of_drain();
    return;
  }
  std::int32_t oldest = -1;
  for (std::int32_t v = 0; v < program_.size() && oldest < 0; ++v) {
    if (state_[v] == State::kIssued) oldest = v;
  }
  Unfinished left;
  try {
    left = unfinished();
  } catch (const std::bad_alloc&) {
    left = {};  // that the step has stalled can be told without
  }
  stop(Status::kStalled, oldest, "no progress", std::move(left));
}

}  // namespace disco
