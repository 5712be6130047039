// Python numbers among the arguments of an op, in a tensor's place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>

#include <string>
#include <vector>

namespace disco {

// A Python number in a tensor's place, as in `x * 2`: it promotes like a scalar.
at::Tensor wrapped_number(const c10::Scalar& value);

// Converts the numbers among `args` to the tensors' dtype, if `name` is one of number_wrapping_ops().
void convert_numbers(const std::string& name, std::vector<c10::IValue>& args);

// Names of the ops that compute with a number in the dtype of their tensors. disco_accel/graph/op_traits.py
// has the same.
std::vector<std::string> number_wrapping_ops();

}  // namespace disco
