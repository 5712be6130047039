// The driver's functions for devices, streams, events and copies, on the runtime's. A thread that has made no
// context current gets an error, as from the driver.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "../runtime/emulated.h"
#include "refused.h"

namespace {

thread_local bool current = false;

CUresult result(cudaError_t error) { return static_cast<CUresult>(error); }

cudaStream_t of(CUstream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t of(CUevent event) { return reinterpret_cast<cudaEvent_t>(event); }
void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

struct Named {
  CUresult code;
  const char* name;
};
constexpr Named kNames[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
};

// In the place of a GPU's code: lines of text with the path of a library, the name of a function there that
// takes the addresses of its operands, and for each operand its bytes and whether it is written.
struct HostFunction {
  std::string name;
  void (*run)(void* const*) = nullptr;
  std::vector<std::size_t> bytes;
  std::vector<bool> written;
};

}  // namespace

#define RETURN_WITHOUT_CONTEXT() \
  if (!current) return CUDA_ERROR_INVALID_CONTEXT

extern "C" {

// Called by cuCtxSetCurrent (libcuda.cpp).
void emuDriverContext(bool set) { current = set; }

CUresult cuDeviceGetCount(int* count) { return result(cudaGetDeviceCount(count)); }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = 1;
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    *value = refused("no virtual memory management") == 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* found, CUdevice device) {
  std::memset(found, 0, sizeof *found);
  std::snprintf(found->bytes, sizeof found->bytes, "emulated %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  std::snprintf(name, static_cast<std::size_t>(room), "Emulated H100 %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  cudaDeviceProp found;
  const cudaError_t error = cudaGetDeviceProperties(&found, device);
  *bytes = found.totalGlobalMem;
  return result(error);
}

CUresult cuCtxSynchronize() {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaDeviceSynchronize());
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), flags));
}

CUresult cuStreamSynchronize(CUstream stream) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaStreamSynchronize(of(stream)));
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), flags));
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaEventRecord(of(event), of(stream)));
}

CUresult cuEventSynchronize(CUevent event) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaEventSynchronize(of(event)));
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  RETURN_IF_REFUSED("cuMemHostAlloc");
  RETURN_WITHOUT_CONTEXT();
  return result(cudaHostAlloc(memory, bytes, flags));
}

CUresult cuMemFreeHost(void* memory) { return result(cudaFreeHost(memory)); }

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  RETURN_IF_REFUSED("cuMemcpyHtoDAsync");
  RETURN_WITHOUT_CONTEXT();
  return result(cudaMemcpyAsync(at(to), from, bytes, cudaMemcpyHostToDevice, of(stream)));
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  RETURN_IF_REFUSED("cuMemcpyDtoHAsync");
  RETURN_WITHOUT_CONTEXT();
  return result(cudaMemcpyAsync(to, at(from), bytes, cudaMemcpyDeviceToHost, of(stream)));
}

CUresult cuMemsetD8Async(CUdeviceptr begin, unsigned char value, size_t bytes, CUstream stream) {
  RETURN_WITHOUT_CONTEXT();
  return result(cudaMemsetAsync(at(begin), value, bytes, of(stream)));
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  std::istringstream text(static_cast<const char*>(code));
  std::string path;
  auto* function = new HostFunction;
  std::getline(text, path);
  std::getline(text, function->name);
  std::size_t bytes = 0;
  for (int written = 0; text >> bytes >> written;) {
    function->bytes.push_back(bytes);
    function->written.push_back(written != 0);
  }
  void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened != nullptr)
    function->run = reinterpret_cast<void (*)(void* const*)>(dlsym(opened, function->name.c_str()));
  if (function->run == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *library = reinterpret_cast<CUlibrary>(function);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char*) {
  *kernel = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream stream, void** arguments, void**) {
  const auto* function = reinterpret_cast<const HostFunction*>(kernel);
  std::vector<void*> operands;
  std::vector<emulated::Range> ranges;
  for (std::size_t i = 0; i < function->bytes.size(); ++i) {
    operands.push_back(*static_cast<void**>(arguments[i]));
    ranges.push_back({operands.back(), function->bytes[i], function->written[i]});
  }
  const auto run = [function, operands] {
    std::vector<void*> places;
    for (void* operand : operands) places.push_back(emuBytes(operand));
    function->run(places.data());
  };
  emuLaunch(stream, "fused kernel", run, ranges);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = "a CUresult without a name in the emulation";
  for (const Named& one : kNames) {
    if (one.code == error) *name = one.name;
  }
  return CUDA_SUCCESS;
}
}
