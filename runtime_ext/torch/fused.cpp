#include "fused.h"

#include <ATen/core/Tensor.h>

#include <array>

namespace disco {
namespace {

constexpr std::size_t kMostOperands = kMostFusedOperands;

class HostKernel : public FusedKernel {
 public:
  using Function = void (*)(void* const*);
  explicit HostKernel(Function function) : function_(function) {}
  c10::DeviceType device_type() const override { return c10::DeviceType::CPU; }
  void launch(void* const* operands) const override { function_(operands); }

 private:
  Function function_;
};

const FusedKernel* kernel_of(std::int64_t handle) {
  TORCH_CHECK(handle != 0, "a fused kernel that is not loaded");
  return reinterpret_cast<const FusedKernel*>(handle);
}

}  // namespace

std::int64_t fused_host_kernel(std::int64_t function) {
  return reinterpret_cast<std::int64_t>(
      static_cast<FusedKernel*>(new HostKernel(reinterpret_cast<HostKernel::Function>(function))));
}

bool fused_kernel_is_for(const std::vector<c10::IValue>& args, c10::DeviceType type) {
  return kernel_of(args.at(0).toInt())->device_type() == type;
}

void FusedCall::run() const {
  std::array<void*, kMostOperands> addresses;
  for (std::size_t i = 0; i < operands.size(); ++i) addresses[i] = operands[i].address();
  kernel->launch(addresses.data());
}

FusedCall fused_call(const std::vector<c10::IValue>& args,
                     bool (*is_external)(const void* context, const c10::StorageImpl*), const void* context) {
  FusedCall call;
  call.kernel = kernel_of(args.at(0).toInt());
  for (const std::size_t list : {1, 2}) {
    for (const at::Tensor& tensor : args.at(list).toTensorVector()) {
      call.operands.push_back(operand_of(tensor, is_external, context));
    }
  }
  TORCH_CHECK(call.operands.size() <= kMostOperands, "a fused kernel with ", call.operands.size(),
              " operands");
  return call;
}

void run_fused(std::int64_t kernel, at::TensorList reads, at::TensorList writes) {
  std::vector<void*> operands;
  for (const at::Tensor& tensor : reads) operands.push_back(const_cast<void*>(tensor.const_data_ptr()));
  for (const at::Tensor& tensor : writes) operands.push_back(tensor.mutable_data_ptr());
  kernel_of(kernel)->launch(operands.data());
}

}  // namespace disco
