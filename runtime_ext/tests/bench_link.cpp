// What a throttled link costs beside compute.  Usage: bench_link [seconds per row [kernel us]]
//
// A pass over layers that do not fit: each reload brings one layer's weights into one of `slots` buffers, a
// few kernels read them, and the buffer may be overwritten when they are done. The kernels spin, so compute
// alone takes a known time, and the bound of a step is the longer of that and of the link's own.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/host_device.h"

namespace {

struct Case {
  int layers = 200;
  int kernels = 2;          // per layer
  double kernel_us = 5;     // of each
  double link_ratio = 1.0;  // time of a layer's copy over that of its kernels
  int slots = 4;
  double bandwidth = 0.5e9;
  double offloads = 0;  // a copy back per layer, of this share of its bytes
  double latency = 0;
  bool thread = false;  // kernels on a thread of their own instead of the loop thread
};

class Spinning final : public disco::OpRunner {
 public:
  explicit Spinning(double us) : ns_(static_cast<std::int64_t>(us * 1e3)) {}
  void run(std::int32_t, int, int) override {
    for (const std::int64_t until = disco::now_ns() + ns_; disco::now_ns() < until;) {
    }
  }

 private:
  std::int64_t ns_;
};

std::int64_t copy_bytes(const Case& c) {
  const double seconds = c.kernels * c.kernel_us * 1e-6 * c.link_ratio - c.latency;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(seconds * c.bandwidth));
}

struct Buffers {
  explicit Buffers(const Case& c)
      : host(static_cast<std::size_t>(copy_bytes(c)), 'w'),
        arena(c.slots, std::vector<char>(static_cast<std::size_t>(copy_bytes(c)))) {}
  std::vector<char> host;
  std::vector<std::vector<char>> arena;
};

disco::Program pass(const Case& c, Buffers& buffers) {
  disco::ProgramBuilder builder;
  const std::int64_t bytes = copy_bytes(c);
  std::vector<std::int32_t> last;  // of each layer: who must finish before its buffer is overwritten
  std::int32_t before = -1;
  for (int layer = 0; layer < c.layers; ++layer) {
    char* slot = buffers.arena[layer % c.slots].data();
    const std::int32_t reload = builder.add(
        {disco::Kind::kCopy, 0, -1, slot, buffers.host.data(), bytes, 0, disco::Direction::kHostToDevice});
    if (layer >= c.slots) builder.edge(last[layer - c.slots], reload);
    for (int k = 0; k < c.kernels; ++k) {
      disco::VertexDesc kernel;
      kernel.op = layer * c.kernels + k;
      const std::int32_t v = builder.add(kernel);
      if (k == 0) builder.edge(reload, v);
      if (before >= 0) builder.edge(before, v);
      before = v;
    }
    last.push_back(before);
    if (c.offloads > 0) {
      const auto back = static_cast<std::int64_t>(static_cast<double>(bytes) * c.offloads);
      const std::int32_t v =
          builder.add({disco::Kind::kCopy, 0, -1, buffers.host.data(), slot, std::max<std::int64_t>(1, back),
                       0, disco::Direction::kDeviceToHost});
      builder.edge(before, v);
      last.back() = v;
    }
  }
  return std::move(builder).build();
}

double percentile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

// The step in milliseconds if nothing had a cost: the vertices of pass(), each resource in serial order.
double ideal_ms(const Case& c, double compute_ms) {
  const double copy = c.latency + static_cast<double>(copy_bytes(c)) / c.bandwidth;
  const double layer = compute_ms * 1e-3 / c.layers;
  std::vector<double> freed(c.layers, 0.0);
  double load = 0;
  double compute = 0;
  double save = 0;
  for (int i = 0; i < c.layers; ++i) {
    load = std::max(load, i >= c.slots ? freed[i - c.slots] : 0.0) + copy;
    compute = std::max(compute, load) + layer;
    freed[i] = compute;
    if (c.offloads > 0)
      freed[i] = save = std::max(save, compute) + c.latency + (copy - c.latency) * c.offloads;
  }
  return std::max(compute, save) * 1e3;
}

// How late copies end, and how late kernels that waited for one start, both against the link's own time.
struct Lateness {
  std::vector<double> copies_us;
  std::vector<double> kernels_us;
};

void add_lateness(const Case& c, const disco::Engine& engine, Lateness& late) {
  const disco::Program& program = engine.program();
  std::vector<disco::TraceEvent> of(program.size());
  for (const disco::TraceEvent& event : engine.events()) of[event.vertex] = event;
  double link_free = 0;
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (!program.goes(v, disco::Direction::kHostToDevice)) continue;
    const double start = std::max(link_free, static_cast<double>(of[v].issue));
    link_free = start + c.latency * 1e9 + static_cast<double>(program.bytes[v]) / c.bandwidth * 1e9;
    late.copies_us.push_back((static_cast<double>(of[v].end) - link_free) * 1e-3);
    const disco::TraceEvent& reader = of[v + 1];
    const bool waited = v == 0 || of[v - 1].end < of[v].end;
    if (waited) late.kernels_us.push_back(static_cast<double>(reader.start - of[v].end) * 1e-3);
  }
}

double median_step_ms(disco::Engine& engine, double seconds, std::vector<double>* loop_ns) {
  std::vector<double> steps;
  const std::int64_t until = disco::now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  do {
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) std::abort();
    steps.push_back(static_cast<double>(engine.counters().step_ns) * 1e-6);
    if (loop_ns != nullptr)
      loop_ns->push_back(static_cast<double>(engine.counters().loop_ns) /
                         static_cast<double>(engine.program().size()));
  } while (disco::now_ns() < until || steps.size() < 3);
  return percentile(steps, 0.5);
}

std::vector<std::unique_ptr<disco::Device>> device_of(const Case& c, bool throttled) {
  disco::HostDeviceOptions options;
  options.link_bandwidth = throttled ? c.bandwidth : 0;
  options.link_latency = throttled ? c.latency : 0;
  options.inline_compute = !c.thread;
  std::vector<std::unique_ptr<disco::Device>> devices;
  devices.push_back(std::make_unique<disco::HostDevice>(options));
  return devices;
}

// Compute alone: the same kernels, every buffer in place.
double compute_ms(const Case& c, double seconds) {
  disco::ProgramBuilder builder;
  for (int v = 0; v < c.layers * c.kernels; ++v) {
    disco::VertexDesc kernel;
    kernel.op = v;
    builder.add(kernel);
    if (v > 0) builder.edge(v - 1, v);
  }
  Spinning runner(c.kernel_us);
  disco::Engine engine(std::move(builder).build(), device_of(c, false), runner, {});
  return median_step_ms(engine, seconds, nullptr);
}

void measure(const char* name, const Case& c, double seconds) {
  Buffers buffers(c);
  Spinning runner(c.kernel_us);
  disco::EngineOptions options;
  options.time_ops = true;
  disco::Engine engine(pass(c, buffers), device_of(c, true), runner, options);
  const double compute = compute_ms(c, seconds / 4);
  std::vector<double> loop_ns;
  const double step = median_step_ms(engine, seconds / 2, &loop_ns);
  engine.set_tracing(true);
  Lateness late;
  const std::int64_t until = disco::now_ns() + static_cast<std::int64_t>(seconds * 0.25e9);
  do {
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) std::abort();
    add_lateness(c, engine, late);
  } while (disco::now_ns() < until);
  const double link = c.layers * (c.latency + static_cast<double>(copy_bytes(c)) / c.bandwidth) * 1e3;
  const double ideal = ideal_ms(c, compute);
  std::printf("%-34s %8.2f %8.2f %8.2f   %6.3f  %6.3f   %8.0f   %6.1f %6.1f   %6.1f %6.1f\n", name, compute,
              link, step, step / std::max(compute, link), step / ideal, percentile(loop_ns, 0.5),
              percentile(late.copies_us, 0.5), percentile(late.copies_us, 0.9),
              percentile(late.kernels_us, 0.5), percentile(late.kernels_us, 0.9));
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  const double only = argc > 2 ? std::atof(argv[2]) : 0.0;
  if (!(seconds > 0)) {
    std::fprintf(stderr, "usage: bench_link [seconds per row [kernel us]]\n");
    return 2;
  }
  std::printf("%-34s %8s %8s %8s   %6s  %6s   %8s   %13s   %13s\n", "", "compute", "link", "step", "step/",
              "step/", "engine", "copy late, us", "kernel late, us");
  std::printf("%-34s %8s %8s %8s   %6s  %6s   %8s   %6s %6s   %6s %6s\n", "", "ms", "ms", "ms", "bound",
              "ideal", "ns/vertex", "p50", "p90", "p50", "p90");
  for (const double kernel_us : {5.0, 50.0, 500.0}) {
    if (only > 0 && only != kernel_us) continue;
    for (const double ratio : {0.7, 1.0, 1.4}) {
      for (const int variant : {0, 1, 2, 3}) {
        const bool back = variant % 2 == 1;
        Case c;
        c.thread = variant >= 2;
        c.kernel_us = kernel_us;
        c.link_ratio = ratio;
        c.offloads = back ? 0.5 : 0;
        if (kernel_us > 100) c.layers = 20;
        char name[64];
        std::snprintf(name, sizeof name, "%g us, link x %.1f%s%s", kernel_us, ratio, back ? ", offloads" : "",
                      c.thread ? ", thread" : "");
        measure(name, c, seconds);
      }
    }
  }
  return 0;
}
