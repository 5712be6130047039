// Arenas of host memory as tensors: anonymous mappings with guard pages, and tensors carved out of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace disco {

// Anonymous mapping of exactly `nbytes` bytes as a 1-d uint8 tensor, between two inaccessible pages. The end
// of the arena touches the guard page when `nbytes` is a multiple of 256, so that a write past it faults at
// once. Pages are not touched. Throws std::runtime_error with the system's reason.
at::Tensor map_arena(std::int64_t nbytes);

// A 1-d uint8 tensor over [offset, offset + nbytes) of `base` with a storage of its own that keeps `base`
// alive: what it saves and reports is its own bytes, not the arena's. Throws std::invalid_argument out of
// range.
at::Tensor carve(const at::Tensor& base, std::int64_t offset, std::int64_t nbytes);

// Bytes of the pages under `tensor` that are in memory.
std::int64_t touched_bytes(const at::Tensor& tensor);

// A number that changes, with near certainty, when the content of one of these host tensors does: a hash of a
// few words of each, spread evenly from the first byte to the last. Cheap enough for every step.
std::int64_t sample_digest(at::TensorList tensors);

// Host tensors as they were when this was made.
class WatchedTensors : public torch::CustomClassHolder {
 public:
  explicit WatchedTensors(std::vector<at::Tensor> tensors);
  // Whether one of them lies elsewhere now.
  bool moved() const;
  // Whether one of them moved or was written to: by its version, or by what sample_digest sees.
  bool changed() const;

 private:
  static std::int64_t version(const at::Tensor& tensor);

  std::vector<at::Tensor> tensors_;
  std::vector<std::pair<const void*, std::int64_t>> seen_;
  std::int64_t digest_ = 0;
};

}  // namespace disco
