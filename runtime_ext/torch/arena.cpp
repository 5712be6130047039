#include "arena.h"

#include <c10/core/ScalarType.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "planned_alloc.h"

namespace disco {
namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t page_size() {
  static const std::int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

struct Mapping {
  void* start = nullptr;
  std::size_t length = 0;
  void* base = nullptr;
};

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  remove_planned_range(mapping->base);
  munmap(mapping->start, mapping->length);
  delete mapping;
}

void drop_base(void* context) { delete static_cast<at::Tensor*>(context); }

at::Tensor bytes_over(c10::DataPtr data, std::int64_t nbytes) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(nbytes), std::move(data),
                       nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(c10::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return tensor;
}

[[noreturn]] void no_memory(std::int64_t nbytes) {
  throw std::runtime_error("cannot map " + std::to_string(nbytes) +
                           " bytes of host memory: " + std::strerror(errno));
}

}  // namespace

at::Tensor map_arena(std::int64_t nbytes) {
  const std::int64_t page = page_size();
  if (nbytes < 0 || nbytes > std::numeric_limits<std::int64_t>::max() - 4 * page) {
    throw std::invalid_argument("an arena cannot have " + std::to_string(nbytes) + " bytes");
  }
  const std::int64_t body = (nbytes + page - 1) / page * page;
  const auto length = static_cast<std::size_t>(body + 2 * page);
  void* start = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) no_memory(nbytes);
  auto* inside = static_cast<std::byte*>(start) + page;
  if (body > 0 && mprotect(inside, static_cast<std::size_t>(body), PROT_READ | PROT_WRITE) != 0) {
    munmap(start, length);
    no_memory(nbytes);
  }
  const std::int64_t used = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* base = inside + (body - used);
  add_planned_range(base, static_cast<std::size_t>(used));
  auto* mapping = new Mapping{start, length, base};
  return bytes_over(c10::DataPtr(base, mapping, &unmap, c10::DeviceType::CPU), nbytes);
}

at::Tensor carve(const at::Tensor& base, std::int64_t offset, std::int64_t nbytes) {
  if (!base.device().is_cpu() || base.scalar_type() != c10::kByte || base.dim() != 1 || base.stride(0) != 1) {
    throw std::invalid_argument("carve needs a contiguous 1-d uint8 tensor on the CPU");
  }
  if (offset < 0 || nbytes < 0 || nbytes > base.numel() || offset > base.numel() - nbytes) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                                " are outside an arena of " + std::to_string(base.numel()));
  }
  auto* data = static_cast<std::byte*>(base.data_ptr()) + offset;
  return bytes_over(c10::DataPtr(data, new at::Tensor(base), &drop_base, c10::DeviceType::CPU), nbytes);
}

std::int64_t touched_bytes(const at::Tensor& tensor) {
  const std::int64_t page = page_size();
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t first = begin / page * page;
  const std::uintptr_t last = (begin + tensor.nbytes() + page - 1) / page * page;
  if (tensor.nbytes() == 0) return 0;
  std::vector<unsigned char> pages((last - first) / page);
  if (mincore(reinterpret_cast<void*>(first), last - first, pages.data()) != 0) {
    throw std::runtime_error(std::string("mincore failed: ") + std::strerror(errno));
  }
  std::int64_t touched = 0;
  for (const unsigned char state : pages) touched += (state & 1) * page;
  return std::min<std::int64_t>(touched, static_cast<std::int64_t>(tensor.nbytes()));
}

std::int64_t sample_digest(at::TensorList tensors) {
  constexpr std::size_t kSamples = 16;
  constexpr std::uint64_t kPrime = 0x100000001b3ULL;
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu()) throw std::invalid_argument("sample_digest reads tensors on the CPU");
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    const std::size_t nbytes = tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : 0;
    const std::size_t word = std::min<std::size_t>(nbytes, sizeof(std::uint64_t));
    for (std::size_t i = 0; i < kSamples && nbytes > 0; ++i) {
      std::uint64_t value = 0;
      std::memcpy(&value, data + (nbytes - word) / (kSamples - 1) * i, word);
      hash = (hash ^ value) * kPrime;
      hash ^= hash >> 29;
    }
  }
  return static_cast<std::int64_t>(hash);
}

WatchedTensors::WatchedTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) seen_.emplace_back(tensor.const_data_ptr(), version(tensor));
  digest_ = sample_digest(tensors_);
}

bool WatchedTensors::moved() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].const_data_ptr() != seen_[i].first) return true;
  }
  return false;
}

bool WatchedTensors::changed() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (version(tensors_[i]) != seen_[i].second) return true;
  }
  return moved() || sample_digest(tensors_) != digest_;
}

std::int64_t WatchedTensors::version(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace disco
