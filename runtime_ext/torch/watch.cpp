#include "watch.h"

#include <algorithm>
#include <utility>

extern "C" {
int disco_same_layouts(std::int64_t watched) {
  return static_cast<int>(reinterpret_cast<const disco::WatchedLayouts*>(watched)->same());
}

// Whether none of `count` integers of `width` bytes each is zero.
int disco_no_zero(std::int64_t data, std::int64_t count, std::int64_t width) {
  const auto* bytes = reinterpret_cast<const char*>(data);
  for (const char* end = bytes + count * width; bytes != end; bytes += width) {
    if (std::all_of(bytes, bytes + width, [](char byte) { return byte == 0; })) return 0;
  }
  return 1;
}
}

namespace disco {
namespace {

std::int64_t kind(const at::Tensor& tensor) {
  const auto dtype = static_cast<std::int64_t>(tensor.scalar_type());
  return (dtype << 1 | static_cast<std::int64_t>(tensor.requires_grad())) << 32 | tensor.dim();
}

}  // namespace

WatchedLayouts::WatchedLayouts(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) {
    seen_.push_back(kind(tensor));
    seen_.insert(seen_.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
}

bool WatchedLayouts::same() const {
  auto at = seen_.begin();
  for (const at::Tensor& tensor : tensors_) {
    // Equal kinds have as many dimensions.
    if (*at++ != kind(tensor)) return false;
    if (!std::equal(tensor.sizes().begin(), tensor.sizes().end(), at)) return false;
    at += tensor.dim();
  }
  return true;
}

}  // namespace disco
