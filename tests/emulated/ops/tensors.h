// Tensors of the emulated device as the kernels of other devices see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <optional>
#include <vector>

#include "emulated.h"

namespace emulated {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The bytes of a device tensor, for kernels of the host; other tensors as they are.
inline at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  return at::from_blob(emuBytes(tensor.unsafeGetTensorImpl()->data()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

// A tensor of the same shape without memory. Of the host's tensors a number alone, which kernels of a device
// take beside its tensors: one that stands for a Python number stays one, of a type that Python has.
inline at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() != 0)) return tensor;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    const bool real = at::isFloatingType(tensor.scalar_type());
    const at::Tensor number = real ? tensor.to(at::kDouble) : tensor.clone();
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Bytes from a tensor's first element to its last.
inline std::size_t extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<std::size_t>(last + 1) * tensor.element_size();
}

inline void add_range(std::vector<Range>& ranges, const at::Tensor& tensor, bool written) {
  if (on_device(tensor) && tensor.numel() != 0)
    ranges.push_back({tensor.unsafeGetTensorImpl()->data(), extent(tensor), written});
}

// The same value with every tensor in it, also in lists, put through `change`.
template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor ? std::optional(change(*tensor)) : tensor);
    return changed;
  }
  return value;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

}  // namespace emulated
