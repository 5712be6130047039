// The driver's functions for memory that is created apart from its address and shared as a file.
#include <cuda.h>

#include <cstdint>

#include "mapped_memory.h"
#include "refused.h"

namespace {

char* at(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

CUresult result(int code) { return static_cast<CUresult>(code); }

bool usual(const CUmemAllocationProp* wanted) {
  return wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

}  // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* wanted,
                                       CUmemAllocationGranularity_flags) {
  *bytes = emuVmGrain();
  return usual(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted,
                     unsigned long long flags) {
  RETURN_IF_REFUSED("cuMemCreate");
  const bool shared = wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (!usual(wanted) || !shared || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t made = 0;
  const int code = emuVmCreate(&made, bytes, wanted->location.id);
  *handle = made;
  return result(code);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return result(emuVmRelease(handle)); }

CUresult cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  RETURN_IF_REFUSED("cuMemExportToShareableHandle");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  return result(emuVmExport(static_cast<int*>(file), handle));
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* file,
                                        CUmemAllocationHandleType type) {
  RETURN_IF_REFUSED("cuMemImportFromShareableHandle");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t made = 0;
  const int code = emuVmImport(&made, static_cast<int>(reinterpret_cast<std::intptr_t>(file)));
  *handle = made;
  return result(code);
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  char* found = nullptr;
  const int code = emuVmReserve(&found, bytes);
  *address = reinterpret_cast<CUdeviceptr>(found);
  return result(code);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return result(emuVmFree(at(address), bytes)); }

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  RETURN_IF_REFUSED("cuMemMap");
  if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return result(emuVmMap(at(address), bytes, handle));
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* wanted, size_t count) {
  if (wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READ) RETURN_IF_REFUSED("cuMemSetAccess(READ)");
  if (count != 1 || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  return result(emuVmSetAccess(at(address), bytes, wanted->location.id, wanted->flags));
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  return result(emuVmGetAccess(flags, location->id, at(address)));
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return result(emuVmUnmap(at(address), bytes)); }
}
