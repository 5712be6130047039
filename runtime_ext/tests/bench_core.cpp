// Engine cost per vertex with ops that do nothing.  Usage: bench_core [vertices] [steps]
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
  return 0;
}
