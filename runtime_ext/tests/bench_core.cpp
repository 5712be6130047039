// Engine cost per vertex with ops that do nothing, and what tracing adds to ops of 10 us.
// Usage: bench_core [vertices] [steps]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/engine.h"
#include "core/host_device.h"

namespace {

class Nothing final : public disco::OpRunner {
 public:
  void run(std::int32_t, int, int) override {}
};

// A ladder: each vertex waits for the one before and for one some way back, as in a layer with a residual.
disco::Program ladder(int vertices) {
  disco::ProgramBuilder builder;
  for (int v = 0; v < vertices; ++v) {
    disco::VertexDesc vertex;
    vertex.op = v;
    builder.add(vertex);
    if (v > 0) builder.edge(v - 1, v);
    if (v > 7) builder.edge(v - 8, v);
  }
  return std::move(builder).build();
}

void measure(const char* name, int vertices, int steps, int streams, bool inline_compute,
             disco::EngineOptions options) {
  disco::HostDeviceOptions host;
  host.compute_streams = streams;
  host.inline_compute = inline_compute;
  std::vector<std::unique_ptr<disco::Device>> devices;
  devices.push_back(std::make_unique<disco::HostDevice>(host));
  Nothing nothing;
  disco::Engine engine(ladder(vertices), std::move(devices), nothing, options);
  std::vector<double> per_vertex;
  for (int step = 0; step < steps; ++step) {
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) std::abort();
    per_vertex.push_back(static_cast<double>(engine.counters().step_ns) / vertices);
  }
  std::sort(per_vertex.begin(), per_vertex.end());
  std::printf("%-28s %8.1f ns/vertex  (best %.1f, worst %.1f, %d vertices, %d steps)\n", name,
              per_vertex[per_vertex.size() / 2], per_vertex.front(), per_vertex.back(), vertices, steps);
}

class Spinning final : public disco::OpRunner {
 public:
  void run(std::int32_t, int, int) override {
    for (const std::int64_t until = disco::now_ns() + 10'000; disco::now_ns() < until;) {
    }
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Steps with and without tracing in turn.
void measure_tracing(int steps, int streams) {
  constexpr int kVertices = 1000;
  disco::HostDeviceOptions host;
  host.compute_streams = streams;
  std::vector<std::unique_ptr<disco::Device>> devices;
  devices.push_back(std::make_unique<disco::HostDevice>(host));
  Spinning spinning;
  disco::Engine engine(ladder(kVertices), std::move(devices), spinning, {});
  std::vector<double> ns[2];
  for (int step = 0; step < 2 * steps + 2; ++step) {
    engine.set_tracing(step % 2 == 1);
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) std::abort();
    if (step >= 2) ns[step % 2].push_back(static_cast<double>(engine.counters().step_ns) / kVertices);
  }
  std::printf("10 us ops, %d stream%s            off %.1f, on %.1f ns/vertex: tracing adds %.2f %%\n",
              streams, streams == 1 ? " " : "s", median(ns[0]), median(ns[1]),
              100 * (median(ns[1]) / median(ns[0]) - 1));
}

// From begin() to the return of wait_end() of a program with nothing to do: what a step costs its caller.
void measure_round_trip(int steps) {
  std::vector<std::unique_ptr<disco::Device>> devices;
  devices.push_back(std::make_unique<disco::HostDevice>(disco::HostDeviceOptions{}));
  Nothing nothing;
  disco::Engine engine(ladder(1), std::move(devices), nothing, {});
  std::vector<double> us;
  for (int step = 0; step < 50 * steps; ++step) {
    const std::int64_t start = disco::now_ns();
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) std::abort();
    us.push_back(static_cast<double>(disco::now_ns() - start) * 1e-3);
  }
  std::printf("a step of one vertex         %8.1f us from begin() to the return of wait_end()\n", median(us));
}

}  // namespace

int main(int argc, char** argv) {
  const int vertices = argc > 1 ? std::atoi(argv[1]) : 10000;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 21;
  if (vertices < 1 || steps < 1) {
    std::fprintf(stderr, "usage: bench_core [vertices] [steps]\n");
    return 2;
  }
  disco::EngineOptions options;
  measure("inline, priority", vertices, steps, 1, true, options);
  options.time_ops = true;
  measure("inline, priority, timed", vertices, steps, 1, true, options);
  options.time_ops = false;
  options.dispatch = disco::Dispatch::kSynchronous;
  measure("inline, synchronous", vertices, steps, 1, true, options);
  options.dispatch = disco::Dispatch::kPriority;
  for (const int lookahead : {0, 2}) {
    options.lookahead = lookahead;
    measure(lookahead == 0 ? "1 thread, K = 0" : "1 thread, K = 2", vertices, steps, 1, false, options);
    measure(lookahead == 0 ? "2 threads, K = 0" : "2 threads, K = 2", vertices, steps, 2, false, options);
  }
  for (const int streams : {1, 2}) measure_tracing(steps, streams);
  measure_round_trip(steps);
  return 0;
}
