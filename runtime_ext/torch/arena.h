// Arenas of host memory as tensors: anonymous mappings with guard pages, and tensors carved out of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

// Keeps a storage alive for this library's own work, and is counted.
class OwnStorage {
 public:
  explicit OwnStorage(c10::Storage storage);
  ~OwnStorage();
  OwnStorage(OwnStorage&&) noexcept = default;
  OwnStorage& operator=(OwnStorage&&) = delete;

 private:
  c10::Storage storage_;
};

// A 1-d uint8 tensor over the first `nbytes` bytes of a CPU tensor's memory and in its storage, for this
// library's own work: planned steps work through these.
at::Tensor own_view_of(const at::Tensor& tensor, std::int64_t nbytes);

// How many hold each of these tensors' storages besides the tensor, tensors of own_view_of and OwnStorages.
std::vector<std::int64_t> other_holders(const std::vector<at::Tensor>& tensors);

// Bytes of the pages under `tensor` that are in memory.
std::int64_t touched_bytes(const at::Tensor& tensor);

// Has the write watch cover an arena that map_arena made, for as long as it is mapped; whether that is
// possible here.
bool watch_arena(const at::Tensor& arena);

// Notes that devices may write to an arena, which the write watch does not see.
void expect_device_writes_to(const at::Tensor& arena);

}  // namespace disco
