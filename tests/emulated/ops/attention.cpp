#include "attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

namespace emulated {
namespace {

// Where a kind of attention has its arguments; -1: it has none of the kind.
struct Forward {
  int mask, dropout, causal, scale;
};
struct Backward {
  int gradient, query, result, logsumexp, mask, dropout, causal, scale;
};

const std::map<std::string, Forward> kForward{
    {"aten::_scaled_dot_product_flash_attention", {-1, 3, 4, 6}},
    {"aten::_scaled_dot_product_efficient_attention", {3, 5, 6, 7}},
    {"aten::_scaled_dot_product_cudnn_attention", {3, 5, 6, 8}},
};
const std::map<std::string, Backward> kBackward{
    {"aten::_scaled_dot_product_flash_attention_backward", {0, 1, 4, 5, -1, 10, 11, 14}},
    {"aten::_scaled_dot_product_efficient_attention_backward", {0, 1, 5, 6, 4, 9, 11, 12}},
    {"aten::_scaled_dot_product_cudnn_attention_backward", {0, 1, 4, 5, 8, 13, 14, 15}},
};

std::optional<double> scale_of(const Job& job, int at) {
  const c10::IValue& value = job.arguments[static_cast<std::size_t>(at)];
  return value.isNone() ? std::nullopt : std::optional(value.toDouble());
}

std::optional<at::Tensor> mask_of(const Job& job, int at, at::ScalarType type) {
  if (at < 0) return std::nullopt;
  const c10::IValue& value = job.arguments[static_cast<std::size_t>(at)];
  if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
  return value.toTensor().to(type);
}

void refuse_dropout(const Job& job, int at) {
  TORCH_CHECK(job.arguments[static_cast<std::size_t>(at)].toDouble() == 0,
              "dropout inside attention is not emulated");
}

// Grouped queries: each head of keys and values stands for several.
at::Tensor each_head(const at::Tensor& grouped, std::int64_t heads) {
  return grouped.size(1) == heads ? grouped : grouped.repeat_interleave(heads / grouped.size(1), 1);
}

at::Tensor summed_heads(const at::Tensor& gradient, std::int64_t groups) {
  if (gradient.size(1) == groups) return gradient;
  return gradient.unflatten(1, {groups, gradient.size(1) / groups}).sum(2);
}

// CUDA's tensors may be padded beyond the host's.
void put(const at::Tensor& result, const at::Tensor& made) {
  if (!result.defined() || result.numel() == 0) return;
  if (result.sizes() != made.sizes()) result.zero_();
  at::Tensor part = result;
  for (std::int64_t d = 0; d < std::min(result.dim(), made.dim()); ++d)
    part = part.narrow(d, 0, std::min(result.size(d), made.size(d)));
  part.copy_(made.reshape(part.sizes()));
}

void forward(Job& job, const Forward& at) {
  refuse_dropout(job, at.dropout);
  const at::Tensor& query = job.tensor(0);
  const auto [result, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, each_head(job.tensor(1), query.size(1)), each_head(job.tensor(2), query.size(1)), 0.0,
      job.arguments[static_cast<std::size_t>(at.causal)].toBool(), mask_of(job, at.mask, query.scalar_type()),
      scale_of(job, at.scale));
  put(job.results[0], result);
  put(job.results[1], logsumexp);
}

void backward(Job& job, const Backward& at) {
  refuse_dropout(job, at.dropout);
  const auto from = [&](int which) { return job.tensor(static_cast<std::size_t>(which)); };
  const at::Tensor query = from(at.query), key = from(at.query + 1), value = from(at.query + 2);
  at::Tensor logsumexp = from(at.logsumexp);
  if (logsumexp.dim() == 4) logsumexp = logsumexp.squeeze(-1);
  logsumexp = logsumexp.narrow(2, 0, query.size(2));
  const std::int64_t heads = query.size(1);
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      from(at.gradient), query, each_head(key, heads), each_head(value, heads), from(at.result), logsumexp,
      0.0, job.arguments[static_cast<std::size_t>(at.causal)].toBool(),
      mask_of(job, at.mask, query.scalar_type()), scale_of(job, at.scale));
  put(job.results[0], of_query);
  put(job.results[1], summed_heads(of_key, key.size(1)));
  put(job.results[2], summed_heads(of_value, value.size(1)));
}

}  // namespace

Job::Body attention_body(const std::string& op) {
  if (const auto at = kForward.find(op); at != kForward.end())
    return [layout = at->second](Job& job) { forward(job, layout); };
  if (const auto at = kBackward.find(op); at != kBackward.end())
    return [layout = at->second](Job& job) { backward(job, layout); };
  return {};
}

}  // namespace emulated
