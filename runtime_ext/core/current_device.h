// What the files of the CUDA device share: failed calls as exceptions, and the calling thread's device.
#pragma once

#include <string>

#include "cuda_device.h"

namespace disco {

// Values of the CUDA runtime's ABI; the tests compare them with its headers where those are installed.
inline constexpr int kSuccess = 0;
inline constexpr int kNotReady = 600;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;

// The text of a failed call. Makes the runtime forget it: PyTorch asks for the thread's last error after
// every kernel that it launches, and would blame the kernel.
inline std::string cuda_error_text(const CudartApi& api, const char* call, int code) {
  if (api.get_last_error != nullptr) api.get_last_error();
  const char* text = api.error_string != nullptr ? api.error_string(code) : nullptr;
  return std::string(call) + " failed with error " + std::to_string(code) + ": " +
         (text != nullptr ? text : "?");
}

// Throws CudaError unless `code` is 0.
inline void check_cuda(const CudartApi& api, const char* call, int code) {
  if (code != 0) throw CudaError(call, code, cuda_error_text(api, call, code));
}

// Makes `device` current for the calling thread while it lives. The device from before is set back unless
// that would create a context on it, some hundred MiB of its memory: from CUDA 12 on cudaSetDevice does. So
// whoever has not used that device yet stays on `device`; inside one of PyTorch's device guards nothing is
// changed.
class CurrentDevice {
 public:
  CurrentDevice(const CudartApi& api, int device) : api_(api), device_(device) {
    check_cuda(api_, "cudaGetDevice", api_.get_device(&previous_));
    if (previous_ != device_) check_cuda(api_, "cudaSetDevice", api_.set_device(device_));
  }
  ~CurrentDevice() {
    if (previous_ != device_ && has_context(previous_)) api_.set_device(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  // Yes where the driver cannot be asked.
  bool has_context(int device) const {
    unsigned flags = 0;
    int active = 0;
    return api_.primary_context_state == nullptr ||
           api_.primary_context_state(device, &flags, &active) != 0 || active != 0;
  }

  const CudartApi& api_;
  int device_;
  int previous_ = 0;
};

}  // namespace disco
