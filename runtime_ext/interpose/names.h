// The calls of CUDA that the library stands in front of, and those that it asks itself.
#pragma once
#include <cstddef>

namespace disco::interpose {

enum class Layer { kRuntime, kDriver };

// Of the driver: the name that cuGetProcAddress takes, and the versions [first, end) for which that means the
// function that is exported under `name`, whose types are those of driver_calls.cpp. Beyond, others would be
// called with the wrong arguments. kNever: cuGetProcAddress does not know the name.
inline constexpr int kNever = 0;
// CUDA 13's last; later headers may give a name other types.
inline constexpr int kKnown = 14000;

// NAME(exported name)
#define DISCO_RUNTIME_CALLS(NAME)        \
  NAME(cudaMalloc)                       \
  NAME(cudaMallocManaged)                \
  NAME(cudaMallocPitch)                  \
  NAME(cudaMalloc3D)                     \
  NAME(cudaMallocArray)                  \
  NAME(cudaMalloc3DArray)                \
  NAME(cudaMallocMipmappedArray)         \
  NAME(cudaMallocAsync)                  \
  NAME(cudaMallocAsync_ptsz)             \
  NAME(cudaMallocFromPoolAsync)          \
  NAME(cudaMallocFromPoolAsync_ptsz)     \
  NAME(cudaFree)                         \
  NAME(cudaFreeAsync)                    \
  NAME(cudaFreeAsync_ptsz)               \
  NAME(cudaFreeArray)                    \
  NAME(cudaFreeMipmappedArray)           \
  NAME(cudaMemPoolCreate)                \
  NAME(cudaMemPoolDestroy)               \
  NAME(cudaMemPoolTrimTo)                \
  NAME(cudaDeviceReset)                  \
  NAME(cudaDeviceSynchronize)            \
  NAME(cudaStreamSynchronize)            \
  NAME(cudaStreamSynchronize_ptsz)       \
  NAME(cudaGetDriverEntryPoint)          \
  NAME(cudaGetDriverEntryPoint_ptsz)     \
  NAME(cudaGetDriverEntryPointByVersion) \
  NAME(cudaGetDriverEntryPointByVersion_ptsz)

// NAME(exported name, name for cuGetProcAddress, first version, end, of per-thread streams)
#define DISCO_DRIVER_CALLS(NAME)                                                         \
  NAME(cuMemAlloc_v2, "cuMemAlloc", 3020, kKnown, false)                                 \
  NAME(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, kKnown, false)                       \
  NAME(cuMemAllocManaged, "cuMemAllocManaged", 6000, kKnown, false)                      \
  NAME(cuMemAllocAsync, "cuMemAllocAsync", 11020, kKnown, false)                         \
  NAME(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, kKnown, true)                     \
  NAME(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, kKnown, false)         \
  NAME(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, kKnown, true)     \
  NAME(cuMemFree_v2, "cuMemFree", 3020, kKnown, false)                                   \
  NAME(cuMemFreeAsync, "cuMemFreeAsync", 11020, kKnown, false)                           \
  NAME(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, kKnown, true)                       \
  NAME(cuArrayCreate_v2, "cuArrayCreate", 3020, kKnown, false)                           \
  NAME(cuArray3DCreate_v2, "cuArray3DCreate", 3020, kKnown, false)                       \
  NAME(cuArrayDestroy, "cuArrayDestroy", 2000, kKnown, false)                            \
  NAME(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, kKnown, false)            \
  NAME(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, kKnown, false)          \
  NAME(cuMemCreate, "cuMemCreate", 10020, kKnown, false)                                 \
  NAME(cuMemRelease, "cuMemRelease", 10020, kKnown, false)                               \
  NAME(cuMemMap, "cuMemMap", 10020, kKnown, false)                                       \
  NAME(cuMemUnmap, "cuMemUnmap", 10020, kKnown, false)                                   \
  NAME(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, kKnown, false) \
  NAME(cuMemPoolCreate, "cuMemPoolCreate", 11020, kKnown, false)                         \
  NAME(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, kKnown, false)                       \
  NAME(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, kKnown, false)                         \
  NAME(cuCtxDestroy_v2, "cuCtxDestroy", 4000, kKnown, false)                             \
  NAME(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, kKnown, false)        \
  NAME(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, kKnown, false)  \
  NAME(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, kKnown, false)      \
  NAME(cuCtxSynchronize, "cuCtxSynchronize", 2000, 13000, false)                         \
  NAME(cuStreamSynchronize, "cuStreamSynchronize", 2000, kKnown, false)                  \
  NAME(cuStreamSynchronize_ptsz, "cuStreamSynchronize", 7000, kKnown, true)              \
  NAME(cuGetProcAddress, "cuGetProcAddress", 11030, 12000, false)                        \
  NAME(cuGetProcAddress_v2, "cuGetProcAddress", 12000, kKnown, false)

// Asked by the library itself, never replaced. NAME(exported name, layer)
#define DISCO_QUERIES(NAME)                  \
  NAME(cudaGetDevice, kRuntime)              \
  NAME(cudaMemGetInfo, kRuntime)             \
  NAME(cudaPeekAtLastError, kRuntime)        \
  NAME(cudaGetLastError, kRuntime)           \
  NAME(cudaStreamIsCapturing, kRuntime)      \
  NAME(cudaStreamIsCapturing_ptsz, kRuntime) \
  NAME(cudaStreamGetDevice, kRuntime)        \
  NAME(cudaStreamGetDevice_ptsz, kRuntime)   \
  NAME(cudaDeviceGetMemPool, kRuntime)       \
  NAME(cudaMemPoolGetAttribute, kRuntime)    \
  NAME(cuCtxGetDevice, kDriver)              \
  NAME(cuCtxGetCurrent, kDriver)             \
  NAME(cuDeviceTotalMem_v2, kDriver)         \
  NAME(cuDevicePrimaryCtxGetState, kDriver)  \
  NAME(cuStreamIsCapturing, kDriver)         \
  NAME(cuStreamIsCapturing_ptsz, kDriver)    \
  NAME(cuStreamGetDevice, kDriver)           \
  NAME(cuStreamGetDevice_ptsz, kDriver)      \
  NAME(cuDeviceGetMemPool, kDriver)          \
  NAME(cuMemPoolGetAttribute, kDriver)

enum class Id : int {
#define DISCO_ENUM(name, ...) name,
  DISCO_RUNTIME_CALLS(DISCO_ENUM) DISCO_DRIVER_CALLS(DISCO_ENUM) DISCO_QUERIES(DISCO_ENUM)
#undef DISCO_ENUM
      kCount
};

inline constexpr int kIds = static_cast<int>(Id::kCount);

const char* name_of(Id id);

}  // namespace disco::interpose
