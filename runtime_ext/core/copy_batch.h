// cudaMemcpyBatchAsync: several copies in one call of the CUDA runtime.
#pragma once

#include <span>

#include "cuda_device.h"

namespace disco {

// Of the runtime that `library` has, whose copies are made by `memcpy_async`. The arguments are those of its
// own version, whichever other runtimes the process has.
BatchApi load_batch_api(void* library, const void* memcpy_async);

// At most kMostCopies copies between this device and the host, none of which depends on another, in the order
// of `stream`. Returns the runtime's code: of one that is not 0 any copies may have been enqueued.
int copy_batch(const CudartApi& api, std::span<const Copy> copies, CudaStream stream);

}  // namespace disco
