// Devices for tests, and a step as a caller runs it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/engine.h"
#include "core/host_device.h"
#include "core/program.h"
#include "core/random.h"
#include "core/schedule.h"
#include "scenes.h"

namespace disco::testing {

// Seconds after which a step that must end counts as hung.
constexpr double kPatience = 60.0;

class NoOps final : public OpRunner {
 public:
  void run(std::int32_t, int, int) override {}
};

// Everything completes a few polls after it was enqueued, in the order of a seeded generator, or never.
class PolledDevice final : public Device {
 public:
  PolledDevice(int compute_streams, std::uint64_t seed)
      : compute_streams_(compute_streams), lanes_(streams()) {
    random_.seed(seed);
  }

  void connect(int index, OpRunner& runner, ProgressListener&) override {
    index_ = index;
    runner_ = &runner;
  }
  int compute_streams() const override { return compute_streams_; }
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) override {
    lanes_[stream].work.push_back([this, stream, op] { runner_->run(op, index_, stream); });
    lanes_[stream].vertices.push_back(vertex);
    return ++lanes_[stream].enqueued;
  }
  Token enqueue_copy(int stream, const Copy& copy) override {
    lanes_[stream].work.push_back([copy] {
      std::copy_n(static_cast<const char*>(copy.src), copy.bytes, static_cast<char*>(copy.dst));
    });
    lanes_[stream].vertices.push_back(copy.vertex);
    return ++lanes_[stream].enqueued;
  }
  BatchLimits batch_limits() const override { return batches; }
  void wait(int stream, int other, Token token) override {
    lanes_[stream].waits.push_back({lanes_[stream].enqueued, other, token});
    ++stream_waits;
  }
  Token completed(int stream) override {
    for (Lane& lane : lanes_) advance(lane);
    return lanes_[stream].finished;
  }
  bool failed() const override { return failed_; }
  DeviceFailure failure() const override { return failure_; }
  void cancel() override {
    if (release_on_cancel) hang_at = -1;
  }
  void recover() override {
    failed_ = false;
    failure_ = {};
  }
  void trace(Span*, std::int32_t) override {}

  std::atomic<std::int32_t> hang_at{-1};
  bool release_on_cancel = true;
  bool prompt = false;  // what may run is done at the first poll
  BatchLimits batches;
  int stream_waits = 0;

 private:
  struct Wait {
    Token after;
    int other;
    Token token;
  };
  struct Lane {
    std::vector<std::function<void()>> work;
    std::vector<std::int32_t> vertices;
    std::vector<Wait> waits;
    Token enqueued = 0;
    Token finished = 0;
  };

  void advance(Lane& lane) {
    while (lane.finished < lane.enqueued && (prompt || random_.below(3) != 0) && may_run(lane)) {
      if (lane.vertices[lane.finished] == hang_at && !failed_) break;
      if (!failed_) run_next(lane);
      ++lane.finished;
    }
  }
  bool may_run(const Lane& lane) const {
    for (const Wait& wait : lane.waits) {
      if (wait.after == lane.finished && lanes_[wait.other].finished < wait.token) return false;
    }
    return true;
  }
  void run_next(Lane& lane) {
    try {
      lane.work[lane.finished]();
    } catch (const std::exception& error) {
      failed_ = true;
      failure_ = {lane.vertices[lane.finished], error.what()};
    }
  }

  int compute_streams_;
  int index_ = 0;
  OpRunner* runner_ = nullptr;
  Random random_;
  std::vector<Lane> lanes_;
  bool failed_ = false;
  DeviceFailure failure_;
};

// Another device, of which a test changes a part.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}
  void use_threads() override { inner_->use_threads(); }
  void connect(int index, OpRunner& runner, ProgressListener& listener) override {
    inner_->connect(index, runner, listener);
  }
  void attach_loop_thread() override { inner_->attach_loop_thread(); }
  int compute_streams() const override { return inner_->compute_streams(); }
  bool runs_inline() const override { return inner_->runs_inline(); }
  bool notifies() const override { return inner_->notifies(); }
  bool computing() const override { return inner_->computing(); }
  int queue_room() const override { return inner_->queue_room(); }
  void mark(int stream) override { inner_->mark(stream); }
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) override {
    return inner_->enqueue_op(stream, vertex, op);
  }
  Token enqueue_copy(int stream, const Copy& copy) override { return inner_->enqueue_copy(stream, copy); }
  BatchLimits batch_limits() const override { return inner_->batch_limits(); }
  Token enqueue_copies(int stream, std::span<const Copy> copies, std::int32_t& blamed) override {
    return inner_->enqueue_copies(stream, copies, blamed);
  }
  void wait(int stream, int other, Token token) override { inner_->wait(stream, other, token); }
  Token completed(int stream) override { return inner_->completed(stream); }
  std::int64_t expected_end(int stream) const override { return inner_->expected_end(stream); }
  bool failed() const override { return inner_->failed(); }
  DeviceFailure failure() const override { return inner_->failure(); }
  void cancel() override { inner_->cancel(); }
  void recover() override { inner_->recover(); }
  void begin_step(std::uint64_t step) override { inner_->begin_step(step); }
  void trace(Span* spans, std::int32_t vertices) override { inner_->trace(spans, vertices); }
  void finish_trace() override { inner_->finish_trace(); }

 protected:
  std::unique_ptr<Device> inner_;
};

inline std::vector<std::unique_ptr<Device>> one(std::unique_ptr<Device> device) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::move(device));
  return devices;
}

inline std::vector<std::unique_ptr<Device>> hosts(int devices, const HostDeviceOptions& options) {
  std::vector<std::unique_ptr<Device>> made;
  for (int d = 0; d < devices; ++d) made.push_back(std::make_unique<HostDevice>(options));
  return made;
}

inline std::vector<std::unique_ptr<Device>> host(int streams = 1, double bandwidth = 0.0,
                                                 bool inline_compute = true) {
  HostDeviceOptions options;
  options.compute_streams = streams;
  options.link_bandwidth = bandwidth;
  options.inline_compute = inline_compute;
  return hosts(1, options);
}

// One whole step; the caller's side of the gate included. `slice`: seconds that a wait may take before it is
// called again.
inline Status run_step(Engine& engine, Checker& checker, std::uint64_t step, double slice = 60.0) {
  const Next next = checker.callers > 0 ? Next::kWait : Next::kAnything;
  const auto patiently = [&](Status (Engine::*wait)(double)) {
    Status status = (engine.*wait)(slice);
    for (int i = 0; status == Status::kTimeout && i * slice < 60.0; ++i) status = (engine.*wait)(slice);
    return status;
  };
  checker.begin(step);
  engine.begin(next);
  if (const Status status = patiently(&Engine::wait_out); status != Status::kDone) return status;
  checker.check_outs();
  engine.deliver(next);
  return patiently(&Engine::wait_end);
}

}  // namespace disco::testing
