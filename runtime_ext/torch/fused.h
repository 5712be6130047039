// Kernels that compute a run of ops in one. disco_accel/fuse has them compiled; the op table calls them
// without the dispatcher.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "direct.h"

namespace disco {

// The name of the op whose calls these are: fused(int kernel, Tensor[] reads, Tensor(a!)[] writes) -> ().
inline constexpr const char* kFusedOp = "disco_accel::fused";

// disco_accel/fuse/fused_runs.py joins fewer.
inline constexpr std::size_t kMostFusedOperands = 64;

// Lives as long as the process: plans and cached calls name it by its address.
class FusedKernel {
 public:
  virtual ~FusedKernel() = default;
  // Of the memory that `launch` takes addresses of.
  virtual c10::DeviceType device_type() const = 0;
  // Runs on this thread, or launches on PyTorch's current stream. `operands`: first elements of the tensors
  // that are read, then of those that are written.
  virtual void launch(void* const* operands) const = 0;
};

// The handle of a function in this process's memory that takes `operands`, for tensors on the host.
std::int64_t fused_host_kernel(std::int64_t function);

// The handle of kernel `name` in `code`, a cubin, for tensors on CUDA devices. `launch`: the blocks of the
// grid along x, y and z, the threads of a block, its bytes of shared memory. `order`: the kernel's pointers
// by their places among the operands; `numbers`: its 32-bit arguments behind those. Throws c10::Error with
// the driver's reason.
std::int64_t fused_cuda_kernel(const at::Tensor& code, const std::string& name,
                               const std::vector<std::int64_t>& launch,
                               const std::vector<std::int64_t>& order,
                               const std::vector<std::int64_t>& numbers);

// Whether `args`, of kFusedOp, are of a kernel for memory of this kind of device.
bool fused_kernel_is_for(const std::vector<c10::IValue>& args, c10::DeviceType type);

// A prepared call.
struct FusedCall {
  const FusedKernel* kernel = nullptr;
  std::vector<Operand> operands;

  void run() const;
};

// `args`: decoded, of kFusedOp.
FusedCall fused_call(const std::vector<c10::IValue>& args,
                     bool (*is_external)(const void* context, const c10::StorageImpl*), const void* context);

// The op's kernel for calls through the dispatcher.
void run_fused(std::int64_t kernel, at::TensorList reads, at::TensorList writes);

}  // namespace disco
