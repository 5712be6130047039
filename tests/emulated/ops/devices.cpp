#include "devices.h"

#include <ATen/core/op_registration/adaption.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>

#include "tensors.h"

// Names of ops whose wrappers compare no devices, one a line, from PyTorch's native_functions.yaml
// (build.py).
extern "C" const char* const emuUncheckedOps;

namespace emulated {
namespace {

const std::set<std::string>& unchecked_ops() {
  static const std::set<std::string> names = [] {
    std::set<std::string> found;
    std::istringstream lines(emuUncheckedOps);
    for (std::string line; std::getline(lines, line);) found.insert("aten::" + line);
    return found;
  }();
  return names;
}

std::string with_overload(const c10::FunctionSchema& schema, const char* between) {
  return schema.name() + (schema.overload_name().empty() ? "" : between + schema.overload_name());
}

bool written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_number_on_host(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

// The wrappers that PyTorch generates: all tensors of a call are on one device, numbers too; results come
// first.
void check_all(const c10::FunctionSchema& schema, const Stack& arguments) {
  const std::string method =
      "wrapper_CUDA_" + with_overload(schema, "_").substr(schema.name().find("::") + 2);
  std::optional<c10::Device> common;
  for (const bool results : {true, false}) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if ((argument.kwarg_only() && written(argument)) != results) continue;
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        c10::impl::check_and_update_common_device(common, tensor, method.c_str(), argument.name().c_str());
      });
    }
  }
}

// TensorIterator: where one operand is on a device, only a number that is read may be on the host.
void check_operands(const std::vector<std::pair<at::Tensor, bool>>& operands, std::size_t most_numbers) {
  std::optional<c10::Device> common;
  for (const auto& [tensor, result] : operands) {
    if (!common && on_device(tensor)) common = tensor.device();
  }
  std::size_t numbers = 0;
  for (const auto& [tensor, result] : operands) {
    if (!common || tensor.device() == *common) continue;
    TORCH_CHECK(!result && is_number_on_host(tensor),
                "Expected all tensors to be on the same device, but found at least two devices, ", *common,
                " and ", tensor.device(), "!");
    TORCH_CHECK(tensor.unsafeGetTensorImpl()->is_wrapped_number() || ++numbers <= most_numbers,
                "Trying to pass too many CPU scalars to non-CPU kernel!");
  }
}

void check_indexed(const c10::FunctionSchema& schema, const Stack& arguments) {
  const at::Tensor self = arguments[0].toTensor();
  std::vector<std::pair<at::Tensor, bool>> operands{{self, false}};
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK_INDEX(name != "indices" || tensor.is_cpu() || tensor.device() == self.device(),
                        "indices should be either on cpu or on the same device as the indexed tensor (",
                        self.device(), ")");
      if (name != "indices") operands.emplace_back(tensor, name == "out");
    });
  }
  check_operands(operands, 1);
}

// Ops on lists run on each place by itself where the lists lie on several devices.
void check_lists(const Stack& arguments) {
  std::vector<std::vector<at::Tensor>> lists;
  std::vector<std::pair<at::Tensor, bool>> single;
  for (const c10::IValue& value : arguments) {
    if (value.isTensorList()) lists.push_back(value.toTensorVector());
    if (value.isTensor() && value.toTensor().defined()) single.emplace_back(value.toTensor(), false);
  }
  for (std::size_t place = 0; !lists.empty() && place < lists[0].size(); ++place) {
    std::vector<std::pair<at::Tensor, bool>> operands = single;
    for (const auto& list : lists) {
      if (place < list.size()) operands.emplace_back(list[place], &list == &lists[0]);
    }
    check_operands(operands, 1);
  }
}

void check_devices(const c10::FunctionSchema& schema, const Stack& arguments) {
  const std::string& name = schema.name();
  if (name.rfind("aten::_foreach_copy", 0) == 0) return;
  if (name.rfind("aten::_foreach_", 0) == 0) return check_lists(arguments);
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    return check_indexed(schema, arguments);
  if (unchecked_ops().count(with_overload(schema, ".")) == 0) return check_all(schema, arguments);
  std::vector<std::pair<at::Tensor, bool>> operands;
  const bool attention = name.find("attention") != std::string::npos;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    // What attention drew, and a learning rate, may be numbers of the host's.
    if ((attention && argument.name().rfind("philox", 0) == 0) || argument.name() == "lr") continue;
    each_tensor(arguments[i],
                [&](const at::Tensor& tensor) { operands.emplace_back(tensor, written(argument)); });
  }
  check_operands(operands, name.rfind("aten::where", 0) == 0 ? operands.size() : 1);
}

// cuBLAS has no products of integers.
void check_dtypes(const c10::FunctionSchema& schema, const Stack& arguments) {
  static const std::set<std::string> kProducts{"mm",       "addmm", "addmm_", "bmm", "baddbmm",
                                               "baddbmm_", "addmv", "addmv_", "dot", "vdot"};
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  if (kProducts.count(name) == 0 || !arguments[0].isTensor()) return;
  const at::ScalarType type = arguments[0].toTensor().scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(!at::isIntegralType(type, true), "\"", name, "_cuda\" not implemented for '",
                              toString(type), "'");
}

void check_generators(const Stack& arguments) {
  for (const c10::IValue& value : arguments) {
    if (!value.isGenerator() || !value.toGenerator().defined()) continue;
    TORCH_CHECK(value.toGenerator().device().is_cuda(),
                "Expected a 'cuda' device type for generator but found '",
                value.toGenerator().device().type(), "'");
  }
}

}  // namespace

void check_call(const c10::FunctionSchema& schema, const Stack& arguments) {
  check_devices(schema, arguments);
  check_generators(arguments);
  check_dtypes(schema, arguments);
}

}  // namespace emulated
