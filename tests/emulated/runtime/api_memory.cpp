// CUDA's functions that give and take memory.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <string>

#include "calls.h"
#include "device_memory.h"
#include "host_memory.h"
#include "journal.h"
#include "settings.h"
#include "streams.h"

using namespace emulated;

namespace {

constexpr std::size_t kPage = 4096;
std::atomic<std::size_t> pin_limit{0};
std::atomic<std::size_t> pin_sum_limit{0};

std::string on_device(const char* call, int device) { return call + (" " + std::to_string(device)); }

}  // namespace

extern "C" {

void* emuBytes(const void* address) { return device_memory().bytes(address); }

std::size_t emuLiveBytes(int device, int peak) {
  return peak != 0 ? device_memory().peak(device) : device_memory().live(device);
}

void emuResetPeak(int device) { device_memory().reset_peak(device); }

void emuPinLimit(std::size_t bytes, std::size_t more) {
  pin_limit = bytes;
  pin_sum_limit = more == 0 ? 0 : host_memory().pinned_bytes() + more;
}

cudaError_t cudaMalloc(void** block, std::size_t bytes) {
  need_context();
  RETURN_IF_FAULTED();
  if (const cudaError_t error = refuse_while_capturing()) return answer(error);
  journal().count(on_device("cudaMalloc", current_device()));
  *block = device_memory().allocate(current_device(), bytes);
  return *block != nullptr ? cudaSuccess : answer(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* block) {
  need_context();
  RETURN_IF_FAULTED();
  if (block == nullptr) return cudaSuccess;
  if (const cudaError_t error = refuse_while_capturing()) return answer(error);
  const int device = device_memory().device_of(block);
  if (device >= 0) streams().synchronize(device);
  if (!device_memory().release(block)) {
    journal().complain("cudaFree of what cudaMalloc did not give");
    return answer(cudaErrorInvalidValue);
  }
  journal().count(on_device("cudaFree", device));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  need_context();
  *total = settings().device_bytes;
  *free = *total - device_memory().live(current_device());
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** block, std::size_t bytes, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  if (const cudaError_t error = refuse_while_capturing()) return answer(error);
  const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return answer(cudaErrorMemoryAllocation);
  host_memory().pin(made, size);
  journal().count("cudaHostAlloc");
  *block = made;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** block, std::size_t bytes) { return cudaHostAlloc(block, bytes, 0); }

cudaError_t cudaFreeHost(void* block) {
  if (block == nullptr) return cudaSuccess;
  const std::size_t bytes = host_memory().unpin(block, "cudaFreeHost");
  if (bytes == 0) return answer(cudaErrorInvalidValue);
  streams().synchronize(-1);
  munmap(block, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* begin, std::size_t bytes, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  journal().count("cudaHostRegister");
  if (bytes == 0) return answer(cudaErrorInvalidValue);
  if (pin_limit != 0 && bytes > pin_limit) return answer(cudaErrorMemoryAllocation);
  if (pin_sum_limit != 0 && host_memory().pinned_bytes() + bytes > pin_sum_limit)
    return answer(cudaErrorMemoryAllocation);
  if (!host_memory().pin(begin, bytes)) {
    journal().complain("cudaHostRegister of memory that is registered");
    return answer(cudaErrorHostMemoryAlreadyRegistered);
  }
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* begin) {
  journal().count("cudaHostUnregister");
  if (host_memory().unpin(begin, "cudaHostUnregister") == 0) {
    journal().complain("cudaHostUnregister of memory that is not registered");
    return answer(cudaErrorHostMemoryNotRegistered);
  }
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::memset(found, 0, sizeof *found);
  if (device_memory().owns(address)) {
    found->type = cudaMemoryTypeDevice;
    found->device = std::max(0, device_memory().device_of(address));
    found->devicePointer = const_cast<void*>(address);
  } else if (host_memory().pinned(address, 1)) {
    found->type = cudaMemoryTypeHost;
    found->device = current_device();
    found->hostPointer = found->devicePointer = const_cast<void*>(address);
  } else {
    found->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
}
