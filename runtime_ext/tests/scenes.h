// Random programs whose every vertex checks that all its predecessors have finished and that nobody has
// written over what it reads.
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
#include "core/program.h"
#include "core/random.h"

namespace disco::testing {

using Edge = std::pair<std::int32_t, std::int32_t>;

// Each vertex writes a block of words. A kernel fills its block with a stamp of (vertex, step); a copy
// duplicates the block of its first predecessor, whose stamp is then the one to expect. `origin[v]` is the
// vertex whose stamp v's block holds. Several vertices may write the same block one after another, as values
// share addresses in a plan: the edges make each wait for all readers of the one before.
struct Scene {
  std::vector<VertexDesc> vertices;
  std::vector<Edge> edges;
  std::vector<std::int32_t> origin;
  std::vector<std::vector<std::int32_t>> predecessors;  // whose blocks a vertex reads
  std::vector<std::int32_t> block;                      // that each vertex writes
  std::vector<bool> overwritten;                        // some later vertex writes its block
  std::vector<std::vector<std::uint64_t>> blocks;
  std::vector<std::uint64_t> host;  // what residents are loaded from

  std::int32_t size() const { return static_cast<std::int32_t>(vertices.size()); }
  // Without the edge number `dropped`, if there is one of that number.
  Program program(std::size_t dropped = SIZE_MAX) const {
    ProgramBuilder builder;
    for (const VertexDesc& vertex : vertices) builder.add(vertex);
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (i != dropped) builder.edge(edges[i].first, edges[i].second);
    }
    return std::move(builder).build();
  }
};

struct SceneOptions {
  int vertices = 40;
  int max_predecessors = 3;
  double copies = 0.3;
  bool gate = true;
  int words = 8;
  int devices = 1;
  double reuse = 0.0;  // share of vertices that write over an earlier block
};

inline std::uint64_t stamp(std::int32_t vertex, std::uint64_t step) {
  return (step + 1) * 1000003ULL + static_cast<std::uint64_t>(vertex) * 7919ULL;
}

// Makes a Scene, vertex by vertex: a few inputs (a resident among them), then kernels and copies; the gate is
// half-way.
class SceneMaker {
 public:
  SceneMaker(std::uint64_t seed, const SceneOptions& options) : options_(options) {
    random_.seed(seed);
    const auto n = static_cast<std::size_t>(options.vertices);
    gate_ = options.gate ? options.vertices / 2 : -1;
    scene_->blocks.assign(n, std::vector<std::uint64_t>(options.words, 0));
    scene_->host.assign(options.words, 4711);
    scene_->predecessors.resize(n);
    scene_->overwritten.resize(n);
    readers_.resize(n);
    gated_.resize(n);
    for (int v = 0; v < options.vertices; ++v) {
      scene_->origin.push_back(v);
      scene_->block.push_back(v);
      if (v < kInputs || v == gate_) {
        add_input(v);
      } else {
        add_vertex(v);
      }
    }
  }

  std::unique_ptr<Scene> take() { return std::move(scene_); }

 private:
  static constexpr int kInputs = 2;

  std::int64_t bytes() const { return static_cast<std::int64_t>(options_.words * sizeof(std::uint64_t)); }
  bool chance(double share) { return random_.unit() < share; }
  int any_device() { return static_cast<int>(random_.below(options_.devices)); }

  void add_input(int v) {
    VertexDesc vertex;
    vertex.kind = Kind::kInput;
    vertex.device = any_device();
    vertex.dst = scene_->blocks[v].data();
    vertex.flags = v == gate_ ? static_cast<std::uint8_t>(kLate) : std::uint8_t{0};
    gated_[v] = v == gate_;
    if (v == 0) {
      vertex.src = scene_->host.data();
      vertex.bytes = bytes();
    }
    scene_->vertices.push_back(vertex);
  }

  void add_vertex(int v) {
    choose_predecessors(v);
    VertexDesc vertex;
    vertex.device = any_device();
    const std::int32_t source = scene_->predecessors[v].front();
    const bool copy = scene_->vertices[source].kind != Kind::kInput && chance(options_.copies);
    for (const std::int32_t p : scene_->predecessors[v]) gated_[v] = gated_[v] || gated_[p];
    if (options_.gate && !gated_[v] && v < gate_ && random_.below(6) == 0) vertex.flags = kOut;
    if (chance(options_.reuse)) write_over(v, copy);
    vertex.dst = scene_->blocks[scene_->block[v]].data();
    if (copy) {
      vertex.kind = Kind::kCopy;
      vertex.direction = static_cast<Direction>(random_.below(3));
      const bool loads = vertex.direction == Direction::kHostToDevice && random_.below(2) == 0;
      if (!loads) vertex.device = scene_->vertices[source].device;
      vertex.src = scene_->blocks[scene_->block[source]].data();
      vertex.bytes = bytes();
      scene_->origin[v] = scene_->origin[source];
    } else {
      vertex.op = v;
    }
    scene_->vertices.push_back(vertex);
  }

  void choose_predecessors(int v) {
    std::vector<std::int32_t>& chosen = scene_->predecessors[v];
    const int wanted = 1 + static_cast<int>(random_.below(options_.max_predecessors));
    for (int i = 0; i < wanted; ++i) {
      const int reach = random_.below(2) == 0 ? std::min(v, 4) : v;
      const std::int32_t p = v - 1 - static_cast<int>(random_.below(reach));
      if (!scene_->overwritten[p]) chosen.push_back(p);
    }
    if (chosen.empty()) chosen.push_back(1);
    if (v > gate_ && options_.gate && random_.below(3) == 0) chosen.push_back(gate_);
    for (const std::int32_t p : chosen) {
      scene_->edges.emplace_back(p, v);
      readers_[p].push_back(v);
    }
  }

  // v takes the block of an earlier vertex. A kernel may take that of one which it reads itself (in place).
  // Blocks of out vertices are the caller's until the gate.
  void write_over(int v, bool copy) {
    const auto u = static_cast<std::int32_t>(random_.below(v));
    const std::vector<std::int32_t>& read = scene_->predecessors[v];
    const bool reads_it = std::find(read.begin(), read.end(), u) != read.end();
    if (scene_->vertices[u].kind == Kind::kInput || scene_->overwritten[u] || (copy && reads_it)) return;
    if ((scene_->vertices[u].flags & kOut) != 0) return;
    scene_->overwritten[u] = true;
    scene_->block[v] = scene_->block[u];
    scene_->edges.emplace_back(u, v);
    gated_[v] = gated_[v] || gated_[u];
    for (const std::int32_t r : readers_[u]) {
      if (r == v) continue;
      scene_->edges.emplace_back(r, v);
      gated_[v] = gated_[v] || gated_[r];
    }
  }

  SceneOptions options_;
  Random random_;
  int gate_ = -1;
  std::unique_ptr<Scene> scene_ = std::make_unique<Scene>();
  std::vector<std::vector<std::int32_t>> readers_;
  std::vector<bool> gated_;  // waits for the gate
};

inline std::unique_ptr<Scene> random_scene(std::uint64_t seed, const SceneOptions& options = {}) {
  return SceneMaker(seed, options).take();
}

// Runs the kernels of a Scene and counts every broken promise.
class Checker : public OpRunner {
 public:
  explicit Checker(Scene& scene) : scene_(scene), runs_(scene.vertices.size()) {}

  void begin(std::uint64_t step) {
    step_ = step;
    for (auto& runs : runs_) runs.store(0);
  }

  void run(std::int32_t op, int device, int stream) override {
    if (fail_at == op) throw std::runtime_error("op " + std::to_string(op) + " was told to fail");
    std::atomic<int>& busy = busy_[device][stream];
    if (busy.fetch_add(1) != 0) ++broken;
    if (device != scene_.vertices[op].device) ++broken;
    if (before_read) before_read(op);
    for (const std::int32_t p : scene_.predecessors[op]) check_block(p);
    for (std::uint64_t& word : scene_.blocks[scene_.block[op]]) word = stamp(op, step_);
    if (before_return) before_return(op);
    if (runs_[op].fetch_add(1) != 0 && once) ++broken;
    if (busy.fetch_sub(1) != 1) ++broken;
  }

  // Whether callers may run ops: 0 = never, 1 = always, n = all but every nth time.
  int callers = 0;
  bool enter() override {
    if (callers == 0 || (callers > 1 && ++asked_ % callers == 0)) return false;
    if (inside_.exchange(true)) ++broken;
    ++entered;
    return true;
  }
  void leave() override {
    if (!inside_.exchange(false)) ++broken;
  }

  // After a step: the number of kernels that did not run once. Every block must hold this step's stamp.
  int missing() {
    int count = 0;
    for (std::int32_t v = 0; v < scene_.size(); ++v) {
      const VertexDesc& vertex = scene_.vertices[v];
      if (vertex.kind == Kind::kKernel && runs_[v].load() != 1) ++count;
      if (vertex.kind != Kind::kInput && !scene_.overwritten[v]) check_block(v);
    }
    return count;
  }

  // At the gate: every out vertex has finished.
  void check_outs() {
    for (std::int32_t v = 0; v < scene_.size(); ++v) {
      if ((scene_.vertices[v].flags & kOut) != 0) check_block(v);
    }
  }

  bool ran(std::int32_t v) const { return runs_[v].load() != 0; }

  std::atomic<int> broken{0};
  std::atomic<int> entered{0};  // times that a caller was let in
  bool once = true;             // no kernel may run twice between two begin()
  std::int32_t fail_at = -1;
  std::function<void(std::int32_t)> before_read;
  std::function<void(std::int32_t)> before_return;

 private:
  void check_block(std::int32_t v) {
    const VertexDesc& vertex = scene_.vertices[v];
    if (vertex.kind == Kind::kInput && vertex.bytes == 0) return;
    const std::uint64_t wanted =
        vertex.kind == Kind::kInput ? scene_.host[0] : stamp(scene_.origin[v], step_);
    for (const std::uint64_t word : scene_.blocks[scene_.block[v]]) broken += word == wanted ? 0 : 1;
  }

  Scene& scene_;
  std::uint64_t step_ = 0;
  std::vector<std::atomic<int>> runs_;
  std::atomic<bool> inside_{false};
  std::atomic<int> asked_{0};
  std::atomic<int> busy_[8][8] = {};
};

}  // namespace disco::testing
