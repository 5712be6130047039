#include "arena.h"

#include <c10/core/ScalarType.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planned_alloc.h"
#include "write_watch.h"

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
  unwatch_writes(static_cast<std::byte*>(mapping->start) + page_size());
  munmap(mapping->start, mapping->length);
  delete mapping;
}

// The pages of an arena without its guard pages.
std::pair<void*, std::size_t> body_of(const at::Tensor& arena) {
  if (!in_planned_range(arena.const_data_ptr())) throw std::invalid_argument("not an arena");
  const auto page = static_cast<std::uintptr_t>(page_size());
  const auto begin = reinterpret_cast<std::uintptr_t>(arena.const_data_ptr());
  const std::uintptr_t first = begin / page * page;
  const std::uintptr_t last = (begin + arena.nbytes() + page - 1) / page * page;
  return {reinterpret_cast<void*>(first), last - first};
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

// How many OwnStorages there are of each storage.
struct Counts {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::int64_t> of;
};

// Never destroyed: tensors may be freed after static objects are.
Counts& counts() {
  static auto* the = new Counts;
  return *the;
}

void drop_own(void* context) { delete static_cast<OwnStorage*>(context); }

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

OwnStorage::OwnStorage(c10::Storage storage) : storage_(std::move(storage)) {
  const std::lock_guard lock(counts().mutex);
  ++counts().of[storage_.unsafeGetStorageImpl()];
}

OwnStorage::~OwnStorage() {
  if (!storage_) return;
  const std::lock_guard lock(counts().mutex);
  const auto entry = counts().of.find(storage_.unsafeGetStorageImpl());
  if (--entry->second == 0) counts().of.erase(entry);
}

at::Tensor own_view_of(const at::Tensor& tensor, std::int64_t nbytes) {
  if (!tensor.device().is_cpu()) throw std::invalid_argument("own_view_of needs a tensor on the CPU");
  void* data = tensor.data_ptr();
  auto* own = new OwnStorage(tensor.storage());
  return bytes_over(c10::DataPtr(data, own, &drop_own, c10::DeviceType::CPU), nbytes);
}

std::vector<std::int64_t> other_holders(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> found;
  found.reserve(tensors.size());
  const std::lock_guard lock(counts().mutex);
  for (const at::Tensor& tensor : tensors) {
    const c10::Storage& storage = tensor.storage();
    const auto entry = counts().of.find(storage.unsafeGetStorageImpl());
    const std::int64_t own = entry == counts().of.end() ? 0 : entry->second;
    found.push_back(static_cast<std::int64_t>(storage.use_count()) - 1 - own);
  }
  return found;
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

bool watch_arena(const at::Tensor& arena) {
  if (arena.nbytes() == 0) return false;
  const auto [inside, length] = body_of(arena);
  return watch_writes(inside, length);
}

void expect_device_writes_to(const at::Tensor& arena) {
  if (arena.nbytes() > 0) expect_device_writes(body_of(arena).first);
}

}  // namespace disco
