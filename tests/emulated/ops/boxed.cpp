#include "boxed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "attention.h"
#include "devices.h"
#include "random.h"
#include "temporaries.h"
#include "tensors.h"

namespace emulated {
namespace {

constexpr const char* kDropout = "aten::native_dropout";
constexpr const char* kHistogram = "aten::histc";
constexpr const char* kEfficient = "aten::_scaled_dot_product_efficient_attention";

Stack arguments_of(const c10::FunctionSchema& schema, const Stack& stack) {
  return Stack(stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack.end());
}

c10::OptionalDeviceGuard guard_of(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const c10::IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!device && on_device(tensor)) device = tensor.device();
    });
    if (!device && value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
      device = value.toDevice();
  }
  return c10::OptionalDeviceGuard(device);
}

bool writes(const c10::FunctionSchema& schema, std::size_t argument) {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

at::Tensor new_on_device(const at::Tensor& like) {
  const c10::Device here(at::kCUDA, c10::cuda::current_device());
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(here));
}

// The arguments as the host's kernel gets them; what a program may change after the call is copied.
Stack host_arguments(const c10::FunctionSchema& schema, const Stack& arguments, bool later) {
  const auto on_host = [later](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda() || !later) return host_view(tensor);
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  };
  Stack changed;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (schema.arguments()[i].name() == "generator") {
      changed.emplace_back(
          drawn_generator(value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt));
    } else if (value.isDevice()) {
      changed.emplace_back(c10::Device(at::kCPU));
    } else {
      changed.push_back(map_tensors(value, on_host));
    }
  }
  return changed;
}

// What the op's shape function says about its results, from `shapes`, the arguments without memory, which it
// may resize. False: it has none, or refuses the call; the host's kernel then says why.
bool infer(const c10::OperatorHandle& op, const Stack& shapes, Stack& results) {
  results = shapes;
  if (op.schema().name() == kDropout) {
    const at::Tensor input = shapes[0].toTensor();
    results = {at::empty_strided(input.sizes(), input.strides(), input.options()),
               at::empty_strided(input.sizes(), input.strides(), input.options().dtype(at::kBool))};
    return true;
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// CUDA counts integers too; the host counts them as they are in double precision.
void count_integers(Job& job) {
  const at::Tensor counted = at::histc(job.tensor(0).to(at::kDouble), job.arguments[1].toInt(),
                                       job.arguments[2].toScalar(), job.arguments[3].toScalar());
  (job.arguments.size() > 4 ? job.tensor(4) : job.results[0]).copy_(counted);
}

// What computes the op, if not its CPU kernel.
Job::Body body_of(const std::string& op, const Stack& arguments) {
  if (op == kDropout) return dropout_body();
  if (op == kHistogram && at::isIntegralType(arguments[0].toTensor().scalar_type(), false))
    return count_integers;
  return attention_body(op);
}

// Whether the op returns tensors alone.
bool returns_tensors(const c10::FunctionSchema& schema) {
  if (schema.name().rfind("aten::_scaled_dot_product", 0) == 0) return true;
  for (const c10::Argument& result : schema.returns()) {
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        result.type()->kind() != c10::TypeKind::ListType)
      return false;
  }
  return true;
}

// Gives arguments that are written to their new shapes; returns those among them that are single tensors.
std::vector<at::Tensor> resize_written(const c10::FunctionSchema& schema, const Stack& arguments,
                                       const Stack& shapes, std::vector<Range>& ranges) {
  std::vector<at::Tensor> written;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool write = writes(schema, i);
    std::vector<at::Tensor> wanted;
    each_tensor(shapes[i], [&](const at::Tensor& shape) { wanted.push_back(shape); });
    std::size_t next = 0;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      const at::Tensor& shape = wanted[next++];
      if (write && on_device(tensor) && shape.sizes() != tensor.sizes()) {
        tensor.resize_(shape.sizes());
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
      }
      if (write && arguments[i].isTensor()) written.push_back(tensor);
      add_range(ranges, tensor, write);
    });
  }
  return written;
}

}  // namespace

void call_op(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = arguments_of(schema, *stack);
  check_call(schema, arguments);
  const c10::OptionalDeviceGuard guard = guard_of(arguments);
  const c10::InferenceMode inference(c10::InferenceMode::is_enabled());
  Stack shapes, inferred;
  for (const c10::IValue& value : arguments) {
    const bool device = value.isDevice();
    shapes.push_back(device                ? c10::IValue(c10::Device(at::kMeta))
                     : value.isGenerator() ? c10::IValue()
                                           : map_tensors(value, shape_of));
  }
  if (!returns_tensors(schema) || !infer(op, shapes, inferred)) return call_op_at_once(op, stack);

  std::vector<Range> ranges;
  const std::vector<at::Tensor> written = resize_written(schema, arguments, shapes, ranges);
  Job job{op, {}, {}, {}, {}};
  const auto make = [&](const at::Tensor& shape) {
    job.results.emplace_back();
    if (!shape.defined()) return at::Tensor();
    // Without dropout the memory-efficient kernel gives a seed and an offset on the host that hold nothing.
    if (schema.name() == kEfficient && shape.scalar_type() == at::kLong) return at::empty({}, at::kLong);
    const at::Tensor made = new_on_device(shape);
    job.results.back() = host_view(made);
    add_range(ranges, made, true);
    return made;
  };
  Stack results;
  std::size_t next_written = 0;
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr && next_written < written.size()) {
      job.results.emplace_back();
      results.emplace_back(written[next_written++]);
    } else {
      results.push_back(map_tensors(inferred[i], make));
    }
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  // Given back at once, as the real launchers do: whatever takes it next on this stream comes later.
  const c10::DataPtr scratch = take_scratch(schema.name(), arguments, job, ranges);
  take_workspace(schema.name(), stream);
  job.arguments = host_arguments(schema, arguments, true);
  job.body = body_of(schema.name(), arguments);
  launch(std::move(job), stream, ranges);
  torch::jit::drop(*stack, arguments.size());
  for (c10::IValue& value : results) stack->push_back(std::move(value));
}

void call_op_at_once(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = arguments_of(schema, *stack);
  const c10::OptionalDeviceGuard guard = guard_of(arguments);
  c10::cuda::getCurrentCUDAStream().synchronize();
  emuCount(("computed at once " + schema.name()).c_str());
  std::vector<at::Tensor> written;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (writes(schema, i) && arguments[i].isTensor()) written.push_back(arguments[i].toTensor());
  }
  Stack results = host_arguments(schema, arguments, false);
  // As in ``compute``.
  const Stack held = results;
  {
    const c10::InferenceMode inference;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  }
  torch::jit::drop(*stack, arguments.size());
  std::size_t next_written = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr && next_written < written.size()) {
      stack->emplace_back(written[next_written++]);
      continue;
    }
    stack->push_back(map_tensors(results[i], [](const at::Tensor& made) {
      if (!made.defined()) return made;
      const at::Tensor there = new_on_device(made);
      host_view(there).copy_(made);
      return there;
    }));
  }
}

}  // namespace emulated
