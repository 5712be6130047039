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

// Eight devices hand a block of `bytes` around: after every fifth kernel the next device waits for a
// transfer.
disco::Program ring(int devices, int kernels, std::vector<char>& memory, std::int64_t bytes) {
  disco::ProgramBuilder builder;
  std::vector<std::int32_t> last(static_cast<std::size_t>(devices), -1);
  memory.resize(static_cast<std::size_t>(2 * devices * bytes));
  for (int k = 0; k < kernels; ++k) {
    for (int d = 0; d < devices; ++d) {
      disco::VertexDesc kernel;
      kernel.device = d;
      kernel.op = 0;
      const std::int32_t v = builder.add(kernel);
      if (last[d] >= 0) builder.edge(last[d], v);
      last[d] = v;
    }
    if (k % 5 != 4) continue;
    const std::vector<std::int32_t> sources = last;
    for (int d = 0; d < devices; ++d) {
      char* block = memory.data() + 2 * d * bytes;
      const std::int32_t v =
          builder.add({disco::Kind::kCopy, d, -1, block + bytes, block, bytes, 0, disco::Direction::kPeer});
      builder.edge(sources[d], v);
      disco::VertexDesc join;
      join.device = (d + 1) % devices;
      join.op = 0;
      const std::int32_t reader = builder.add(join);
      builder.edge(v, reader);
      builder.edge(last[join.device], reader);
      last[join.device] = reader;
    }
  }
  return std::move(builder).build();
}

// Steps with copies made by the lanes' threads, and where they are launched, in turn.
void measure_small_copies(int devices, int steps) {
  constexpr int kKernels = 500;
  for (const std::int64_t bytes : {std::int64_t{256}, std::int64_t{16 << 10}}) {
    std::vector<char> memory;
    Nothing nothing;
    std::vector<std::unique_ptr<disco::Engine>> engines;
    for (const std::int64_t small_copy : {std::int64_t{0}, disco::HostDeviceOptions{}.small_copy}) {
      std::vector<std::unique_ptr<disco::Device>> hosts;
      for (int d = 0; d < devices; ++d) {
        disco::HostDeviceOptions host;
        host.small_copy = small_copy;
        hosts.push_back(std::make_unique<disco::HostDevice>(host));
      }
      engines.push_back(std::make_unique<disco::Engine>(ring(devices, kKernels, memory, bytes),
                                                        std::move(hosts), nothing, disco::EngineOptions{}));
    }
    std::vector<double> us[2];
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < 2; ++i) {
        engines[i]->begin();
        if (engines[i]->wait_end(600) != disco::Status::kDone) std::abort();
        const auto counters = engines[i]->counters();
        us[i].push_back(static_cast<double>(counters.step_ns) * 1e-3 /
                        static_cast<double>(counters.vertices));
      }
    }
    std::printf("%d devices, copies of %5lld B   by lanes %.3f, where launched %.3f us/vertex\n", devices,
                static_cast<long long>(bytes), median(us[0]), median(us[1]));
  }
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
  for (const int devices : {1, 2, 8}) measure_small_copies(devices, steps);
  measure_round_trip(steps);
  return 0;
}
