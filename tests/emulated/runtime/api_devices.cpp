// CUDA's functions about devices and errors.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "calls.h"
#include "device_memory.h"
#include "journal.h"
#include "settings.h"
#include "streams.h"

using namespace emulated;

namespace {

// An H100, as far as PyTorch asks. Compute capability decides which attention it chooses and its workspaces'
// size.
constexpr int kMajor = 9, kProcessors = 132, kThreads = 1024, kWarp = 32, kSharedOptIn = 232448,
              kVersion = 13000;

bool exists(int device) { return device >= 0 && device < settings().devices; }

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return answer(cudaErrorInvalidDevice);
  set_current_device(device);
  need_context();
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= settings().devices) return answer(cudaErrorInvalidDevice);
  std::memset(found, 0, sizeof *found);
  std::strcpy(found->name, "Emulated H100");
  found->totalGlobalMem = settings().device_bytes;
  found->major = kMajor;
  found->multiProcessorCount = kProcessors;
  found->warpSize = kWarp;
  found->maxThreadsPerBlock = kThreads;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = kThreads;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsPerMultiProcessor = 2 * kThreads;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = kSharedOptIn;
  found->sharedMemPerMultiprocessor = 233472;
  found->totalConstMem = 65536;
  found->memPitch = 2147483647;
  found->textureAlignment = 512;
  found->memoryBusWidth = 5120;
  found->l2CacheSize = 50 << 20;
  found->asyncEngineCount = 3;
  found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = found->managedMemory = 1;
  found->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = kMajor;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kProcessors;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kThreads;
      break;
    case cudaDevAttrHostRegisterReadOnlySupported:
      *value = 1;
      break;
    case cudaDevAttrWarpSize:
      *value = kWarp;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedOptIn;
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = settings().cudart;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  need_context();
  RETURN_IF_FAULTED();
  streams().synchronize(current_device());
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  std::snprintf(text, static_cast<std::size_t>(room), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!exists(device) || !exists(peer)) return answer(cudaErrorInvalidDevice);
  *can = device != peer && settings().peers != Peers::kNone ? 1 : 0;
  return cudaSuccess;
}

// The current device may use the memory of `peer` from now on.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  if (!exists(peer) || peer == current_device()) return answer(cudaErrorInvalidDevice);
  if (settings().peers == Peers::kNone) return answer(cudaErrorPeerAccessUnsupported);
  return enable_peer(current_device(), peer) ? cudaSuccess : answer(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaGetLastError() { return last_error(true); }
cudaError_t cudaPeekAtLastError() { return last_error(false); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "an error without a text in the emulation";
  }
}

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Every function of the real library that nothing here defines is generated with a call of this one.
int emuMissing(const char* name) {
  journal().count(std::string("missing ") + name);
  std::fprintf(stderr, "emulated CUDA: %s is not emulated\n", name);
  return answer(cudaErrorNotSupported);
}
}
