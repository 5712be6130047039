#include "engine.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "loop.h"

namespace disco {
namespace {

constexpr int kNamed = 8;  // vertices listed in the message of a stall

std::chrono::steady_clock::time_point deadline(double seconds) {
  constexpr double kMaxSeconds = 1e9;
  const std::chrono::duration<double> wait(std::clamp(seconds, 0.0, kMaxSeconds));
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(wait);
}

}  // namespace

void Engine::Loop::begin() {
  const Lock lock(caller_mutex_);
  if (active_) {
    throw std::logic_error(error_.draining ? "begin: the step before is still draining"
                                           : "begin: the step before has not ended");
  }
  begun_ = active_ = true;
  outs_done_ = ended_ = delivered_ = false;
  error_ = {};
  begin_ns_ = now_ns();
  command(kBegin);
}

Status Engine::Loop::wait(double timeout, bool for_end) {
  Lock lock(caller_mutex_);
  if (!begun_) return Status::kIdle;
  const auto over = [&] {
    return ended_ || error_.draining || (!for_end && outs_done_ && error_.status == Status::kDone);
  };
  if (!caller_wakes_.wait_until(lock, deadline(timeout), over)) return Status::kTimeout;
  return error_.status;
}

Status Engine::Loop::wait_out(double timeout) { return wait(timeout, false); }

Status Engine::Loop::wait_end(double timeout) { return wait(timeout, true); }

void Engine::Loop::deliver() {
  const Lock lock(caller_mutex_);
  if (error_.status != Status::kDone || (begun_ && schedule_.late.empty())) return;
  if (!active_) throw std::logic_error("deliver: no step is running");
  if (delivered_) throw std::logic_error("deliver: the late inputs of this step were delivered before");
  delivered_ = true;
  command(kDeliver);
}

bool Engine::Loop::abort(double timeout) {
  Lock lock(caller_mutex_);
  if (!active_) return true;
  command(kAbort);
  return caller_wakes_.wait_until(lock, deadline(timeout), [this] { return !active_; });
}

void Engine::Loop::set_source(std::int32_t vertex, const void* src) {
  const Lock lock(caller_mutex_);
  program_.src.at(static_cast<std::size_t>(vertex)) = src;
}

void Engine::Loop::invalidate() {
  const Lock lock(caller_mutex_);
  invalidated_ = true;
}

EngineError Engine::Loop::last_error() const {
  const Lock lock(caller_mutex_);
  return error_;
}

StepCounters Engine::Loop::counters() const {
  const Lock lock(caller_mutex_);
  return counters_;
}

void Engine::Loop::set_tracing(bool on) {
  const Lock lock(caller_mutex_);
  tracing_ = on;
}

std::vector<TraceEvent> Engine::Loop::events() const {
  std::vector<TraceEvent> events;
  if (!traced_) return events;
  for (std::int32_t v = 0; v < program_.size(); ++v) {
    if (spans_[v].end == 0) continue;
    const StreamState& stream = schedule_.streams[stream_of_[v]];
    TraceEvent event;
    event.vertex = v;
    event.device = static_cast<std::int16_t>(stream.device);
    event.stream = static_cast<std::int16_t>(stream.stream);
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

std::string Engine::Loop::describe_stall() const {
  static const char* const kKinds[] = {"input", "kernel", "transfer", "offload", "reload"};
  const auto name = [&](std::int32_t v) {
    return std::to_string(v) + " (" + kKinds[static_cast<int>(program_.kind[v])] + ")";
  };
  std::string flying;
  std::string waiting;
  int flying_count = 0;
  int waiting_count = 0;
  for (std::int32_t v = 0; v < program_.size(); ++v) {
    if (state_[v] == State::kIssued && flying_count++ < kNamed)
      flying += (flying.empty() ? "" : ", ") + name(v);
    if (program_.kind[v] == Kind::kInput || state_[v] >= State::kIssued || waiting_count++ >= kNamed)
      continue;
    std::string on;
    for (const std::int32_t p : schedule_.predecessors_of(v)) {
      if (state_[p] != State::kDone) {
        on = " for " + std::to_string(p);
        break;
      }
    }
    waiting += (waiting.empty() ? "" : ", ") + name(v) + on;
  }
  return "no progress; in flight " + std::to_string(flying_count) + ": " +
         (flying.empty() ? "none" : flying) + "; waiting " + std::to_string(waiting_count) + ": " +
         (waiting.empty() ? "none" : waiting);
}

Engine::Engine(Program program, std::vector<std::unique_ptr<Device>> devices, OpRunner& runner,
               EngineOptions options)
    : loop_(std::make_unique<Loop>(std::move(program), std::move(devices), runner, options)) {}
Engine::~Engine() = default;
void Engine::begin() { loop_->begin(); }
Status Engine::wait_out(double timeout) { return loop_->wait_out(timeout); }
void Engine::deliver() { loop_->deliver(); }
Status Engine::wait_end(double timeout) { return loop_->wait_end(timeout); }
bool Engine::abort(double timeout) { return loop_->abort(timeout); }
void Engine::set_source(std::int32_t vertex, const void* src) { loop_->set_source(vertex, src); }

void Engine::invalidate() { loop_->invalidate(); }
EngineError Engine::last_error() const { return loop_->last_error(); }
const Program& Engine::program() const { return loop_->program(); }
StepCounters Engine::counters() const { return loop_->counters(); }
void Engine::set_tracing(bool on) { loop_->set_tracing(on); }
std::vector<TraceEvent> Engine::events() const { return loop_->events(); }

}  // namespace disco
