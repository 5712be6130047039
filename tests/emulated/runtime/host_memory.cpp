#include "host_memory.h"

#include <string>

#include "journal.h"

namespace emulated {

bool HostMemory::pin(void* begin, std::size_t bytes) {
  const auto* first = static_cast<const char*>(begin);
  const std::lock_guard lock(mutex_);
  for (const auto& [other, size] : pinned_) {
    if (first < other + size && other < first + bytes) return false;
  }
  pinned_[first] = bytes;
  return true;
}

std::size_t HostMemory::unpin(void* begin, const char* call) {
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto at = pinned_.find(static_cast<const char*>(begin));
    if (at == pinned_.end()) return 0;
    bytes = at->second;
    pinned_.erase(at);
  }
  if (used(begin, bytes)) journal().complain(std::string(call) + ": a queued copy still uses this memory");
  return bytes;
}

bool HostMemory::pinned(const void* begin, std::size_t bytes) const {
  const auto* first = static_cast<const char*>(begin);
  const std::lock_guard lock(mutex_);
  auto at = pinned_.upper_bound(first);
  if (at == pinned_.begin()) return false;
  --at;
  return first + bytes <= at->first + at->second;
}

std::size_t HostMemory::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [begin, size] : pinned_) sum += size;
  return sum;
}

bool HostMemory::partly_pinned(const void* begin, std::size_t bytes) const {
  const auto* first = static_cast<const char*>(begin);
  const std::lock_guard lock(mutex_);
  for (const auto& [other, size] : pinned_) {
    if (first < other + size && other < first + bytes) return first < other || first + bytes > other + size;
  }
  return false;
}

HostMemory::Use HostMemory::use(const void* begin, std::size_t bytes, bool written) {
  const auto* first = static_cast<const char*>(begin);
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = ++uses_;
  pending_[number] = {first, first + bytes, written};
  return Use(nullptr, [this, number](void*) {
    const std::lock_guard lock(mutex_);
    pending_.erase(number);
  });
}

bool HostMemory::pending(const void* begin, std::size_t bytes, bool only_written) const {
  const auto* first = static_cast<const char*>(begin);
  const std::lock_guard lock(mutex_);
  for (const auto& [number, other] : pending_) {
    if (first < other.end && other.begin < first + bytes && (other.written || !only_written)) return true;
  }
  return false;
}

bool HostMemory::used(const void* begin, std::size_t bytes) const { return pending(begin, bytes, false); }

bool HostMemory::being_written(const void* begin, std::size_t bytes) const {
  return pending(begin, bytes, true);
}

HostMemory& host_memory() {
  static auto* the = new HostMemory;
  return *the;
}

}  // namespace emulated
