#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAFunctions.h>

#include <mutex>

namespace emulated {
namespace {

constexpr std::uint64_t kDrawn = 4;  // the generator's offset is a multiple of it

}  // namespace

at::Generator drawn_generator(const std::optional<at::Generator>& given) {
  at::Generator generator =
      given && given->defined()
          ? *given
          : at::globalContext().defaultGenerator(c10::Device(at::kCUDA, c10::cuda::current_device()));
  const std::lock_guard lock(generator.mutex());
  c10::GeneratorImpl* state = generator.unsafeGetGeneratorImpl();
  const std::uint64_t seed = state->current_seed(), offset = state->get_offset();
  state->set_offset(offset + kDrawn);
  // Two large odd numbers spread seeds and offsets over all bits.
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset * 0xD1B54A32D192ED03ull + 1);
}

Job::Body dropout_body() {
  return [generator = drawn_generator(std::nullopt)](Job& job) {
    const at::Tensor& input = job.tensor(0);
    const double p = job.arguments[1].toDouble();
    if (!job.arguments[2].isNone() && !job.arguments[2].toBool()) {
      job.results[0].copy_(input);
      job.results[1].fill_(true);
      return;
    }
    const at::Tensor kept =
        at::empty(input.sizes(), input.options().dtype(at::kFloat)).bernoulli_(1 - p, generator);
    job.results[1].copy_(kept);
    job.results[0].copy_(at::mul(input, kept.to(input.dtype())).mul_(p == 1 ? 0.0 : 1 / (1 - p)));
  };
}

}  // namespace emulated
