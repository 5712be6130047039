// Whether one loop thread keeps several devices busy: steps of kernels of assumed time, which nobody
// computes. Usage: bench_loop kernels steps. Prints for each case and step: devices, microseconds of a
// kernel, of a launch, and of the step.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "assumed_device.h"

namespace {

using disco::testing::AssumedTimes;

class Nothing final : public disco::OpRunner {
 public:
  void run(std::int32_t, int, int) override {}
};

bool measure(int devices, AssumedTimes times, int kernels, int steps) {
  Nothing nothing;
  disco::Engine engine(disco::testing::ladders(devices, kernels), disco::testing::assumed(devices, times),
                       nothing, {});
  for (int step = 0; step <= steps; ++step) {
    engine.begin();
    if (engine.wait_end(600) != disco::Status::kDone) {
      std::fprintf(stderr, "bench_loop: %s\n", engine.last_error().message.c_str());
      return false;
    }
    if (step == 0) continue;  // warms up
    std::printf("%d %.3f %.3f %.3f\n", devices, static_cast<double>(times.kernel_ns) * 1e-3,
                static_cast<double>(times.launch_ns) * 1e-3,
                static_cast<double>(engine.counters().step_ns) * 1e-3);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int kernels = argc == 3 ? std::atoi(argv[1]) : 0;
  const int steps = argc == 3 ? std::atoi(argv[2]) : 0;
  if (kernels < 1 || steps < 1) {
    std::fprintf(stderr, "usage: bench_loop kernels steps\n");
    return 2;
  }
  constexpr std::int64_t kCopyNs = 20'000;
  constexpr std::pair<std::int64_t, std::int64_t> kCases[] = {
      {100'000, 0}, {100'000, 5'000}, {40'000, 5'000}, {20'000, 5'000}};
  for (const int devices : {1, 8}) {
    if (!measure(devices, {}, kernels, steps)) return 1;
    for (const auto& [kernel_ns, launch_ns] : kCases) {
      if (!measure(devices, {kernel_ns, kCopyNs, launch_ns}, kernels, steps)) return 1;
    }
  }
  return 0;
}
