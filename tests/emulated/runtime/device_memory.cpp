#include "device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "settings.h"

namespace emulated {
namespace {

constexpr std::size_t kReserved = 128ull << 30;
constexpr std::size_t kGrain = 2 << 20;  // the driver's granularity; also the gap between blocks

char* reserve_range(int protection) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* begin = mmap(nullptr, kReserved + kGrain, protection, kFlags, -1, 0);
  if (begin == MAP_FAILED) {
    std::perror("emulated CUDA: mmap");
    std::abort();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  return reinterpret_cast<char*>((address + kGrain - 1) / kGrain * kGrain);
}

}  // namespace

DeviceMemory::DeviceMemory()
    : addresses_(reserve_range(PROT_NONE)),
      store_(reserve_range(PROT_READ | PROT_WRITE)),
      live_(static_cast<std::size_t>(settings().devices)),
      peak_(live_.size()) {}

void* DeviceMemory::allocate(int device, std::size_t wanted) {
  const std::size_t size = std::max(kGrain, (wanted + kGrain - 1) / kGrain * kGrain);
  const std::lock_guard lock(mutex_);
  if (live_[device] + size > settings().device_bytes) return nullptr;
  char* block = nullptr;
  if (const auto hole = holes_.find(size); hole != holes_.end()) {
    block = hole->second;
    holes_.erase(hole);
  } else {
    if (used_ + size + kGrain > kReserved) return nullptr;
    block = addresses_ + used_;
    used_ += size + kGrain;
  }
  blocks_[block] = {.bytes = size, .device = device};
  live_[device] += size;
  peak_[device] = std::max(peak_[device], live_[device]);
  std::memset(bytes(block), kUnwritten, size);
  return block;
}

bool DeviceMemory::release(void* block) {
  const std::lock_guard lock(mutex_);
  const auto at = blocks_.find(static_cast<char*>(block));
  if (at == blocks_.end() || at->second.mapped) return false;
  const std::size_t size = at->second.bytes;
  const int device = at->second.device;
  std::memset(bytes(block), kFreed, size);
  live_[device] -= size;
  holes_.emplace(size, static_cast<char*>(block));
  blocks_.erase(at);
  return true;
}

bool DeviceMemory::owns(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return at >= addresses_ && at < addresses_ + kReserved;
}

char* DeviceMemory::bytes(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return owns(address) ? store_ + (at - addresses_) : const_cast<char*>(at);
}

DeviceMemory::Blocks::const_iterator DeviceMemory::find(const void* address) const {
  auto at = blocks_.upper_bound(static_cast<const char*>(address));
  if (at == blocks_.begin()) return blocks_.end();
  --at;
  return static_cast<const char*>(address) < at->first + at->second.bytes ? at : blocks_.end();
}

bool DeviceMemory::in_block(const void* address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto at = find(address);
  return at != blocks_.end() && static_cast<const char*>(address) + bytes <= at->first + at->second.bytes;
}

int DeviceMemory::device_of(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto at = find(address);
  return at == blocks_.end() ? -1 : at->second.device;
}

std::size_t DeviceMemory::live(int device) const {
  const std::lock_guard lock(mutex_);
  return live_.at(static_cast<std::size_t>(device));
}

std::size_t DeviceMemory::peak(int device) const {
  const std::lock_guard lock(mutex_);
  return peak_.at(static_cast<std::size_t>(device));
}

void DeviceMemory::reset_peak(int device) {
  const std::lock_guard lock(mutex_);
  peak_.at(static_cast<std::size_t>(device)) = live_.at(static_cast<std::size_t>(device));
}

std::size_t DeviceMemory::grain() { return kGrain; }

char* DeviceMemory::reserve(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const auto hole = reservable_.find(bytes); hole != reservable_.end()) {
    char* address = hole->second;
    reservable_.erase(hole);
    return address;
  }
  if (used_ + bytes + kGrain > kReserved) return nullptr;
  char* address = addresses_ + used_;
  used_ += bytes + kGrain;
  return address;
}

void DeviceMemory::unreserve(char* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  reservable_.emplace(bytes, address);
}

bool DeviceMemory::take(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (live_.at(static_cast<std::size_t>(device)) + bytes > settings().device_bytes) return false;
  live_[device] += bytes;
  peak_[device] = std::max(peak_[device], live_[device]);
  return true;
}

void DeviceMemory::give_back(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  live_.at(static_cast<std::size_t>(device)) -= bytes;
}

void DeviceMemory::show(char* address, std::size_t bytes, int device, bool writable) {
  const std::lock_guard lock(mutex_);
  blocks_[address] = {.bytes = bytes, .device = device, .mapped = true, .writable = writable};
}

void DeviceMemory::hide(char* address) {
  const std::lock_guard lock(mutex_);
  blocks_.erase(address);
}

bool DeviceMemory::writable(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto at = find(address);
  return at == blocks_.end() || at->second.writable;
}

DeviceMemory& device_memory() {
  static auto* the = new DeviceMemory;
  return *the;
}

}  // namespace emulated
