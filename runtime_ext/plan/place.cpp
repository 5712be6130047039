// Addresses for the planner: the loop of disco_accel/plan/timed/packing.py, which says what it does and why,
// as a library without PyTorch. tests/support/oracles/naive_packer.py gives the same addresses for the same
// pieces.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace {

constexpr std::int64_t kShares = 4;
// Each level has so many times the slices of the one above, and so many pieces a slice at least.
constexpr std::int64_t kFan = 8;
constexpr std::int64_t kPerSlice = 16;

struct Span {
  std::int64_t begin;
  std::int64_t end;

  bool empty() const { return begin >= end; }
};

using Spans = std::array<Span, 2>;

// Bytes of a piece, from `offset` on.
struct Bytes {
  std::int64_t offset;
  std::int64_t size;
};

// Some of the taken addresses, ascending. The rows behind `count` are spare: to clear them takes as long as
// to fill them.
struct Met {
  std::vector<Span> rows;
  std::size_t count = 0;

  // Has room for so many more.
  Span* room(std::size_t more) {
    if (rows.size() < count + more) rows.resize(2 * (count + more));
    return rows.data() + count;
  }
  Span* begin() { return rows.data(); }
  Span* end() { return rows.data() + count; }
};

// Addresses that are taken during a part of a slice of the time; ticks are few enough for 31 bits.
struct Taken {
  Span bytes;
  std::int32_t begin;
  std::int32_t end;
};

// What of a slice is taken, by address. What is taken during all of the slice has the widest ticks, and is
// one where it lies side by side: of long lived pieces, most of what a short lived one meets, few are left
// then. It is kept in blocks, so that few are moved when one comes between them.
class Slice {
 public:
  void clear() {
    used_ = 1;
    blocks_.resize(std::max<std::size_t>(blocks_.size(), 1));
    blocks_[0].clear();
  }

  // No two that are there at one tick overlap, so one of all the slice overlaps nothing that is in it.
  void add(const Span& bytes, std::int32_t begin, std::int32_t end) {
    std::size_t number = used_ - 1;
    while (number > 0 && bytes.begin < blocks_[number].front().bytes.begin) --number;
    std::vector<Taken>& block = blocks_[number];
    const auto below = [](std::int64_t low, const Taken& other) { return low < other.bytes.begin; };
    const auto at = std::upper_bound(block.begin(), block.end(), bytes.begin, below);
    if (begin == kFirst && end == kLast) {
      const bool joins_next = at != block.end() && always(*at) && at->bytes.begin == bytes.end;
      if (at != block.begin() && always(at[-1]) && at[-1].bytes.end == bytes.begin) {
        at[-1].bytes.end = joins_next ? at->bytes.end : bytes.end;
        if (joins_next) block.erase(at);
        return;
      }
      if (joins_next) {
        at->bytes.begin = bytes.begin;
        return;
      }
    }
    block.insert(at, {bytes, begin, end});
    if (block.size() == kBlock) split(number);
  }

  // Appends to `met` what is taken during `span`, by address.
  void meet(const Span& span, Met& met) const {
    for (std::size_t i = 0; i < used_; ++i) {
      Span* row = met.room(blocks_[i].size());
      for (const Taken& taken : blocks_[i]) {
        // No branch: nobody could predict it.
        *row = taken.bytes;
        row += (taken.begin < span.end) & (taken.end > span.begin);
      }
      met.count = row - met.begin();
    }
  }

  static constexpr std::int32_t kFirst = INT32_MIN, kLast = INT32_MAX;

 private:
  static constexpr std::size_t kBlock = 128;

  static bool always(const Taken& taken) { return taken.begin == kFirst && taken.end == kLast; }

  void split(std::size_t number) {
    if (used_ == blocks_.size()) blocks_.emplace_back();
    std::rotate(blocks_.begin() + number + 1, blocks_.begin() + used_, blocks_.begin() + used_ + 1);
    ++used_;
    const auto half = blocks_[number].begin() + kBlock / 2;
    blocks_[number + 1].assign(half, blocks_[number].end());
    blocks_[number].erase(half, blocks_[number].end());
  }

  std::vector<std::vector<Taken>> blocks_;
  std::size_t used_ = 0;
};

// What has got an address so far: all of it, and slice by slice of the time, finer from level to level. A
// piece that is there for a short time looks only at the slice that it lies in, or at two.
class Slices {
 public:
  Slices(std::int64_t parts, std::int64_t end) : end_(end) {
    for (std::int64_t slices = 1;; slices *= kFan) {
      levels_.push_back({(end + slices - 1) / slices + 1, std::vector<Slice>(slices)});
      if (slices * kFan * kPerSlice > parts) break;
    }
  }

  void clear() {
    for (Level& level : levels_) {
      for (Slice& slice : level.slices) slice.clear();
    }
  }

  void add(const Span& span, const Span& bytes) {
    for (Level& level : levels_) {
      const std::int64_t last = (span.end - 1) / level.width;
      for (std::int64_t i = span.begin / level.width; i <= last; ++i) {
        const std::int64_t begin = i * level.width, end = std::min(begin + level.width, end_);
        const bool all = span.begin <= begin && span.end >= end;
        level.slices[i].add(bytes, all ? Slice::kFirst : static_cast<std::int32_t>(span.begin),
                            all ? Slice::kLast : static_cast<std::int32_t>(span.end));
      }
    }
  }

  // Appends to `met` what is taken during `span`, by address, some of it twice.
  void meet(const Span& span, Met& met) {
    for (std::size_t i = levels_.size() - 1;; --i) {
      const std::int64_t first = span.begin / levels_[i].width, last = (span.end - 1) / levels_[i].width;
      if (last - first > 1) continue;
      const std::size_t count = met.count;
      levels_[i].slices[first].meet(span, met);
      if (first == last) return;
      const std::size_t middle = met.count;
      levels_[i].slices[last].meet(span, met);
      merge(met, count, middle);
      return;
    }
  }

  // Sorts what lies behind `first` in `met`, where what lies before and what lies behind `middle` is sorted.
  void merge(Met& met, std::size_t first, std::size_t middle) {
    const auto by_begin = [](const Span& a, const Span& b) { return a.begin < b.begin; };
    merged_.resize(std::max(merged_.size(), met.count - first));
    Span* const rows = met.begin();
    const auto end =
        std::merge(rows + first, rows + middle, rows + middle, met.end(), merged_.begin(), by_begin);
    std::copy(merged_.begin(), end, rows + first);
  }

 private:
  struct Level {
    std::int64_t width;
    std::vector<Slice> slices;
  };

  std::int64_t end_;
  std::vector<Level> levels_;
  std::vector<Span> merged_;
};

// Pieces get addresses; a piece has one or more parts, each with bytes and spans of its own.
class Packer {
 public:
  Packer(std::int32_t pieces, const std::int64_t* first, const Bytes* bytes, const Spans* spans,
         const std::int64_t* fixed)
      : fixed_(fixed, fixed + pieces),
        first_(first, first + pieces + 1),
        bytes_(bytes, bytes + first_[pieces]),
        spans_(spans, spans + first_[pieces]),
        highs_(pieces),
        addresses_(pieces),
        taken_(first_[pieces], last(spans_)) {
    for (std::int32_t piece = 0; piece < pieces; ++piece) {
      for (std::int64_t part = first_[piece]; part < first_[piece + 1]; ++part)
        highs_[piece] = std::max(highs_[piece], bytes_[part].offset + bytes_[part].size);
    }
  }

  // Gives each piece an address, those that have one first and the others in this order; returns the bytes
  // taken.
  std::int64_t pack(const std::vector<std::int32_t>& order) {
    taken_.clear();
    std::int64_t top = 0;
    for (std::size_t piece = 0; piece < fixed_.size(); ++piece) {
      if (fixed_[piece] >= 0) top = std::max(top, place(static_cast<std::int32_t>(piece), fixed_[piece]));
    }
    for (const std::int32_t piece : order) {
      if (fixed_[piece] >= 0) continue;
      const std::int64_t begin = first_[piece], end = first_[piece + 1];
      top = std::max(top,
                     place(piece, end - begin == 1 ? smallest_gap(begin) : smallest_gap_of_all(begin, end)));
    }
    return top;
  }

  const std::vector<std::int64_t>& addresses() const { return addresses_; }

  std::int64_t high(std::int32_t piece) const { return addresses_[piece] + highs_[piece]; }

 private:
  static std::int64_t last(const std::vector<Spans>& spans) {
    std::int64_t end = 0;
    for (const Spans& both : spans) end = std::max({end, both[0].end, both[1].end});
    return end;
  }

  // Returns the end of its bytes.
  std::int64_t place(std::int32_t piece, std::int64_t address) {
    addresses_[piece] = address;
    for (std::int64_t part = first_[piece]; part < first_[piece + 1]; ++part) {
      const std::int64_t low = address + bytes_[part].offset;
      // What takes no bytes is in nobody's way.
      for (const Span& span : spans_[part]) {
        if (!span.empty() && bytes_[part].size) taken_.add(span, {low, low + bytes_[part].size});
      }
    }
    return high(piece);
  }

  // What is taken at the same time as `part`, by address.
  void meet(std::int64_t part) {
    met_.count = 0;
    const auto& [first, second] = spans_[part];
    if (!first.empty()) taken_.meet(first, met_);
    if (second.empty()) return;
    const std::size_t middle = met_.count;
    taken_.meet(second, met_);
    taken_.merge(met_, 0, middle);
  }

  std::int64_t smallest_gap(std::int64_t part) {
    const std::int64_t block = bytes_[part].size;
    if (!block) return 0;
    meet(part);
    std::int64_t top = 0, best = -1, best_gap = INT64_MAX;
    for (const Span& bytes : met_) {
      const std::int64_t gap = bytes.begin - top;
      if (gap >= block && gap < best_gap) {
        best = top;
        best_gap = gap;
      }
      top = std::max(top, bytes.end);
    }
    return best < 0 ? top : best;
  }

  // The same for a piece of several parts: between addresses that would put a part over one that is placed.
  std::int64_t smallest_gap_of_all(std::int64_t begin, std::int64_t end) {
    forbidden_.clear();
    for (std::int64_t part = begin; part < end; ++part) {
      if (!bytes_[part].size) continue;
      meet(part);
      for (const Span& bytes : met_) {
        forbidden_.push_back(
            {bytes.begin - bytes_[part].offset - bytes_[part].size, bytes.end - bytes_[part].offset});
      }
    }
    std::stable_sort(forbidden_.begin(), forbidden_.end(),
                     [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::int64_t top = 0, best = -1, best_gap = INT64_MAX;
    for (const Span& span : forbidden_) {
      const std::int64_t gap = span.begin - top;
      if (gap >= 0 && gap < best_gap) {
        best = top;
        best_gap = gap;
      }
      top = std::max(top, span.end);
    }
    return best < 0 ? top : best;
  }

  std::vector<std::int64_t> fixed_;
  std::vector<std::int64_t> first_;
  std::vector<Bytes> bytes_;
  std::vector<Spans> spans_;
  // Of each piece, the end of its last part.
  std::vector<std::int64_t> highs_;
  std::vector<std::int64_t> addresses_;
  Slices taken_;
  Met met_;
  std::vector<Span> forbidden_;
};

}  // namespace

extern "C" {

// `first`: the number of each piece's first part, and of all parts. `bytes`: offset and size of each part;
// `spans`: begin and end of two spans for each part, the second one empty if there is none. `fixed`: the
// address of a piece that has one, -1 for others; no two of these may overlap at any time. `order` is the
// first to be tried, and receives the one that packed best; so do `addresses`. Returns the bytes that it
// takes, and in `tried` how many orders were tried: the first and at most `rounds` more.
std::int64_t disco_place(std::int32_t pieces, const std::int64_t* first, const std::int64_t* bytes,
                         const std::int64_t* spans, const std::int64_t* fixed, std::int64_t limit,
                         std::int32_t rounds, std::int32_t* order, std::int64_t* addresses,
                         std::int32_t* tried) {
  static_assert(sizeof(Spans) == 4 * sizeof(std::int64_t));
  static_assert(sizeof(Bytes) == 2 * sizeof(std::int64_t));
  Packer packer(pieces, first, reinterpret_cast<const Bytes*>(bytes), reinterpret_cast<const Spans*>(spans),
                fixed);
  std::vector<std::int32_t> now(order, order + pieces);
  std::int64_t best = INT64_MAX;
  *tried = 0;
  for (std::int32_t round = 0;; ++round) {
    const std::int64_t top = packer.pack(now);
    ++*tried;
    if (top < best) {
      best = top;
      std::copy(now.begin(), now.end(), order);
      std::copy(packer.addresses().begin(), packer.addresses().end(), addresses);
    }
    if (top <= limit || round == rounds) return best;
    const std::int64_t high = limit + (top - limit) * (round % kShares) / kShares;
    std::stable_partition(now.begin(), now.end(), [&](std::int32_t i) { return packer.high(i) > high; });
  }
}
}
