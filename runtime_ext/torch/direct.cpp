#include "direct.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

// The BLAS that libtorch_cpu brings along; absent where a build hides it.
extern "C" __attribute__((weak)) void sgemm_(const char* transa, const char* transb, const int* m,
                                             const int* n, const int* k, const float* alpha, const float* a,
                                             const int* lda, const float* b, const int* ldb,
                                             const float* beta, float* c, const int* ldc);

namespace disco {
namespace {

using c10::IValue;

// Above these ATen's own cost is small beside the work, and its loops are better.
constexpr std::int64_t kMostElements = 1 << 14;
constexpr std::int64_t kMostProducts = 1 << 18;

struct Add {
  static float of(float a, float b) { return a + b; }
};
struct Sub {
  static float of(float a, float b) { return a - b; }
};
struct Mul {
  static float of(float a, float b) { return a * b; }
};
struct Div {
  static float of(float a, float b) { return a / b; }
};
struct Neg {
  static float of(float a, float) { return -a; }
};
struct Rsqrt {
  static float of(float a, float) { return 1.0F / std::sqrt(a); }
};
struct Square {
  static float of(float a, float) { return a * a; }
};

// A constant stride of one lets the compiler use vector instructions. `out` may be `a` or `b` itself.
template <typename Op>
void row(float* out, const float* a, const float* b, std::int64_t n, std::int64_t so, std::int64_t sa,
         std::int64_t sb) {
  if (so == 1 && sa == 1 && sb == 1) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = Op::of(a[i], b[i]);
  } else if (so == 1 && sa == 1 && sb == 0 && b != out) {
    const float constant = *b;
    for (std::int64_t i = 0; i < n; ++i) out[i] = Op::of(a[i], constant);
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i * so] = Op::of(a[i * sa], b[i * sb]);
  }
}

template <typename Op>
void elementwise(const DirectCall& call) {
  auto* const out = reinterpret_cast<float*>(call.out.address());
  const auto* const a = reinterpret_cast<const float*>(call.in[0].address());
  const auto* const given = reinterpret_cast<const float*>(call.in[1].address());
  const float* const b = given == nullptr ? &call.number : given;
  const auto& [so, sa, sb] = call.strides;
  for (std::int64_t i3 = 0; i3 < call.sizes[3]; ++i3) {
    for (std::int64_t i2 = 0; i2 < call.sizes[2]; ++i2) {
      for (std::int64_t i1 = 0; i1 < call.sizes[1]; ++i1) {
        row<Op>(out + i1 * so[1] + i2 * so[2] + i3 * so[3], a + i1 * sa[1] + i2 * sa[2] + i3 * sa[3],
                b + i1 * sb[1] + i2 * sb[2] + i3 * sb[3], call.sizes[0], so[0], sa[0], sb[0]);
      }
    }
  }
}

void product(const DirectCall& call) {
  const std::array<int, 3> size{static_cast<int>(call.sizes[0]), static_cast<int>(call.sizes[1]),
                                static_cast<int>(call.sizes[2])};
  const std::array<int, 3> leading{static_cast<int>(call.strides[0][0]), static_cast<int>(call.strides[1][0]),
                                   static_cast<int>(call.strides[2][0])};
  const float one = 1;
  const float zero = 0;
  sgemm_(&call.transposed[0], &call.transposed[1], &size[0], &size[1], &size[2], &one,
         reinterpret_cast<const float*>(call.in[0].address()), &leading[1],
         reinterpret_cast<const float*>(call.in[1].address()), &leading[2], &zero,
         reinterpret_cast<float*>(call.out.address()), &leading[0]);
}

void move_elements(const DirectCall& call) {
  std::fill_n(reinterpret_cast<float*>(call.out.address()), call.filled, call.number);
  for (const CopiedPart& part : call.parts) {
    auto* const out = reinterpret_cast<float*>(part.out.address());
    const auto* const in = reinterpret_cast<const float*>(part.in.address());
    const auto& [so, si] = part.strides;
    for (std::int64_t i3 = 0; i3 < part.sizes[3]; ++i3) {
      for (std::int64_t i2 = 0; i2 < part.sizes[2]; ++i2) {
        for (std::int64_t i1 = 0; i1 < part.sizes[1]; ++i1) {
          float* const to = out + i1 * so[1] + i2 * so[2] + i3 * so[3];
          const float* const from = in + i1 * si[1] + i2 * si[2] + i3 * si[3];
          if (so[0] == 1 && si[0] == 1) {
            std::copy_n(from, part.sizes[0], to);
          } else {
            for (std::int64_t i = 0; i < part.sizes[0]; ++i) to[i * so[0]] = from[i * si[0]];
          }
        }
      }
    }
  }
}

struct Builder {
  bool (*is_external)(const void*, const c10::StorageImpl*);
  const void* context;

  Operand operand(const at::Tensor& tensor) const { return operand_of(tensor, is_external, context); }
};

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.has_storage();
}

// A Python number, decoded as a 0-d tensor.
bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

std::optional<float> number_of(const at::Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return static_cast<float>(*static_cast<const double*>(data));
    case at::kFloat:
      return *static_cast<const float*>(data);
    case at::kLong:
      return static_cast<float>(*static_cast<const std::int64_t*>(data));
    default:
      return std::nullopt;
  }
}

// Stride of `tensor` along dimension `d` of an output of `dims` dimensions: 0 where it is broadcast.
std::int64_t stride_along(const at::Tensor& tensor, std::int64_t d, std::int64_t dims) {
  const std::int64_t own = d - (dims - tensor.dim());
  return own < 0 || tensor.size(own) == 1 ? 0 : tensor.stride(own);
}

bool broadcasts(const at::Tensor& tensor, const at::Tensor& out) {
  if (tensor.dim() > out.dim()) return false;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    const std::int64_t size = out.size(d + out.dim() - tensor.dim());
    if (tensor.size(d) != size && tensor.size(d) != 1) return false;
  }
  return true;
}

// Joins neighbouring dimensions that all tensors walk evenly. False when more than kDims are left.
bool lay_out(DirectCall& call, const at::Tensor& out, const std::array<const at::Tensor*, 2>& in) {
  int dims = 0;
  for (std::int64_t d = out.dim() - 1; d >= 0; --d) {
    if (out.size(d) == 1) continue;
    const std::array<std::int64_t, 3> stride{out.stride(d), in[0] ? stride_along(*in[0], d, out.dim()) : 0,
                                             in[1] ? stride_along(*in[1], d, out.dim()) : 0};
    const auto last = static_cast<std::size_t>(std::max(dims - 1, 0));
    bool joins = dims > 0;
    for (std::size_t t = 0; t < 3; ++t)
      joins = joins && stride[t] == call.strides[t][last] * call.sizes[last];
    if (joins) {
      call.sizes[last] *= out.size(d);
      continue;
    }
    if (dims == DirectCall::kDims) return false;
    call.sizes[static_cast<std::size_t>(dims)] = out.size(d);
    for (std::size_t t = 0; t < 3; ++t) call.strides[t][static_cast<std::size_t>(dims)] = stride[t];
    ++dims;
  }
  call.dims = dims;
  for (auto d = static_cast<std::size_t>(dims); d < DirectCall::kDims; ++d) call.sizes[d] = 1;
  return true;
}

std::optional<DirectCall> elementwise_call(DirectCall::Kernel kernel, const Builder& builder,
                                           const at::Tensor& a, const at::Tensor* b, const at::Tensor& out) {
  DirectCall call;
  call.kernel = kernel;
  if (!is_plain(a) || is_number(a) || !is_plain(out) || out.numel() == 0 || out.numel() > kMostElements ||
      !broadcasts(a, out) || !out.is_non_overlapping_and_dense()) {
    return std::nullopt;
  }
  call.in[0] = builder.operand(a);
  call.out = builder.operand(out);
  const at::Tensor* second = nullptr;
  if (b != nullptr && is_number(*b)) {
    const std::optional<float> number = number_of(*b);
    if (!number) return std::nullopt;
    call.number = *number;
  } else if (b != nullptr) {
    if (!is_plain(*b) || !broadcasts(*b, out)) return std::nullopt;
    call.in[1] = builder.operand(*b);
    second = b;
  }
  if (!lay_out(call, out, {&a, second})) return std::nullopt;
  return call;
}

// How a row-major matrix of `rows` by `columns` is given to a column-major routine as its transpose: as it
// lies, or to be transposed again. False for other layouts, which ATen copies first.
bool as_transpose(const at::Tensor& matrix, char& transposed, std::int64_t& leading) {
  const std::int64_t rows = matrix.size(0);
  const std::int64_t columns = matrix.size(1);
  if (matrix.stride(1) == 1 && matrix.stride(0) >= columns) {
    transposed = 'n';
    leading = matrix.stride(0);
    return true;
  }
  transposed = 't';
  leading = matrix.stride(1);
  return matrix.stride(0) == 1 && matrix.stride(1) >= rows;
}

// out = a @ b, row-major, is out^T = b^T @ a^T for a column-major routine: at::native::addmm_impl_cpu_ does
// so.
std::optional<DirectCall> product_call(const Builder& builder, const at::Tensor& a, const at::Tensor& b,
                                       const at::Tensor& out) {
  if (sgemm_ == nullptr || !is_plain(a) || !is_plain(b) || !is_plain(out)) return std::nullopt;
  const std::int64_t m = out.size(0);
  const std::int64_t n = out.size(1);
  const std::int64_t k = a.size(1);
  // A vector may be laid out in several ways at once; which one ATen picks is its business.
  if (std::min({m, n, k}) < 2 || m * n * k > kMostProducts || !out.is_contiguous()) return std::nullopt;
  DirectCall call;
  call.kernel = &product;
  call.sizes = {n, m, k, 1};
  call.strides[0][0] = n;
  if (!as_transpose(b, call.transposed[0], call.strides[1][0]) ||
      !as_transpose(a, call.transposed[1], call.strides[2][0])) {
    return std::nullopt;
  }
  call.in = {builder.operand(b), builder.operand(a)};
  call.out = builder.operand(out);
  return call;
}

// `number` everywhere in `out` if `fill`, then each input where its slot, a view of `out`, lies.
std::optional<DirectCall> moving_call(const Builder& builder, const at::Tensor& out,
                                      std::optional<float> fill,
                                      const std::vector<std::pair<at::Tensor, at::Tensor>>& slots) {
  if (!is_plain(out) || out.numel() == 0 || out.numel() > kMostElements ||
      !out.is_non_overlapping_and_dense())
    return std::nullopt;
  DirectCall call;
  call.kernel = &move_elements;
  call.out = builder.operand(out);
  call.number = fill.value_or(0.0F);
  call.filled = fill ? out.numel() : 0;
  for (const auto& [in, slot] : slots) {
    if (!is_plain(in) || in.sizes() != slot.sizes()) return std::nullopt;
    DirectCall loop;
    if (!lay_out(loop, slot, {&in, nullptr})) return std::nullopt;
    call.parts.push_back(
        {builder.operand(in), builder.operand(slot), loop.sizes, {loop.strides[0], loop.strides[1]}});
  }
  return call;
}

std::optional<DirectCall> cat_call(const Builder& builder, const std::vector<at::Tensor>& inputs,
                                   std::int64_t dim, const at::Tensor& out) {
  if (dim < 0) dim += out.dim();
  std::vector<std::pair<at::Tensor, at::Tensor>> slots;
  std::int64_t start = 0;
  for (const at::Tensor& in : inputs) {
    if (in.dim() != out.dim() || start + in.size(dim) > out.size(dim)) return std::nullopt;
    slots.emplace_back(in, out.narrow(dim, start, in.size(dim)));
    start += in.size(dim);
  }
  return start == out.size(dim) ? moving_call(builder, out, std::nullopt, slots) : std::nullopt;
}

// Only padding that adds: a negative one cuts, and leaves no slot of the input's size.
std::optional<DirectCall> pad_call(const Builder& builder, const at::Tensor& in,
                                   const std::vector<std::int64_t>& pad, float value, const at::Tensor& out) {
  if (std::any_of(pad.begin(), pad.end(), [](std::int64_t n) { return n < 0; })) return std::nullopt;
  at::Tensor slot = out;
  for (std::size_t i = 0; i < pad.size(); i += 2) {
    const auto dim = in.dim() - 1 - static_cast<std::int64_t>(i / 2);
    slot = slot.narrow(dim, pad[i], in.size(dim));
  }
  return moving_call(builder, out, value, {{in, slot}});
}

bool is_one(const IValue& alpha) { return alpha.isScalar() && alpha.toScalar().equal(1); }

using Args = std::vector<IValue>;

const at::Tensor& tensor(const Args& args, std::size_t i) { return args.at(i).toTensor(); }

template <typename Op>
std::optional<DirectCall> unary_op(const Builder& builder, const Args& args) {
  return elementwise_call(&elementwise<Op>, builder, tensor(args, 0), nullptr, tensor(args, 1));
}

template <typename Op>
std::optional<DirectCall> binary_op(const Builder& builder, const Args& args) {
  return elementwise_call(&elementwise<Op>, builder, tensor(args, 0), &tensor(args, 1),
                          args.back().toTensor());
}

// a + alpha * b, for the alpha that costs nothing.
template <typename Op>
std::optional<DirectCall> scaled_op(const Builder& builder, const Args& args) {
  return is_one(args.at(2)) ? binary_op<Op>(builder, args) : std::nullopt;
}

std::optional<DirectCall> square_op(const Builder& builder, const Args& args) {
  if (!args.at(1).toScalar().equal(2)) return std::nullopt;
  return elementwise_call(&elementwise<Square>, builder, tensor(args, 0), nullptr, tensor(args, 2));
}

std::optional<DirectCall> product_op(const Builder& builder, const Args& args) {
  return product_call(builder, tensor(args, 0), tensor(args, 1), tensor(args, 2));
}

// The views that ops make which move elements are made once, when an op is added; nothing of them is left
// when it runs.
std::optional<DirectCall> cat_op(const Builder& builder, const Args& args) {
  return cat_call(builder, args.at(0).toTensorVector(), args.at(1).toInt(), args.back().toTensor());
}

std::optional<DirectCall> clone_op(const Builder& builder, const Args& args) {
  const at::Tensor& out = args.back().toTensor();
  return moving_call(builder, out, std::nullopt, {{tensor(args, 0), out}});
}

std::optional<DirectCall> slice_backward_op(const Builder& builder, const Args& args) {
  const at::Tensor& out = args.back().toTensor();
  const at::Tensor slot =
      out.slice(args.at(2).toInt(), args.at(3).toInt(), args.at(4).toInt(), args.at(5).toInt());
  return moving_call(builder, out, 0.0F, {{tensor(args, 0), slot}});
}

std::optional<DirectCall> pad_op(const Builder& builder, const Args& args) {
  return pad_call(builder, tensor(args, 0), args.at(1).toIntVector(), args.at(2).toScalar().toFloat(),
                  args.back().toTensor());
}

struct Rule {
  const char* name;
  const char* overload;
  std::optional<DirectCall> (*build)(const Builder&, const Args&);
};

constexpr std::array<Rule, 12> kRules = {{
    {"aten::mm", "out", &product_op},
    {"aten::add", "out", &scaled_op<Add>},
    {"aten::sub", "out", &scaled_op<Sub>},
    {"aten::mul", "out", &binary_op<Mul>},
    {"aten::div", "out", &binary_op<Div>},
    {"aten::neg", "out", &unary_op<Neg>},
    {"aten::rsqrt", "out", &unary_op<Rsqrt>},
    {"aten::pow", "Tensor_Scalar_out", &square_op},
    {"aten::cat", "out", &cat_op},
    {"aten::clone", "out", &clone_op},
    {"aten::slice_backward", "out", &slice_backward_op},
    {"aten::constant_pad_nd", "out", &pad_op},
}};

}  // namespace

Operand operand_of(const at::Tensor& tensor,
                   bool (*is_external)(const void* context, const c10::StorageImpl*), const void* context) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const std::int64_t offset = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  if (is_external(context, storage)) return {nullptr, storage, offset};
  return {static_cast<std::byte*>(storage->data_ptr().get()) + offset, nullptr, 0};
}

std::optional<DirectCall> direct_call(const std::string& name, const std::string& overload,
                                      const std::vector<IValue>& args,
                                      bool (*is_external)(const void*, const c10::StorageImpl*),
                                      const void* context) {
  const auto rule = std::find_if(kRules.begin(), kRules.end(), [&](const Rule& candidate) {
    return candidate.name == name && candidate.overload == overload;
  });
  if (rule == kRules.end()) return std::nullopt;
  const c10::InferenceMode inference;
  return rule->build(Builder{is_external, context}, args);
}

std::vector<std::string> direct_ops() {
  std::vector<std::string> names;
  for (const Rule& rule : kRules) names.push_back(std::string(rule.name) + "." + rule.overload);
  return names;
}

}  // namespace disco
