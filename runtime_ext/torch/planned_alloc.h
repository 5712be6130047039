// Planned allocation: while an op runs, the n-th allocation it makes is served from the address that the plan
// chose.
//
// The schedule is thread-local, so other threads keep their allocator. One decorator stands in front of the
// CPU allocator (PyTorch's own stays behind it); the CUDA decorator in runtime_ext/cuda shares the schedule
// through the functions of this header. A schedule is of one kind of memory: what an op allocates elsewhere,
// such as a number on the host for a kernel of a GPU, comes from the allocator there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace disco {

// The memory that an allocator hands out.
enum class MemoryKind : std::uint8_t { kHost, kGpu };

// One allocation of a recorded call: its place in the call's sequence is its place in the schedule.
struct PlannedBlock {
  void* ptr = nullptr;
  std::size_t nbytes = 0;
};

// One allocation seen while recording. `born` and `freed` count the allocations and frees of the call up to
// it; `freed` is -1 for a block that outlived the call.
struct RecordedBlock {
  void* ptr = nullptr;
  std::size_t nbytes = 0;
  std::int64_t born = 0;
  std::int64_t freed = -1;
};

// An op allocated something other than what was recorded for it.
class ScheduleMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Puts the decorator in front of the process's CPU allocator, once. Safe to call again.
void install_cpu_decorator();

// Serves this thread's allocations of `kind` from `blocks` until it goes out of scope. Scopes do not nest.
// What the call allocates beyond them comes from `loose`, if that has room: one behind the other, from its
// start again once all of them are freed.
class PlannedScope {
 public:
  PlannedScope(MemoryKind kind, std::span<const PlannedBlock> blocks, PlannedBlock loose = {});
  ~PlannedScope();
  PlannedScope(const PlannedScope&) = delete;
  PlannedScope& operator=(const PlannedScope&) = delete;
  // Throws ScheduleMismatch when the call made fewer allocations than recorded.
  void finish() const;
};

// Records this thread's allocations of `kind` until it goes out of scope.
class RecordScope {
 public:
  explicit RecordScope(MemoryKind kind);
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;
  const std::vector<RecordedBlock>& blocks() const { return blocks_; }

 private:
  friend struct ThreadState;
  std::vector<RecordedBlock> blocks_;
};

// Marks this thread as one that runs ops of an engine: allocations that it (or an OpenMP worker) forwards are
// counted.
class EngineThreadScope {
 public:
  EngineThreadScope();
  ~EngineThreadScope();
  EngineThreadScope(const EngineThreadScope&) = delete;
  EngineThreadScope& operator=(const EngineThreadScope&) = delete;

 private:
  bool before_;
};

// What the allocator decorator of `kind` asks for each allocation: a planned address, or nullptr to forward.
// Throws ScheduleMismatch. `note_forwarded` and `note_freed` report what the allocator behind did.
void* planned_address(MemoryKind kind, std::size_t nbytes);
// Whether this thread is in a PlannedScope of `kind`.
bool planning(MemoryKind kind);
// Whether planned_address would serve `nbytes` now.
bool may_be_planned(std::size_t nbytes);
void note_forwarded(MemoryKind kind, void* ptr, std::size_t nbytes);
void note_freed(void* ptr);
// Whether this thread records `kind`: frees of blocks that it allocates now must be reported too.
bool recording(MemoryKind kind);

// Address ranges that belong to plans: freeing a block inside one is a no-op. Throws std::length_error when
// more than 1024 ranges are live.
void add_planned_range(const void* base, std::size_t nbytes);
void remove_planned_range(const void* base);
bool in_planned_range(const void* ptr);

// For tests: the nth CPU allocation that this thread makes from now on fails as it does when memory is gone;
// 0 is none. Returns whether a failure asked for before has not happened.
bool fail_allocation(std::int64_t nth);

// Forwarded allocations made on engine threads since the process started. What a GPU's op allocates on the
// host does not count: no plan is made for it.
std::int64_t engine_allocations();

// Live-byte accounting of forwarded CPU allocations, off by default (it takes a lock per allocation). Only
// blocks allocated while it is on are counted. Turning it on resets the counts.
void set_live_tracking(bool on);
std::int64_t live_bytes();
std::int64_t peak_live_bytes();
void reset_peak_live_bytes();

}  // namespace disco
