// What runs on a fake CUDA runtime: the kernels of a Checker.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_device.h"
#include "fake_cudart.h"
#include "support.h"

namespace disco::testing {

// Launches the Checker's kernels on the fake's streams; an op may throw when it is launched.
class Launcher final : public OpRunner {
 public:
  Launcher(FakeCudart& cudart, Checker& checker) : cudart_(cudart), checker_(checker) {}
  void run(std::int32_t op, int device, int stream) override {
    if (op == throw_at) throw std::runtime_error("no launch of " + std::to_string(op));
    // As PyTorch does around every launch.
    if (const int code = std::exchange(cudart_.last_error, 0); code != 0)
      throw std::runtime_error("a kernel was blamed for error " + std::to_string(code));
    CudaDevice& target = *targets.at(static_cast<std::size_t>(device));
    if (cudart_.device != ordinals.at(static_cast<std::size_t>(device)))
      throw std::runtime_error("device " + std::to_string(cudart_.device) + " is current");
    cudart_.launch(target.launch_stream(stream), [=, this] { checker_.run(op, device, stream); });
  }
  bool repeats(std::int32_t op, int) override { return op % 16 != draws; }
  std::vector<CudaDevice*> targets;  // by device of the engine
  std::vector<int> ordinals = {0};   // likewise: which GPU each is
  std::int32_t throw_at = -1;
  std::int32_t draws = -1;  // ops of which every sixteenth, from this on, is alike in no two steps

 private:
  FakeCudart& cudart_;
  Checker& checker_;
};

}  // namespace disco::testing
