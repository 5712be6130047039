#include "ask.h"

#include <atomic>

#include "channel.h"

namespace disco::interpose {
namespace {

constexpr int kMostPools = 64;

std::atomic<std::uint64_t> totals[kDevices];

}  // namespace

Ask::Ask(Library& library, Layer layer, bool per_thread)
    : library_(library), layer_(layer), per_thread_(per_thread) {
  if (driver_layer()) return;
  auto* const peek = library_.get<int()>(Id::cudaPeekAtLastError);
  quiet_ = peek != nullptr && peek() == kSuccess;
}

void Ask::forget() {
  if (driver_layer()) return;
  auto* const peek = library_.get<int()>(Id::cudaPeekAtLastError);
  auto* const clear = library_.get<int()>(Id::cudaGetLastError);
  if (peek != nullptr && clear != nullptr && peek() != kSuccess) clear();
}

int Ask::device() {
  int found = -1;
  return ask(by_layer(Id::cudaGetDevice, Id::cuCtxGetDevice), &found) ? found : -1;
}

int Ask::device_of(void* stream) {
  int found = -1;
  const Id id = of_stream(Id::cudaStreamGetDevice, Id::cudaStreamGetDevice_ptsz, Id::cuStreamGetDevice,
                          Id::cuStreamGetDevice_ptsz);
  return ask(id, stream, &found) ? found : device();  // older versions don't say
}

std::uint64_t Ask::total(int device) {
  if (device < 0 || device >= kDevices) return 0;
  std::uint64_t known = totals[device].load(std::memory_order_relaxed);
  if (known != 0) return known;
  Library* const below = driver_layer() ? &library_ : driver();
  auto* const total =
      below == nullptr ? nullptr : below->get<int(std::size_t*, int)>(Id::cuDeviceTotalMem_v2);
  std::size_t bytes = 0, free = 0;
  if (total != nullptr && total(&bytes, device) == kSuccess) {
    known = bytes;
  } else if (!driver_layer() && quiet_ && ask(Id::cudaMemGetInfo, &free, &bytes)) {
    known = bytes;
  }
  totals[device].store(known, std::memory_order_relaxed);
  return known;
}

bool Ask::capturing(void* stream) {
  int status = 0;
  const Id id = of_stream(Id::cudaStreamIsCapturing, Id::cudaStreamIsCapturing_ptsz, Id::cuStreamIsCapturing,
                          Id::cuStreamIsCapturing_ptsz);
  if (library_.find(id) == nullptr) return false;
  return !ask(id, stream, &status) || status != 0;
}

bool Ask::pool_of(int device, void** pool) {
  return ask(by_layer(Id::cudaDeviceGetMemPool, Id::cuDeviceGetMemPool), pool, device);
}

bool Ask::attribute(void* pool, int attribute, std::uint64_t* value) {
  return ask(by_layer(Id::cudaMemPoolGetAttribute, Id::cuMemPoolGetAttribute), pool, attribute,
             static_cast<void*>(value));
}

std::uint64_t Ask::context() {
  void* found = nullptr;
  return driver_layer() && ask(Id::cuCtxGetCurrent, &found) ? number(found) : 0;
}

void sample_pool(Ask& ask, std::uint64_t pool, int device, const Claim& claim) {
  const Sampling in_order;
  int known = device;
  std::uint64_t reserved = 0;
  // A pool that is gone can't be asked; without a claim, nothing was counted for it since.
  const bool there = pool_device(pool, &known) || claim.device >= 0;
  if (there && ask.attribute(reinterpret_cast<void*>(pool), kReservedNow, &reserved)) {
    settle_pool(claim, pool, known, reserved);
  } else {
    withdraw(claim);
  }
}

void sample_pools(Ask& ask) {
  const Sampling in_order;
  std::uint64_t pools[kMostPools];
  const int count = reserving_pools(pools, kMostPools);
  for (int i = 0; i < count; ++i) {
    int device = -1;
    std::uint64_t reserved = 0;
    if (pool_device(pools[i], &device) &&
        ask.attribute(reinterpret_cast<void*>(pools[i]), kReservedNow, &reserved))
      settle_pool({}, pools[i], device, reserved);
  }
}

}  // namespace disco::interpose
