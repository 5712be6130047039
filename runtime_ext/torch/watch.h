// Layouts of tensors compared with an earlier look at them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <vector>

namespace disco {

// Whether tensors need gradients, their dtypes and sizes, as they were when this was made. They are kept
// alive.
class WatchedLayouts : public torch::CustomClassHolder {
 public:
  explicit WatchedLayouts(std::vector<at::Tensor> tensors);
  bool same() const;
  // For disco_same_layouts: to call a method by way of TorchScript takes tens of microseconds in a step.
  std::int64_t address() const { return reinterpret_cast<std::int64_t>(this); }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::int64_t> seen_;
};

}  // namespace disco
