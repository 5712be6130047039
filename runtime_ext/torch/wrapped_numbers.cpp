#include "wrapped_numbers.h"

#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <utility>

namespace disco {
namespace {

const std::array<std::string, 8> kNames = {"aten::add",  "aten::sub",  "aten::mul",  "aten::div",
                                           "aten::add_", "aten::sub_", "aten::mul_", "aten::div_"};

}  // namespace

std::vector<std::string> number_wrapping_ops() { return {kNames.begin(), kNames.end()}; }

at::Tensor wrapped_number(const c10::Scalar& value) {
  const c10::InferenceMode inference;
  at::Tensor tensor = at::scalar_to_tensor(value);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// A number joins a TensorIterator in the dtype that the op computes in, so that it is not converted, with an
// allocation, at each run. Reduced precision reads the number before it is rounded, so there it must be
// exact.
void convert_numbers(const std::string& name, std::vector<c10::IValue>& args) {
  if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) return;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  for (const c10::IValue& arg : args) {
    if (!arg.isTensor() || arg.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) continue;
    const c10::ScalarType own = arg.toTensor().scalar_type();
    if (!c10::isFloatingType(own) || (dtype != c10::ScalarType::Undefined && dtype != own)) return;
    dtype = own;
  }
  if (dtype == c10::ScalarType::Undefined) return;
  for (c10::IValue& arg : args) {
    if (!arg.isTensor() || !arg.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) continue;
    const c10::InferenceMode inference;
    const at::Tensor& number = arg.toTensor();
    at::Tensor converted = number.to(dtype);
    const bool exact = number.item().equal(converted.item().toDouble());
    if (c10::isReducedFloatingType(dtype) && !exact) continue;
    converted.unsafeGetTensorImpl()->set_wrapped_number(true);
    arg = std::move(converted);
  }
}

}  // namespace disco
