// Random programs whose every vertex checks that all its predecessors have finished, and devices that
// misbehave.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/engine.h"
#include "core/host_device.h"
#include "core/program.h"
#include "core/schedule.h"

namespace disco::testing {

using Edge = std::pair<std::int32_t, std::int32_t>;

// Each vertex owns a block of words. A kernel fills its block with a stamp of (vertex, step); a copy
// duplicates the block of one predecessor, whose stamp is then the one to expect. `origin[v]` is the vertex
// whose stamp v's block holds.
struct Scene {
  std::vector<VertexDesc> vertices;
  std::vector<Edge> edges;
  std::vector<std::int32_t> origin;
  std::vector<std::vector<std::int32_t>> predecessors;
  std::vector<std::vector<std::uint64_t>> blocks;
  std::vector<std::uint64_t> host;  // what residents are loaded from

  Program program() const {
    ProgramBuilder builder;
    for (const VertexDesc& vertex : vertices) builder.add(vertex);
    for (const auto& [from, to] : edges) builder.edge(from, to);
    return std::move(builder).build();
  }
};

struct SceneOptions {
  int vertices = 40;
  int max_predecessors = 3;
  double copies = 0.3;
  bool gate = true;
  int words = 8;
};

inline std::uint64_t stamp(std::int32_t vertex, std::uint64_t step) {
  return (step + 1) * 1000003ULL + static_cast<std::uint64_t>(vertex) * 7919ULL;
}

// A random program: a few inputs (residents among them), then kernels and copies; the gate is half-way.
inline std::unique_ptr<Scene> random_scene(std::uint64_t seed, const SceneOptions& options = {}) {
  Random random;
  random.seed(seed);
  auto scene = std::make_unique<Scene>();
  const int n = options.vertices;
  scene->blocks.assign(n, std::vector<std::uint64_t>(options.words, 0));
  scene->host.assign(options.words, 4711);
  scene->predecessors.resize(n);
  const int inputs = 2;
  const int gate = options.gate ? n / 2 : -1;
  const auto bytes = static_cast<std::int64_t>(options.words * sizeof(std::uint64_t));
  for (int v = 0; v < n; ++v) {
    VertexDesc vertex;
    scene->origin.push_back(v);
    vertex.dst = scene->blocks[v].data();
    if (v < inputs || v == gate) {
      vertex.kind = Kind::kInput;
      vertex.flags = v == gate ? static_cast<std::uint8_t>(kLate) : std::uint8_t{0};
      if (v == 0) {
        vertex.src = scene->host.data();
        vertex.bytes = bytes;
      }
      scene->vertices.push_back(vertex);
      continue;
    }
    const int wanted = 1 + static_cast<int>(random.below(options.max_predecessors));
    for (int i = 0; i < wanted; ++i) {
      const int reach = static_cast<int>(random.below(2)) == 0 ? std::min(v, 4) : v;
      scene->predecessors[v].push_back(v - 1 - static_cast<int>(random.below(reach)));
    }
    if (v > gate && options.gate && random.below(3) == 0) scene->predecessors[v].push_back(gate);
    for (const std::int32_t p : scene->predecessors[v]) scene->edges.emplace_back(p, v);
    const std::int32_t source = scene->predecessors[v].front();
    const bool copy =
        scene->vertices[source].kind != Kind::kInput && random.below(1000) < options.copies * 1000;
    if (copy) {
      constexpr Kind kCopies[] = {Kind::kOffload, Kind::kReload, Kind::kTransfer};
      vertex.kind = kCopies[random.below(3)];
      vertex.src = scene->blocks[source].data();
      vertex.bytes = bytes;
      scene->origin[v] = scene->origin[source];
    } else {
      vertex.op = v;
    }
    if (v < gate && random.below(6) == 0) vertex.flags = kOut;
    scene->vertices.push_back(vertex);
  }
  return scene;
}

// Runs the kernels of a Scene and counts every broken promise.
class Checker : public OpRunner {
 public:
  explicit Checker(Scene& scene) : scene_(scene), runs_(scene.vertices.size()) {}

  void begin(std::uint64_t step) {
    step_ = step;
    for (auto& runs : runs_) runs.store(0);
  }

  void run(std::int32_t op, int, int stream) override {
    if (fail_at == op) throw std::runtime_error("op " + std::to_string(op) + " was told to fail");
    if (busy_[stream].fetch_add(1) != 0) ++broken;
    for (const std::int32_t p : scene_.predecessors[op]) check_block(p);
    for (std::uint64_t& word : scene_.blocks[op]) word = stamp(op, step_);
    if (before_return) before_return(op);
    if (runs_[op].fetch_add(1) != 0) ++broken;
    if (busy_[stream].fetch_sub(1) != 1) ++broken;
  }

  // After a step: everything ran once and every block holds this step's stamp.
  int missing() {
    int count = 0;
    for (std::size_t v = 0; v < scene_.vertices.size(); ++v) {
      const VertexDesc& vertex = scene_.vertices[v];
      if (vertex.kind == Kind::kKernel && runs_[v].load() != 1) ++count;
      if (vertex.kind != Kind::kInput) check_block(static_cast<std::int32_t>(v));
    }
    return count;
  }

  // At the gate: every out vertex has finished.
  void check_outs() {
    for (std::size_t v = 0; v < scene_.vertices.size(); ++v) {
      if ((scene_.vertices[v].flags & kOut) != 0) check_block(static_cast<std::int32_t>(v));
    }
  }

  bool ran(std::int32_t v) const { return runs_[v].load() != 0; }

  std::atomic<int> broken{0};
  std::int32_t fail_at = -1;
  std::function<void(std::int32_t)> before_return;

 private:
  void check_block(std::int32_t v) {
    const VertexDesc& vertex = scene_.vertices[v];
    if (vertex.kind == Kind::kInput && vertex.bytes == 0) return;
    const std::uint64_t wanted =
        vertex.kind == Kind::kInput ? scene_.host[0] : stamp(scene_.origin[v], step_);
    for (const std::uint64_t word : scene_.blocks[v]) broken += word == wanted ? 0 : 1;
  }

  Scene& scene_;
  std::uint64_t step_ = 0;
  std::vector<std::atomic<int>> runs_;
  std::atomic<int> busy_[8] = {};
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
  Token enqueue_copy(int stream, std::int32_t vertex, void* dst, const void* src,
                     std::int64_t bytes) override {
    lanes_[stream].work.push_back(
        [=] { std::copy_n(static_cast<const char*>(src), bytes, static_cast<char*>(dst)); });
    lanes_[stream].vertices.push_back(vertex);
    return ++lanes_[stream].enqueued;
  }
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
    while (lane.finished < lane.enqueued && random_.below(3) != 0 && may_run(lane)) {
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

inline std::vector<std::unique_ptr<Device>> one(std::unique_ptr<Device> device) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::move(device));
  return devices;
}

inline std::vector<std::unique_ptr<Device>> host(int streams = 1, double bandwidth = 0.0,
                                                 bool inline_compute = true) {
  HostDeviceOptions options;
  options.compute_streams = streams;
  options.link_bandwidth = bandwidth;
  options.inline_compute = inline_compute;
  return one(std::make_unique<HostDevice>(options));
}

// One whole step; the caller's side of the gate included.
inline Status run_step(Engine& engine, Checker& checker, std::uint64_t step) {
  checker.begin(step);
  engine.begin();
  constexpr double kPatience = 60.0;
  if (const Status status = engine.wait_out(kPatience); status != Status::kDone) return status;
  checker.check_outs();
  engine.deliver();
  return engine.wait_end(kPatience);
}

}  // namespace disco::testing
