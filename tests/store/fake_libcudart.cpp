// Stands for libcudart: it opens the driver when it is first used, takes its functions from cuGetProcAddress,
// as NVIDIA's does, and keeps the last error of each thread.
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>

namespace {

using Address = unsigned long long;
thread_local int last_error = 0;

int note(int code) { return code == 0 ? 0 : last_error = code; }

void* of_driver(const char* symbol) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  using Get = int (*)(const char*, void**, int, unsigned long long, int*);
  static const auto get = reinterpret_cast<Get>(dlsym(driver, "cuGetProcAddress_v2"));
  void* function = nullptr;
  get(symbol, &function, 13000, 0, nullptr);
  return function;
}

template <typename... Arguments>
int driver(const char* symbol, Arguments... arguments) {
  return note(reinterpret_cast<int (*)(Arguments...)>(of_driver(symbol))(arguments...));
}

Address number(void* pointer) { return reinterpret_cast<Address>(pointer); }
Address* as_address(void** pointer) { return reinterpret_cast<Address*>(pointer); }

}  // namespace

extern "C" {

int fakeForked() { return driver("fakeDriverForked"); }
int cudaPeekAtLastError() { return last_error; }
int cudaGetLastError() {
  const int code = last_error;
  last_error = 0;
  return code;
}
int cudaSetDevice(int device) {
  void* context = nullptr;
  driver("cuDevicePrimaryCtxRetain", &context, device);
  return driver("cuCtxSetCurrent", context);
}
int cudaGetDevice(int* device) { return driver("cuCtxGetDevice", device); }
int cudaMalloc(void** address, std::size_t bytes) { return driver("cuMemAlloc", as_address(address), bytes); }
int cudaMallocManaged(void** address, std::size_t bytes, unsigned flags) {
  return driver("cuMemAllocManaged", as_address(address), bytes, flags);
}
int cudaMallocPitch(void** address, std::size_t* pitch, std::size_t width, std::size_t height) {
  return driver("cuMemAllocPitch", as_address(address), pitch, width, height, 4u);
}
struct Extent {
  std::size_t width, height, depth;
};
struct Pitched {
  void* address;
  std::size_t pitch, xsize, ysize;
};
int cudaMalloc3D(Pitched* pointer, Extent extent) {
  return cudaMallocPitch(&pointer->address, &pointer->pitch, extent.width, extent.height * extent.depth);
}
struct Format {
  int x, y, z, w, kind;
};
struct Array {
  std::size_t width, height, depth;
  int format;
  unsigned channels, flags;
};
int cudaMalloc3DArray(void** array, const Format* format, Extent extent, unsigned flags) {
  const unsigned channels = (format->x != 0) + (format->y != 0) + (format->z != 0) + (format->w != 0);
  const Array made{extent.width, extent.height, extent.depth, format->x == 32 ? 0x20 : 0x01, channels, flags};
  return driver("cuArray3DCreate", array, &made);
}
int cudaMallocArray(void** array, const Format* format, std::size_t width, std::size_t height,
                    unsigned flags) {
  return cudaMalloc3DArray(array, format, {width, height, 0}, flags);
}
int cudaFreeArray(void* array) { return driver("cuArrayDestroy", array); }
int cudaFree(void* address) { return driver("cuMemFree", number(address)); }
int cudaMallocAsync(void** address, std::size_t bytes, void* stream) {
  return driver("cuMemAllocAsync", as_address(address), bytes, stream);
}
int cudaMallocFromPoolAsync(void** address, std::size_t bytes, void* pool, void* stream) {
  return driver("cuMemAllocFromPoolAsync", as_address(address), bytes, pool, stream);
}
int cudaFreeAsync(void* address, void* stream) { return driver("cuMemFreeAsync", number(address), stream); }
int cudaMemPoolCreate(void** pool, const void* props) { return driver("cuMemPoolCreate", pool, props); }
int cudaMemPoolDestroy(void* pool) { return driver("cuMemPoolDestroy", pool); }
int cudaMemPoolTrimTo(void* pool, std::size_t keep) { return driver("cuMemPoolTrimTo", pool, keep); }
int cudaMemPoolGetAttribute(void* pool, int attribute, void* value) {
  if (std::getenv("FAKE_NO_POOL_ATTRIBUTES") != nullptr) return note(801);
  return driver("cuMemPoolGetAttribute", pool, attribute, value);
}
int cudaDeviceGetMemPool(void** pool, int device) { return driver("cuDeviceGetMemPool", pool, device); }
int cudaStreamIsCapturing(void* stream, int* status) { return driver("cuStreamIsCapturing", stream, status); }
int cudaStreamSynchronize(void* stream) { return driver("cuStreamSynchronize", stream); }
int cudaDeviceSynchronize() { return driver("cuStreamSynchronize", static_cast<void*>(nullptr)); }
int cudaDeviceReset() {
  int device = 0;
  cudaGetDevice(&device);
  return driver("cuDevicePrimaryCtxReset", device);
}
int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  int device = 0;
  cudaGetDevice(&device);
  *free = 0;
  return driver("cuDeviceTotalMem", total, device);
}
int cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long, int*) {
  return note((*function = of_driver(symbol)) == nullptr ? 500 : 0);
}
}
