// What the files of the CUDA device share: failed calls as exceptions, and the calling thread's device.
#pragma once

#include <string>

#include "cuda_device.h"

namespace disco {

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

// Makes `device` current for the calling thread while it lives.
class CurrentDevice {
 public:
  CurrentDevice(const CudartApi& api, int device) : api_(api) {
    check_cuda(api_, "cudaGetDevice", api_.get_device(&previous_));
    check_cuda(api_, "cudaSetDevice", api_.set_device(device));
  }
  ~CurrentDevice() { api_.set_device(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const CudartApi& api_;
  int previous_ = 0;
};

}  // namespace disco
