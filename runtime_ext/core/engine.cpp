#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "loop.h"
#include "scope.h"

namespace disco {
namespace {

std::chrono::steady_clock::time_point deadline(double seconds) {
  constexpr double kMaxSeconds = 1e9;
  const std::chrono::duration<double> wait(std::clamp(seconds, 0.0, kMaxSeconds));
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(wait);
}

}  // namespace

void Engine::Loop::begin(Next next) {
  const Lock lock(caller_mutex_);
  if (active_) {
    throw std::logic_error(error_.draining ? "begin: the step before is still draining"
                                           : "begin: the step before has not ended");
  }
  if (waiters_ > 0) throw std::logic_error("begin: another thread is waiting for the step before");
  begun_ = active_ = true;
  ++epoch_;
  outs_done_ = ended_ = delivered_ = false;
  error_ = {};
  begin_ns_ = now_ns();
  command(kBegin, next);
}

Status Engine::Loop::wait(double timeout, bool for_end) {
  Lock lock(caller_mutex_);
  if (!begun_) return Status::kIdle;
  const auto over = [&] {
    return ended_ || error_.draining || (!for_end && outs_done_ && error_.status == Status::kDone);
  };
  if (over()) return error_.status;
  ++waiters_;
  const Finally gone([this] { --waiters_; });  // with the lock, which every way out of here holds
  const auto until = deadline(timeout);
  if (drivable_) {
    lock.unlock();
    bool drove = false;
    // Also where this thread could not be made ready for ops: the loop's then runs them.
    const Finally left([&] {
      if (!drove && commands_.load() != 0) wake();
      lock.lock();
    });
    drove = timeout > 0.0 && drive(until.time_since_epoch().count(), for_end);
  }
  return caller_wakes_.wait_until(lock, until, over) ? error_.status : Status::kTimeout;
}

Status Engine::Loop::wait_out(double timeout) { return wait(timeout, false); }

Status Engine::Loop::wait_end(double timeout) { return wait(timeout, true); }

void Engine::Loop::deliver(Next next) {
  const Lock lock(caller_mutex_);
  if (error_.status != Status::kDone || (begun_ && schedule_.late.empty())) return;
  if (!active_) throw std::logic_error("deliver: no step is running");
  if (delivered_) throw std::logic_error("deliver: the late inputs of this step were delivered before");
  delivered_ = true;
  command(kDeliver, next);
}

bool Engine::Loop::abort(double timeout) {
  Lock lock(caller_mutex_);
  if (!active_) return true;
  command(kAbort);
  const auto over = [this, epoch = epoch_] { return !active_ || epoch_ != epoch; };
  return caller_wakes_.wait_until(lock, deadline(timeout), over);
}

void Engine::Loop::set_source(std::int32_t vertex, const void* src) {
  const Lock lock(caller_mutex_);
  require_not_running(vertex, "set_source");
  program_.src.at(static_cast<std::size_t>(vertex)) = src;
}

void Engine::Loop::set_target(std::int32_t vertex, void* dst) {
  const Lock lock(caller_mutex_);
  require_not_running(vertex, "set_target");
  program_.dst.at(static_cast<std::size_t>(vertex)) = dst;
}

void Engine::Loop::require_not_running(std::int32_t vertex, const char* what) const {
  if (active_ && (delivered_ || !schedule_.behind_gate.at(static_cast<std::size_t>(vertex)))) {
    throw std::logic_error(std::string(what) + ": vertex " + std::to_string(vertex) + " may be running");
  }
}

void Engine::Loop::invalidate(const std::vector<std::int32_t>& in_place) {
  const Lock lock(caller_mutex_);
  invalidated_ = true;
  std::fill(in_place_.begin(), in_place_.end(), false);
  for (const std::int32_t v : in_place) in_place_.at(static_cast<std::size_t>(v)) = true;
}

bool Engine::Loop::holds_residents() const {
  const Lock lock(caller_mutex_);
  return !active_ && !invalidated_ && residents_valid_;
}

EngineError Engine::Loop::last_error() const {
  const Lock lock(caller_mutex_);
  return error_;
}

bool Engine::Loop::ran(std::int32_t vertex) const {
  return state_.at(static_cast<std::size_t>(vertex)) == State::kDone &&
         devices_[static_cast<std::size_t>(program_.device[vertex])]->ran(vertex);
}

StepCounters Engine::Loop::counters() const {
  const Lock lock(caller_mutex_);
  return counters_;
}

GraphFigures Engine::Loop::graph_figures() const {
  GraphFigures all;
  for (const auto& device : devices_) {
    GraphFigures one = device->graph_figures();
    all.graphs += one.graphs;
    all.kernels += one.kernels;
    all.bytes += one.bytes;
    if (all.refused.empty()) all.refused = std::move(one.refused);
  }
  return all;
}

void Engine::Loop::set_tracing(bool on) {
  const Lock lock(caller_mutex_);
  tracing_ = on;
}

// Of each vertex that ran, when the last of what it waited for had happened.
std::vector<std::int64_t> Engine::Loop::ready_times() const {
  std::vector<std::int64_t> ready(spans_.size(), running_ns_);
  const auto after = [&](std::int32_t v, std::int64_t ns) {
    for (const std::int32_t s : program_.successors_of(v)) ready[s] = std::max(ready[s], ns);
  };
  for (std::int32_t v = 0; v < program_.size(); ++v) {
    if (program_.kind[v] != Kind::kInput) {
      after(v, spans_[v].end);
    } else if (program_.late(v)) {
      after(v, gate_opened_ns_);
    } else {
      ready[v] = begin_ns_;
    }
  }
  return ready;
}

std::vector<TraceEvent> Engine::Loop::events() const {
  const Lock lock(caller_mutex_);
  if (active_) throw std::logic_error("events: a step is running");
  std::vector<TraceEvent> events;
  if (!traced_) return events;
  const std::vector<std::int64_t> ready = ready_times();
  for (std::int32_t v = 0; v < program_.size(); ++v) {
    if (spans_[v].end == 0) continue;
    const StreamState& stream = schedule_.streams[stream_of_[v]];
    TraceEvent event;
    event.vertex = v;
    event.device = static_cast<std::int16_t>(stream.device);
    event.stream = static_cast<std::int16_t>(stream.stream);
    event.ready = ready[v] - begin_ns_;
    event.issue = issued_ns_[v] - begin_ns_;
    event.start = spans_[v].start - begin_ns_;
    event.end = spans_[v].end - begin_ns_;
    event.bytes = program_.kind[v] == Kind::kKernel ? 0 : program_.bytes[v];
    events.push_back(event);
  }
  std::sort(events.begin(), events.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return std::pair(a.start, a.vertex) < std::pair(b.start, b.vertex);
  });
  return events;
}

Unfinished Engine::Loop::unfinished() const {
  Unfinished left;
  for (std::int32_t v = 0; v < program_.size(); ++v) {
    if (state_[v] == State::kIssued && left.in_flight_count++ < Unfinished::kNamed)
      left.in_flight.push_back(v);
    if (program_.kind[v] == Kind::kInput || state_[v] >= State::kIssued) continue;
    if (left.waiting_count++ >= Unfinished::kNamed) continue;
    const auto predecessors = schedule_.predecessors_of(v);
    const auto first = std::find_if(predecessors.begin(), predecessors.end(),
                                    [this](std::int32_t p) { return state_[p] != State::kDone; });
    left.waiting.push_back({v, first == predecessors.end() ? -1 : *first});
  }
  return left;
}

Engine::Engine(Program program, std::vector<std::unique_ptr<Device>> devices, OpRunner& runner,
               EngineOptions options)
    : loop_(std::make_unique<Loop>(std::move(program), std::move(devices), runner, options)),
      pid_(getpid()) {}

Engine::~Engine() {
  if (pid_ != getpid()) static_cast<void>(loop_.release());
}

// Its locks may be held for ever in a child: threads that are not there cannot let go of them.
Engine::Loop& Engine::loop() const {
  if (pid_ == getpid()) return *loop_;
  throw std::logic_error("the engine was started before fork(); its threads stayed in process " +
                         std::to_string(pid_) + ": make an engine of its own in this process");
}

void Engine::begin(Next next) { loop().begin(next); }
Status Engine::wait_out(double timeout) { return loop().wait_out(timeout); }
void Engine::deliver(Next next) { loop().deliver(next); }
Status Engine::wait_end(double timeout) { return loop().wait_end(timeout); }
bool Engine::abort(double timeout) { return loop().abort(timeout); }
void Engine::set_source(std::int32_t vertex, const void* src) { loop().set_source(vertex, src); }
void Engine::set_target(std::int32_t vertex, void* dst) { loop().set_target(vertex, dst); }
void Engine::invalidate(const std::vector<std::int32_t>& in_place) { loop().invalidate(in_place); }
bool Engine::holds_residents() const { return loop().holds_residents(); }
EngineError Engine::last_error() const { return loop().last_error(); }
const Program& Engine::program() const { return loop().program(); }
StepCounters Engine::counters() const { return loop().counters(); }
std::int64_t Engine::ops_run(int device) const { return loop().ops_run(device); }
bool Engine::ran(std::int32_t vertex) const { return loop().ran(vertex); }
GraphFigures Engine::graph_figures() const { return loop().graph_figures(); }
void Engine::set_tracing(bool on) { loop().set_tracing(on); }
std::vector<TraceEvent> Engine::events() const { return loop().events(); }

}  // namespace disco
