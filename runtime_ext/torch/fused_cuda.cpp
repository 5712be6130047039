// Fused kernels of GPUs, launched by CUDA's driver: no CUDA header.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <utility>

#include "fused.h"

namespace disco {
namespace {

// Of cuda.h, 12.0 and later.
using Library = void*;
using Function = void*;

struct Driver {
  int (*load)(Library*, const void* code, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
  int (*kernel)(Function*, Library, const char*) = nullptr;
  int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**) = nullptr;
  int (*reason)(int, const char**) = nullptr;

  static const Driver& get() {
    static const Driver driver = [] {
      Driver found;
      void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
      TORCH_CHECK(library != nullptr, "fused kernels: there is no libcuda.so.1");
      const auto resolve = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
        TORCH_CHECK(function != nullptr, "fused kernels: this driver has no ", name, "; update it");
      };
      resolve(found.load, "cuLibraryLoadData");
      resolve(found.kernel, "cuLibraryGetKernel");
      resolve(found.launch, "cuLaunchKernel");
      resolve(found.reason, "cuGetErrorString");
      return found;
    }();
    return driver;
  }

  void check(int code, const char* what) const {
    if (code == 0) return;
    const char* text = nullptr;
    reason(code, &text);
    TORCH_CHECK(false, what, " failed with ", code, ": ", text == nullptr ? "?" : text);
  }
};

// The current stream of the current device, as the driver names it: the engine's streams are external ones,
// whose id is the handle.
void* current_stream() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  const c10::StreamId id = guard.getStream(guard.getDevice()).id();
  TORCH_CHECK((id & 1) == 0, "fused kernels run on streams of an engine, or on the default stream");
  return reinterpret_cast<void*>(id);
}

class CudaKernel : public FusedKernel {
 public:
  CudaKernel(Function function, std::array<unsigned, 5> launch, std::vector<std::size_t> order,
             std::vector<std::int32_t> numbers)
      : function_(function), launch_(launch), order_(std::move(order)), numbers_(std::move(numbers)) {}

  c10::DeviceType device_type() const override { return c10::DeviceType::CUDA; }

  void launch(void* const* operands) const override {
    std::array<void*, kMostFusedOperands> pointers;
    std::array<void*, kMostFusedOperands + 8> arguments;
    std::size_t count = 0;
    for (const std::size_t place : order_) {
      pointers[count] = operands[place];
      arguments[count] = &pointers[count];
      ++count;
    }
    for (const std::int32_t& number : numbers_) arguments[count++] = const_cast<std::int32_t*>(&number);
    // Triton's kernels end with pointers to scratch, which these have none of.
    void* none = nullptr;
    arguments[count++] = &none;
    arguments[count++] = &none;
    const auto& [x, y, z, threads, shared] = launch_;
    const Driver& driver = Driver::get();
    driver.check(
        driver.launch(function_, x, y, z, threads, 1, 1, shared, current_stream(), arguments.data(), nullptr),
        "cuLaunchKernel");
  }

 private:
  Function function_;
  std::array<unsigned, 5> launch_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> numbers_;
};

}  // namespace

std::int64_t fused_cuda_kernel(const at::Tensor& code, const std::string& name,
                               const std::vector<std::int64_t>& launch,
                               const std::vector<std::int64_t>& order,
                               const std::vector<std::int64_t>& numbers) {
  TORCH_CHECK(launch.size() == 5 && order.size() <= kMostFusedOperands && numbers.size() <= 4,
              "fused kernel ", name, ": arguments that nobody can launch it with");
  const Driver& driver = Driver::get();
  Library library = nullptr;
  Function function = nullptr;
  driver.check(driver.load(&library, code.const_data_ptr(), nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
  driver.check(driver.kernel(&function, library, name.c_str()), "cuLibraryGetKernel");
  std::array<unsigned, 5> sizes{};
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<unsigned>(launch[i]);
  auto* const kernel =
      new CudaKernel(function, sizes, {order.begin(), order.end()}, {numbers.begin(), numbers.end()});
  return reinterpret_cast<std::int64_t>(static_cast<FusedKernel*>(kernel));
}

}  // namespace disco
