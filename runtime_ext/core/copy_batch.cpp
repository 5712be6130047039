#include "copy_batch.h"

#include <dlfcn.h>

#include <array>

#include "current_device.h"

namespace disco {
namespace {

// Versions of the runtime, as cudaRuntimeGetVersion tells them.
constexpr int kFirst = 12080;
constexpr int kChanged = 13000;
constexpr int kUnknown = 14000;  // whose arguments nobody has seen

// Values of the CUDA runtime's ABI.
constexpr int kStreamOrder = 1;  // cudaMemcpySrcAccessOrderStream

// cudaMemcpyAttributes. The places are hints about memory that moves between host and devices.
struct Attributes {
  struct Location {
    int type = 0;
    int id = 0;
  };
  int source_order = kStreamOrder;
  Location source;
  Location target;
  unsigned flags = 0;
};

int version_of(const char* file) {
  void* library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  int version = 0;
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(library, "cudaRuntimeGetVersion"));
  if (get == nullptr || get(&version) != kSuccess) version = 0;
  dlclose(library);
  return version;
}

}  // namespace

BatchApi load_batch_api(void* library, const void* memcpy_async) {
  void* symbol = dlsym(library, "cudaMemcpyBatchAsync");
  Dl_info batches{}, copies{};
  if (symbol == nullptr || dladdr(symbol, &batches) == 0 || dladdr(memcpy_async, &copies) == 0) return {};
  if (batches.dli_fbase != copies.dli_fbase) return {};
  const int version = version_of(batches.dli_fname);
  BatchApi api;
  if (version >= kFirst && version < kChanged)
    api.of_cuda_12 = reinterpret_cast<decltype(api.of_cuda_12)>(symbol);
  if (version >= kChanged && version < kUnknown)
    api.of_cuda_13 = reinterpret_cast<decltype(api.of_cuda_13)>(symbol);
  return api;
}

int copy_batch(const CudartApi& api, std::span<const Copy> copies, CudaStream stream) {
  std::array<void*, kMostCopies> targets;
  std::array<void*, kMostCopies> sources;
  std::array<std::size_t, kMostCopies> bytes;
  std::size_t count = 0;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;
    targets[count] = copy.dst;
    sources[count] = const_cast<void*>(copy.src);
    bytes[count++] = static_cast<std::size_t>(copy.bytes);
  }
  if (count == 0) return kSuccess;
  Attributes attributes;
  std::size_t first = 0;
  if (api.batches.of_cuda_13 != nullptr)
    return api.batches.of_cuda_13(targets.data(), sources.data(), bytes.data(), count, &attributes, &first, 1,
                                  stream);
  std::size_t failed = 0;
  return api.batches.of_cuda_12(targets.data(), sources.data(), bytes.data(), count, &attributes, &first, 1,
                                &failed, stream);
}

}  // namespace disco
