#include "watched_tensors.h"

#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "arena.h"

namespace {

// 1: yes, 0: no, -1: failed; the method throws the reason.
template <typename Ask>
int answer(std::int64_t watched, Ask ask) {
  try {
    return (reinterpret_cast<disco::WatchedTensors*>(watched)->*ask)() ? 1 : 0;
  } catch (...) {
    return -1;
  }
}

}  // namespace

extern "C" int disco_begin_check(std::int64_t watched) {
  return answer(watched, &disco::WatchedTensors::begin_check);
}

extern "C" int disco_finish_check(std::int64_t watched) {
  return answer(watched, &disco::WatchedTensors::finish_check);
}

namespace disco {
namespace {

std::uintptr_t page_size() {
  static const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return size;
}

std::int64_t version(const at::Tensor& tensor) {
  // One made in inference mode has none, whatever its data became later.
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

// Bytes from the first to the last element.
std::size_t footprint(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<std::size_t>(last + 1) * tensor.itemsize();
}

// The bytes of the elements and of no others, unless elements share memory.
Span bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), footprint(tensor)};
}

// Without holes: a neighbour's elements may lie between this tensor's own.
std::vector<at::Tensor> packed_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> packed;
  packed.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const bool plain = tensor.is_non_overlapping_and_dense() || footprint(tensor) <= tensor.nbytes();
    packed.push_back(plain ? tensor : tensor.contiguous());
  }
  return packed;
}

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  spans.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) spans.push_back(bytes_of(tensor));
  return spans;
}

// For memory that devices write to, which no protection sees: a copy of a whole tensor from a device is
// noticed.
std::uint64_t sample_of(const at::Tensor& tensor) {
  constexpr std::size_t kSamples = 16;
  std::uint64_t values[kSamples] = {};
  const auto [data, nbytes] = bytes_of(tensor);
  const std::size_t word = std::min<std::size_t>(nbytes, sizeof(std::uint64_t));
  for (std::size_t i = 0; i < kSamples && nbytes > 0; ++i) {
    std::memcpy(&values[i], data + (nbytes - word) / (kSamples - 1) * i, word);
  }
  return content_hash(values, sizeof values);
}

}  // namespace

WatchedTensors::WatchedTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) {
    if (!tensor.device().is_cpu()) throw std::invalid_argument("only tensors on the CPU are watched");
    addresses_.push_back(tensor.const_data_ptr());
    storages_.emplace_back(tensor.storage());
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    const std::uintptr_t end = begin + footprint(tensor);
    const std::uintptr_t region = begin == end ? 0 : watched_region(begin, end);
    if (region == 0) {
      hashed_.push_back(tensor);
      continue;
    }
    regions_.push_back(region);
    if (device_may_write(region)) {
      sampled_.push_back(tensor);
      versions_.push_back(version(tensor));
    }
    protect(begin, end);
  }
  std::sort(regions_.begin(), regions_.end());
  regions_.erase(std::unique(regions_.begin(), regions_.end()), regions_.end());
  for (Border& border : borders_) {
    border.hash = content_hash(reinterpret_cast<const void*>(border.begin), border.end - border.begin);
  }
  sample_ = sample();
  hash_ = Reading(hashed_).hash.finish();
  if (!regions_.empty()) add_listener(this, regions_);
}

WatchedTensors::~WatchedTensors() {
  if (!regions_.empty()) remove_listener(this);
}

void WatchedTensors::protect(std::uintptr_t begin, std::uintptr_t end) {
  const std::uintptr_t page = page_size();
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t last = end / page * page;
  if (first < last) whole_pages_.push_back({first, last});
  if (begin < std::min(first, end)) borders_.push_back({begin, std::min(first, end), 0});
  if (std::max(first, last) < end && first <= end) borders_.push_back({std::max(first, last), end, 0});
}

void WatchedTensors::written(std::uintptr_t begin, std::uintptr_t end) noexcept {
  if (written_) return;
  const auto touches = [=](const auto& range) { return range.begin < end && begin < range.end; };
  written_ = std::any_of(whole_pages_.begin(), whole_pages_.end(), touches) ||
             std::any_of(borders_.begin(), borders_.end(), [&](const Border& border) {
               const auto* data = reinterpret_cast<const void*>(border.begin);
               return touches(border) && content_hash(data, border.end - border.begin) != border.hash;
             });
}

bool WatchedTensors::moved() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].const_data_ptr() != addresses_[i]) return true;
  }
  return false;
}

bool WatchedTensors::begin_check() {
  if (in_child()) return true;
  const std::lock_guard lock(checking_);
  reading_.reset();
  for (std::size_t i = 0; i < sampled_.size(); ++i) {
    if (version(sampled_[i]) != versions_[i]) return true;
  }
  if (moved()) return true;
  for (const std::uintptr_t region : regions_) collect_writes(region);
  if (sample() != sample_) written_ = true;
  if (written_) return true;
  reading_ = std::make_unique<Reading>(hashed_);
  return reading_->hash.done() && finish_reading();
}

bool WatchedTensors::finish_check() {
  if (in_child()) return true;
  const std::lock_guard lock(checking_);
  return finish_reading();
}

bool WatchedTensors::finish_reading() {
  if (reading_ != nullptr) {
    if (reading_->hash.finish() != hash_) written_ = true;
    reading_.reset();
  }
  return written_;
}

std::int64_t WatchedTensors::hashed_bytes() const {
  std::int64_t total = 0;
  for (const at::Tensor& tensor : hashed_) total += static_cast<std::int64_t>(tensor.nbytes());
  return total;
}

WatchedTensors::Reading::Reading(const std::vector<at::Tensor>& tensors)
    : packed(packed_of(tensors)), hash(spans_of(packed)) {}

std::uint64_t WatchedTensors::sample() const {
  std::uint64_t sample = 0;
  for (const at::Tensor& tensor : sampled_) sample = sample * 31 + sample_of(tensor);
  return sample;
}

void expect_rewrite_of(const std::vector<at::Tensor>& tensors) {
  // Nothing else can lie in a smaller gap between two tensors of an arena, which are aligned to this.
  constexpr std::uintptr_t kAlignment = 64;
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu()) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    const std::uintptr_t end = begin + footprint(tensor);
    if (begin < end && watched_region(begin, end) != 0) spans.emplace_back(begin, end);
  }
  std::sort(spans.begin(), spans.end());
  const std::uintptr_t page = page_size();
  for (std::size_t i = 0; i < spans.size();) {
    const std::uintptr_t begin = spans[i].first, region = watched_region(begin, spans[i].second);
    std::uintptr_t end = spans[i].second;
    for (++i; i < spans.size() && spans[i].first < end + kAlignment; ++i) {
      if (watched_region(spans[i].first, spans[i].second) != region) break;
      end = std::max(end, spans[i].second);
    }
    expect_rewrite((begin + page - 1) / page * page, end / page * page);
  }
}

// PyTorch 2.11 has no way back from this refusal.
template <typename Storage>
concept Allowing = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

template <typename Storage>
void refuse(Storage& storage, const std::string& message) {
  // Nothing is released, whatever the name says.
  if constexpr (Allowing<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

template <typename Storage>
void allow(Storage& storage) {
  if constexpr (Allowing<Storage>) storage.clear_data_ptr_access_error_msg_();
}

bool can_refuse_data_access() { return Allowing<c10::StorageImpl>; }

void refuse_data_access(const std::vector<at::Tensor>& tensors, const std::string& message) {
  for (const at::Tensor& tensor : tensors) refuse(*tensor.storage().unsafeGetStorageImpl(), message);
}

void allow_data_access(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) allow(*tensor.storage().unsafeGetStorageImpl());
}

TORCH_LIBRARY_FRAGMENT(disco_accel, m) {
  m.def("can_refuse_data_access", &can_refuse_data_access);
  m.def("refuse_data_access", &refuse_data_access);
  m.def("allow_data_access", &allow_data_access);
  m.def("expect_rewrite_of", &expect_rewrite_of);
  m.def("can_watch_writes", &can_watch_writes);
  m.def("allow_watching_writes", &allow_watching_writes);
  m.def("watch_arena", &watch_arena);
  m.def("expect_device_writes_to", &expect_device_writes_to);
  m.class_<WatchedTensors>("WatchedTensors")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("moved", &WatchedTensors::moved)
      .def("begin_check", &WatchedTensors::begin_check)
      .def("finish_check", &WatchedTensors::finish_check)
      .def("hashed_bytes", &WatchedTensors::hashed_bytes)
      .def("address", &WatchedTensors::address);
}

}  // namespace disco
