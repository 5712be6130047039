// Small calls without the dispatcher: in a step of hundreds of kernels of a microsecond each, finding out
// what to compute costs more than computing it.
//
// Elementwise fp32 arithmetic has one right result for each element, and matrix products go to the BLAS
// routine that ATen calls, with the arguments that ATen gives it. So the bits are ATen's; record() compares
// them for every op that a plan uses, and falls back on the dispatcher where they differ.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace disco {

// Where a tensor begins: a fixed address, or an offset in a storage whose pointer changes from step to step.
struct Operand {
  std::byte* fixed = nullptr;
  const c10::StorageImpl* external = nullptr;
  std::int64_t offset = 0;

  std::byte* address() const {
    if (external == nullptr) return fixed;
    return static_cast<std::byte*>(external->data_ptr().get()) + offset;
  }
};

// Where `tensor` begins. `is_external` says whether a storage's pointer changes.
Operand operand_of(const at::Tensor& tensor,
                   bool (*is_external)(const void* context, const c10::StorageImpl*), const void* context);

// A part of the output that is copied from an input: loop sizes and strides (in elements, innermost first).
struct CopiedPart {
  static constexpr int kDims = 4;

  Operand in;
  Operand out;
  std::array<std::int64_t, kDims> sizes{};
  std::array<std::array<std::int64_t, kDims>, 2> strides{};  // of out, in
};

// A prepared call. `out` and `in` are the operands, `sizes` and `strides` (in elements, innermost first) the
// loop over the output; for a matrix product `sizes` holds m, n, k and `strides` the leading dimensions; an
// op that only moves elements has `parts`, after it has set `filled` elements of the output to `number`.
struct DirectCall {
  static constexpr int kDims = 4;
  using Kernel = void (*)(const DirectCall&);

  Kernel kernel = nullptr;
  int dims = 0;
  std::array<Operand, 2> in;
  Operand out;
  std::array<std::int64_t, kDims> sizes{};
  std::array<std::array<std::int64_t, kDims>, 3> strides{};  // of out, in[0], in[1]
  std::array<char, 2> transposed{'n', 'n'};
  float number = 0;  // stands for in[1] where that is a Python number
  std::int64_t filled = 0;
  std::vector<CopiedPart> parts;

  void run() const { kernel(*this); }
};

// The direct call of `name.overload` with these decoded arguments, if there is one. `is_external` says
// whether a storage's pointer changes.
std::optional<DirectCall> direct_call(const std::string& name, const std::string& overload,
                                      const std::vector<c10::IValue>& args,
                                      bool (*is_external)(const void* context, const c10::StorageImpl*),
                                      const void* context);

// `name.overload` of all that direct_call knows. disco_accel/graph/op_traits.py has the same.
std::vector<std::string> direct_ops();

}  // namespace disco
