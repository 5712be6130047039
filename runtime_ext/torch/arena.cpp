#include "arena.h"

#include <c10/core/ScalarType.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fork_mutex.h"
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

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What holds storages for this library's own work.
struct OwnHolders {
  ForkMutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::int64_t> storages;
  std::unordered_multimap<const c10::StorageImpl*, WeakTensor> views;
  std::size_t looked_through = 0;
};

// Never destroyed: tensors may be freed after static objects are.
OwnHolders& own_holders() {
  static auto* the = new OwnHolders;
  return *the;
}

// Views that live, of all that were made over a storage; others are forgotten. Under the mutex. One that
// lives keeps the storage, so that no other can have its address.
std::int64_t live_views(OwnHolders& own, const c10::StorageImpl* storage) {
  std::int64_t live = 0;
  const auto [first, last] = own.views.equal_range(storage);
  for (auto entry = first; entry != last;) {
    const bool dead = entry->second.expired();
    live += dead ? 0 : 1;
    entry = dead ? own.views.erase(entry) : std::next(entry);
  }
  return live;
}

void forget_dead_views(OwnHolders& own) {
  if (own.views.size() < 2 * own.looked_through + 64) return;
  for (auto entry = own.views.begin(); entry != own.views.end();) {
    entry = entry->second.expired() ? own.views.erase(entry) : std::next(entry);
  }
  own.looked_through = own.views.size();
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

OwnStorage::OwnStorage(c10::Storage storage) : storage_(std::move(storage)) {
  const std::lock_guard lock(own_holders().mutex);
  ++own_holders().storages[storage_.unsafeGetStorageImpl()];
}

OwnStorage::~OwnStorage() {
  if (!storage_) return;
  OwnHolders& own = own_holders();
  const std::lock_guard lock(own.mutex);
  const auto entry = own.storages.find(storage_.unsafeGetStorageImpl());
  if (--entry->second == 0) own.storages.erase(entry);
}

at::Tensor own_view_of(const at::Tensor& tensor, std::int64_t nbytes) {
  if (!tensor.device().is_cpu()) throw std::invalid_argument("own_view_of needs a tensor on the CPU");
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                             c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                             c10::scalarTypeToTypeMeta(c10::kByte));
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() * tensor.element_size());
  view.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  OwnHolders& own = own_holders();
  const std::lock_guard lock(own.mutex);
  forget_dead_views(own);
  own.views.emplace(tensor.storage().unsafeGetStorageImpl(), WeakTensor(view.getIntrusivePtr()));
  return view;
}

std::vector<std::int64_t> other_holders(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> found;
  found.reserve(tensors.size());
  OwnHolders& own = own_holders();
  const std::lock_guard lock(own.mutex);
  for (const at::Tensor& tensor : tensors) {
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto entry = own.storages.find(storage);
    const std::int64_t held = entry == own.storages.end() ? 0 : entry->second;
    const auto uses = static_cast<std::int64_t>(tensor.storage().use_count());
    found.push_back(uses - 1 - held - live_views(own, storage));
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
