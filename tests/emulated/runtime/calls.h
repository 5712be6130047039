// What every function of the runtime does alike: the calling thread's device and last error, devices'
// contexts.
#pragma once

#include <cuda_runtime_api.h>

#include "faults.h"

namespace emulated {

int current_device();
void set_current_device(int device);
// A call that needs the current device made it the process's: from then on it has a context.
void need_context();
bool has_context(int device);
// Lets `device` use the memory of `peer`; false if it may already.
bool enable_peer(int device, int peer);
bool reaches_peer(int device, int peer);

// Notes `error` as the thread's last one and returns it.
cudaError_t answer(cudaError_t error);
cudaError_t last_error(bool forget);

}  // namespace emulated

// After a fault every call but a few answers with its error.
#define RETURN_IF_FAULTED()                                      \
  do {                                                           \
    if (const int sticky = emulated::faults().sticky())          \
      return emulated::answer(static_cast<cudaError_t>(sticky)); \
  } while (false)
