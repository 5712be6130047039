// What disturbed links cost dynamic dispatch, and a fixed order. Runs a plan whose kernels take their time
// but compute nothing, so that a few cores show many devices. Usage: bench_jitter PLAN jitter steps, where
// benchmarks/engine/jitter.py writes PLAN
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/host_device.h"
#include "core/timing.h"

namespace {

constexpr double kBandwidth = 1e6;  // a copy of n bytes takes n microseconds

// The plan, with memory of its own for every copy.
struct Plan {
  int devices = 0;
  std::vector<disco::VertexDesc> vertices;
  std::vector<std::pair<int, int>> edges;
  std::vector<std::int64_t> kernel_ns;
  std::vector<std::vector<char>> memory;

  disco::Program program() const {
    disco::ProgramBuilder builder;
    for (const disco::VertexDesc& vertex : vertices) builder.add(vertex);
    for (const auto& [from, to] : edges) builder.edge(from, to);
    return std::move(builder).build();
  }
};

// "devices vertices edges", a line "kind lane device microseconds" for each vertex, a line "from to" for each
// edge.
bool read(const std::string& path, Plan& plan) {
  std::ifstream file(path);
  std::size_t vertices = 0;
  std::size_t edges = 0;
  if (!(file >> plan.devices >> vertices >> edges)) return false;
  for (std::size_t v = 0; v < vertices; ++v) {
    int kind = 0;
    int lane = 0;
    double us = 0;
    disco::VertexDesc vertex;
    if (!(file >> kind >> lane >> vertex.device >> us)) return false;
    vertex.kind = static_cast<disco::Kind>(kind);
    if (lane >= 0) vertex.direction = static_cast<disco::Direction>(lane);
    if (vertex.kind == disco::Kind::kKernel) {
      vertex.op = static_cast<std::int32_t>(plan.kernel_ns.size());
      plan.kernel_ns.push_back(static_cast<std::int64_t>(us * 1e3));
    } else if (vertex.kind != disco::Kind::kInput) {
      vertex.bytes = std::max<std::int64_t>(1, static_cast<std::int64_t>(us));
      plan.memory.emplace_back(2 * static_cast<std::size_t>(vertex.bytes));
      vertex.src = plan.memory.back().data();
      vertex.dst = plan.memory.back().data() + vertex.bytes;
    }
    plan.vertices.push_back(vertex);
  }
  for (std::size_t e = 0; e < edges; ++e) {
    int from = 0;
    int to = 0;
    if (!(file >> from >> to)) return false;
    plan.edges.emplace_back(from, to);
  }
  return true;
}

class Sleeping final : public disco::OpRunner {
 public:
  explicit Sleeping(const Plan& plan) : plan_(plan) {}
  void run(std::int32_t op, int, int) override {
    disco::sleep_until_ns(disco::now_ns() + plan_.kernel_ns[static_cast<std::size_t>(op)]);
  }

 private:
  const Plan& plan_;
};

std::unique_ptr<disco::Engine> engine(const Plan& plan, Sleeping& ops, disco::Dispatch dispatch,
                                      double jitter) {
  disco::HostDeviceOptions host;
  host.inline_compute = false;
  host.link_bandwidth = kBandwidth;
  host.link_jitter = jitter;
  host.on_compute_thread = [](int) { disco::want_exact_timers(); };
  std::vector<std::unique_ptr<disco::Device>> devices;
  for (int d = 0; d < plan.devices; ++d) devices.push_back(std::make_unique<disco::HostDevice>(host));
  disco::EngineOptions options;
  options.dispatch = dispatch;
  options.lookahead = 0;  // a kernel that sleeps has nothing to be launched ahead of
  return std::make_unique<disco::Engine>(plan.program(), std::move(devices), ops, options);
}

}  // namespace

// Prints milliseconds: a line for each step, calm and disturbed in dynamic order, calm and disturbed in fixed
// order. Step i of every engine has the same disturbances.
int main(int argc, char** argv) {
  Plan plan;
  if (argc != 4 || !read(argv[1], plan)) {
    std::fprintf(stderr, "usage: bench_jitter PLAN jitter steps\n");
    return 2;
  }
  const double jitter = std::atof(argv[2]);
  Sleeping ops(plan);
  std::array<std::unique_ptr<disco::Engine>, 4> engines;
  for (std::size_t i = 0; i < 4; ++i) {
    engines[i] = engine(plan, ops, i < 2 ? disco::Dispatch::kPriority : disco::Dispatch::kFixed,
                        i % 2 == 0 ? 0.0 : jitter);
  }
  for (int step = 0; step < std::atoi(argv[3]); ++step) {
    for (const auto& each : engines) {
      each->begin();
      if (each->wait_end(600) != disco::Status::kDone) {
        std::fprintf(stderr, "bench_jitter: %s\n", each->last_error().message.c_str());
        return 1;
      }
      std::printf("%.3f ", static_cast<double>(each->counters().step_ns) * 1e-6);
    }
    std::printf("\n");
  }
  return 0;
}
