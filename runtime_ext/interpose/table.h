// What this process holds: allocations, pools, and physical memory with its handles and mappings.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace disco::interpose {

enum class Kind : std::uint8_t {
  kNone,
  kPointer,  // linear memory, by its address; bytes count unless `pool` is the owner
  kArray,    // by its handle, as the two kinds after it
  kMipmap,
  kPool,     // bytes: what it has reserved, as counted last
  kObject,   // physical memory (cuMemCreate), by a number of ours; refs: its handles and mappings
  kHandle,   // of the object `owner`; refs: how often it must be released
  kMapping,  // of the object `owner`, by its address; bytes: how long, not counted
};

struct Entry {
  Kind kind = Kind::kNone;
  bool pooled = false;      // part of what the pool `owner` has reserved
  std::int16_t device = 0;  // as CUDA numbers it in this process
  std::uint32_t refs = 0;
  std::uint64_t key = 0;
  std::uint64_t bytes = 0;
  std::uint64_t owner = 0;  // a pool, a context or an object
  std::uint64_t counted() const {
    const bool counts = kind == Kind::kPointer ? !pooled : kind != Kind::kHandle && kind != Kind::kMapping;
    return counts ? bytes : 0;
  }
};

// Entries by kind and key, with open addressing. No lock, no destructor, and of the C++ library no code.
class Table {
 public:
  Entry* find(Kind kind, std::uint64_t key) {
    if (size_ == 0) return nullptr;
    for (std::size_t at = home(kind, key);; at = next(at)) {
      if (slots_[at].kind == Kind::kNone) return nullptr;
      if (slots_[at].kind == kind && slots_[at].key == key) return &slots_[at];
    }
  }

  // The place of the new entry; nullptr without memory for it. There must be none of its kind and key.
  Entry* insert(const Entry& entry) {
    if ((size_ + 1) * 2 > capacity_ && !grow()) return nullptr;
    ++size_;
    return place(entry);
  }

  // Entries that were found before have other places afterwards.
  void erase(Entry* entry) {
    std::size_t hole = static_cast<std::size_t>(entry - slots_);
    slots_[hole] = {};
    --size_;
    // Those that follow without a gap may have been put there because of it.
    for (std::size_t at = next(hole); slots_[at].kind != Kind::kNone; at = next(at)) {
      const std::size_t from = home(slots_[at].kind, slots_[at].key);
      if (((at - from) & (capacity_ - 1)) < ((at - hole) & (capacity_ - 1))) continue;
      slots_[hole] = slots_[at];
      slots_[at] = {};
      hole = at;
    }
  }

  // Erase all for which `chosen` holds, which is asked at least once about each.
  template <typename Chosen>
  void erase_if(Chosen chosen) {
    for (std::size_t at = 0; at < capacity_;) {
      if (slots_[at].kind != Kind::kNone && chosen(slots_[at])) {
        erase(&slots_[at]);  // which may bring another one here
      } else {
        ++at;
      }
    }
  }

  // Calls `visit` with each entry, which it may change but neither erase nor move.
  template <typename Visit>
  void each(Visit visit) {
    for (std::size_t at = 0; at < capacity_; ++at)
      if (slots_[at].kind != Kind::kNone) visit(slots_[at]);
  }

  void clear() {
    for (std::size_t at = 0; at < capacity_; ++at) slots_[at] = {};
    size_ = 0;
  }

 private:
  std::size_t home(Kind kind, std::uint64_t key) const {
    const std::uint64_t mixed = (key ^ (static_cast<std::uint64_t>(kind) << 56)) * 0x9E3779B97F4A7C15u;
    return static_cast<std::size_t>(mixed >> 20) & (capacity_ - 1);
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (capacity_ - 1); }
  Entry* place(const Entry& entry) {
    std::size_t at = home(entry.kind, entry.key);
    while (slots_[at].kind != Kind::kNone) at = next(at);
    slots_[at] = entry;
    return &slots_[at];
  }
  bool grow() {
    const std::size_t before = capacity_;
    Entry* const old = slots_;
    auto* const larger = static_cast<Entry*>(std::calloc(before == 0 ? 64 : before * 2, sizeof(Entry)));
    if (larger == nullptr) return false;
    slots_ = larger;
    capacity_ = before == 0 ? 64 : before * 2;
    for (std::size_t at = 0; at < before; ++at)
      if (old[at].kind != Kind::kNone) place(old[at]);
    std::free(old);
    return true;
  }

  Entry* slots_ = nullptr;
  std::size_t capacity_ = 0;  // a power of two
  std::size_t size_ = 0;
};

}  // namespace disco::interpose
