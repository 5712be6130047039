// Puts the boxed kernel in the place of ATen's CUDA kernels.
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <set>

#include "boxed.h"
#include "tensors.h"

namespace emulated {
namespace {

// Those that launch nothing: they allocate, make views, or copy through the runtime.
const std::set<std::string> kKept{"empty",
                                  "empty_strided",
                                  "as_strided",
                                  "view",
                                  "_reshape_alias",
                                  "set_",
                                  "resize_",
                                  "unfold",
                                  "squeeze",
                                  "unsqueeze",
                                  "split",
                                  "alias",
                                  "detach",
                                  "lift",
                                  "view_as_real",
                                  "view_as_complex",
                                  "_local_scalar_dense",
                                  "record_stream",
                                  "is_set_to",
                                  "is_pinned",
                                  "_pin_memory",
                                  "_efficientzerotensor",
                                  "_fused_sdp_choice",
                                  "_triton_scaled_dot_attention",
                                  "copy_"};
// Families that nothing here uses; their kernels are counted as unemulated if something does.
const char* const kKeptFamilies[] = {"nested", "cudnn_conv", "sparse"};

bool kept(const std::string& name) {
  if (kKept.count(name) != 0) return true;
  for (const char* family : kKeptFamilies) {
    if (name.find(family) != std::string::npos) return true;
  }
  return false;
}

// Between host and device PyTorch's own, which calls the runtime; within a device it would launch a kernel.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda() || self.device() != source.device())
    return at::native::copy_(self, source, non_blocking);
  if (self.is_same(source)) return self;
  const c10::DeviceGuard guard(self.device());
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  std::vector<Range> ranges;
  add_range(ranges, self, true);
  add_range(ranges, source, false);
  Job job{op, {host_view(self), host_view(source), false}, {at::Tensor()}, {}, {}};
  launch(std::move(job), c10::cuda::getCurrentCUDAStream(), ranges);
  return self;
}

// PyTorch tells every process that a kernel is overridden.
struct Unheard : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Puts the boxed kernel in the place of each CUDA kernel of `space`; returns of how many.
std::int64_t replace_kernels(torch::Library& library, const std::string& space) {
  Unheard unheard;
  const c10::WarningUtils::WarningHandlerGuard guard(&unheard);
  const std::string prefix = space + "::";
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::int64_t emulated = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind(prefix, 0) != 0 || kept(name.name.substr(prefix.size()))) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library.impl((name.name.substr(prefix.size()) + overload).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&call_op>());
    ++emulated;
  }
  return emulated;
}

// Returns how many ops are emulated.
std::int64_t install() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static std::int64_t emulated = 0;
  if (emulated != 0) return emulated;
  emulated = replace_kernels(library, "aten");
  Unheard unheard;
  const c10::WarningUtils::WarningHandlerGuard guard(&unheard);
  library.impl("copy_", TORCH_FN(copy));
  return emulated;
}

// The same for another library's ops, once it has registered them. They need CPU kernels and shape functions.
std::int64_t install_space(std::string space) {
  // Never deleted, for streams may still run its ops at the end of the process.
  auto* library = new torch::Library(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
  return replace_kernels(*library, space);
}

}  // namespace
}  // namespace emulated

TORCH_LIBRARY(emulated, library) {
  library.def("install", emulated::install);
  library.def("install_space", emulated::install_space);
}
