#include "planned_alloc.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "fork_mutex.h"

namespace disco {

struct ThreadState {
  std::span<const PlannedBlock> schedule;
  std::size_t next = 0;
  PlannedBlock loose;
  std::size_t loose_used = 0;
  std::int64_t loose_live = 0;
  bool planned = false;
  MemoryKind kind = MemoryKind::kHost;  // of what is planned or recorded
  bool engine_thread = false;
  std::vector<RecordedBlock>* record = nullptr;
  std::int64_t event = 0;
  std::int64_t until_failure = 0;

  static std::vector<RecordedBlock>* blocks_of(RecordScope* scope) { return &scope->blocks_; }
};

namespace {

thread_local ThreadState tls;

constexpr std::size_t kMaxRanges = 1024;
struct Range {
  std::atomic<std::uintptr_t> lo{0};
  std::atomic<std::uintptr_t> hi{0};
};
std::array<Range, kMaxRanges> ranges;
std::atomic<std::size_t> ranges_used{0};
ForkMutex ranges_mutex;

std::atomic<std::int64_t> forwarded_on_engine{0};

// Leaked on purpose: blocks are freed during static destruction, after a normal global would be gone.
struct LiveBlocks {
  ForkMutex mutex;
  std::unordered_map<void*, std::size_t> sizes;
  std::int64_t live = 0;
  std::int64_t peak = 0;
};
std::atomic<bool> live_tracking{false};
std::atomic<bool> live_ever{false};
LiveBlocks& live_blocks() {
  static auto* blocks = new LiveBlocks();
  return *blocks;
}

c10::Allocator* base_allocator = nullptr;

constexpr std::size_t kLooseAlignment = 64;

void* loose_address(std::size_t nbytes) {
  const std::size_t begin = (tls.loose_used + kLooseAlignment - 1) / kLooseAlignment * kLooseAlignment;
  if (begin + nbytes > tls.loose.nbytes) return nullptr;
  tls.loose_used = begin + nbytes;
  ++tls.loose_live;
  return static_cast<char*>(tls.loose.ptr) + begin;
}

void note_loose_freed(const void* ptr) {
  const auto* const base = static_cast<const char*>(tls.loose.ptr);
  if (!tls.planned || ptr < base || ptr >= base + tls.loose.nbytes) return;
  if (--tls.loose_live == 0) tls.loose_used = 0;
}

void free_block(void* ptr) {
  if (ptr == nullptr) return;
  if (in_planned_range(ptr)) {
    note_loose_freed(ptr);
    return;
  }
  note_freed(ptr);
  base_allocator->raw_deallocate(ptr);
}

// The one deleter that every block carries, planned or not: raw_deallocate (oneDNN's scratch) has nothing but
// the pointer to tell them apart, hence the range check.
class CpuDecorator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &free_block, cpu};
    if (void* ptr = planned_address(MemoryKind::kHost, nbytes)) return {ptr, ptr, &free_block, cpu};
    if (tls.until_failure > 0 && --tls.until_failure == 0) {
      TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: ", nbytes,
                  " bytes, as a test asked for");
    }
    void* ptr = base_allocator->raw_allocate(nbytes);
    c10::DataPtr block(ptr, ptr, &free_block, cpu);  // freed if noting it takes memory that is not there
    note_forwarded(MemoryKind::kHost, ptr, nbytes);
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

}  // namespace

void install_cpu_decorator() {
  static const bool installed = [] {
    base_allocator = c10::GetAllocator(c10::DeviceType::CPU);
    if (base_allocator->raw_deleter() == nullptr) {
      throw std::runtime_error(
          "the CPU allocator in place has no raw deleter: planned allocation cannot wrap it");
    }
    static auto* decorator = new CpuDecorator();
    c10::SetAllocator(c10::DeviceType::CPU, decorator, /*priority=*/255);
    return true;
  }();
  (void)installed;
}

PlannedScope::PlannedScope(MemoryKind kind, std::span<const PlannedBlock> blocks, PlannedBlock loose) {
  tls.kind = kind;
  tls.schedule = blocks;
  tls.next = 0;
  tls.loose = loose;
  tls.loose_used = 0;
  tls.loose_live = 0;
  tls.planned = true;
}
PlannedScope::~PlannedScope() { tls.planned = false; }

void PlannedScope::finish() const {
  if (tls.next == tls.schedule.size()) return;
  throw ScheduleMismatch("made " + std::to_string(tls.next) + " allocations where " +
                         std::to_string(tls.schedule.size()) + " were recorded");
}

RecordScope::RecordScope(MemoryKind kind) {
  tls.kind = kind;
  tls.record = ThreadState::blocks_of(this);
  tls.event = 0;
}
RecordScope::~RecordScope() { tls.record = nullptr; }

EngineThreadScope::EngineThreadScope() : before_(tls.engine_thread) { tls.engine_thread = true; }
EngineThreadScope::~EngineThreadScope() { tls.engine_thread = before_; }

bool planning(MemoryKind kind) { return tls.planned && tls.kind == kind; }

bool may_be_planned(std::size_t nbytes) {
  if (tls.next < tls.schedule.size()) return tls.schedule[tls.next].nbytes == nbytes;
  return tls.loose.nbytes > 0;
}

void* planned_address(MemoryKind kind, std::size_t nbytes) {
  if (!planning(kind)) return nullptr;
  if (tls.next >= tls.schedule.size()) {
    if (void* const ptr = loose_address(nbytes)) return ptr;
    throw ScheduleMismatch("allocated " + std::to_string(nbytes) + " bytes more than the " +
                           std::to_string(tls.schedule.size()) + " recorded allocations");
  }
  const PlannedBlock& block = tls.schedule[tls.next];
  if (block.nbytes != nbytes) {
    throw ScheduleMismatch("allocation " + std::to_string(tls.next) + " asks for " + std::to_string(nbytes) +
                           " bytes where " + std::to_string(block.nbytes) + " were recorded");
  }
  ++tls.next;
  return block.ptr;
}

bool recording(MemoryKind kind) { return tls.record != nullptr && tls.kind == kind; }

void note_forwarded(MemoryKind kind, void* ptr, std::size_t nbytes) {
  const bool counted = kind == tls.kind || kind == MemoryKind::kGpu;
  if (counted && (tls.engine_thread || omp_in_parallel()))
    forwarded_on_engine.fetch_add(1, std::memory_order_relaxed);
  if (recording(kind)) tls.record->push_back({ptr, nbytes, tls.event++, -1});
  if (live_tracking.load(std::memory_order_relaxed)) {
    LiveBlocks& blocks = live_blocks();
    const std::lock_guard lock(blocks.mutex);
    blocks.sizes[ptr] = nbytes;
    blocks.live += static_cast<std::int64_t>(nbytes);
    blocks.peak = std::max(blocks.peak, blocks.live);
  }
}

void note_freed(void* ptr) {
  if (tls.record != nullptr) {
    for (auto block = tls.record->rbegin(); block != tls.record->rend(); ++block) {
      if (block->ptr == ptr && block->freed < 0) {
        block->freed = tls.event++;
        break;
      }
    }
  }
  if (live_ever.load(std::memory_order_relaxed)) {
    LiveBlocks& blocks = live_blocks();
    const std::lock_guard lock(blocks.mutex);
    const auto found = blocks.sizes.find(ptr);
    if (found != blocks.sizes.end()) {
      blocks.live -= static_cast<std::int64_t>(found->second);
      blocks.sizes.erase(found);
    }
  }
}

void add_planned_range(const void* base, std::size_t nbytes) {
  if (nbytes == 0) return;
  const auto lo = reinterpret_cast<std::uintptr_t>(base);
  const std::lock_guard lock(ranges_mutex);
  const std::size_t used = ranges_used.load();
  std::size_t i = 0;
  while (i < used && ranges[i].hi.load() != 0) ++i;
  if (i == kMaxRanges) throw std::length_error("more than 1024 arenas are open");
  ranges[i].lo.store(lo);
  ranges[i].hi.store(lo + nbytes);
  if (i == used) ranges_used.store(used + 1);
}

void remove_planned_range(const void* base) {
  const auto lo = reinterpret_cast<std::uintptr_t>(base);
  const std::lock_guard lock(ranges_mutex);
  for (std::size_t i = 0; i < ranges_used.load(); ++i) {
    if (ranges[i].hi.load() != 0 && ranges[i].lo.load() == lo) {
      ranges[i].hi.store(0);
      return;
    }
  }
}

bool in_planned_range(const void* ptr) {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const std::size_t used = ranges_used.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < used; ++i) {
    if (address < ranges[i].hi.load(std::memory_order_relaxed) &&
        address >= ranges[i].lo.load(std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

bool fail_allocation(std::int64_t nth) {
  const bool pending = tls.until_failure > 0;
  tls.until_failure = nth;
  return pending;
}

std::int64_t engine_allocations() { return forwarded_on_engine.load(); }

void set_live_tracking(bool on) {
  LiveBlocks& blocks = live_blocks();
  const std::lock_guard lock(blocks.mutex);
  if (on) {
    blocks.sizes.clear();
    blocks.live = blocks.peak = 0;
    live_ever.store(true);
  }
  live_tracking.store(on);
}

std::int64_t live_bytes() {
  const std::lock_guard lock(live_blocks().mutex);
  return live_blocks().live;
}

std::int64_t peak_live_bytes() {
  const std::lock_guard lock(live_blocks().mutex);
  return live_blocks().peak;
}

void reset_peak_live_bytes() {
  const std::lock_guard lock(live_blocks().mutex);
  live_blocks().peak = live_blocks().live;
}

}  // namespace disco
