// Addresses for the planner: the loop of disco_accel/plan/timed/packing.py, which says what it does and why,
// as a library without PyTorch. Both give the same addresses for the same pieces.

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

// Small, because many are moved when one comes between them; ticks are few enough for 31 bits.
struct Taken {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t part;
};

// Bytes of a piece, from `offset` on.
struct Bytes {
  std::int64_t offset;
  std::int64_t size;
};

// What has got an address so far, by address: all of it, and slice by slice of the time, finer from level to
// level. A piece that is there for a short time looks only at the slice that it lies in.
class Slices {
 public:
  Slices(std::int64_t parts, std::int64_t end) {
    for (std::int64_t slices = 1;; slices *= kFan) {
      levels_.push_back({(end + slices - 1) / slices + 1, {}});
      levels_.back().slices.resize(slices);
      if (slices * kFan * kPerSlice > parts) break;
    }
  }

  void clear() {
    for (Level& level : levels_) {
      for (auto& slice : level.slices) slice.clear();
    }
  }

  void add(std::int32_t part, const Span& span, const std::vector<std::int64_t>& lows) {
    const auto below = [&](std::int64_t low, const Taken& other) { return low < lows[other.part]; };
    const Taken taken{static_cast<std::int32_t>(span.begin), static_cast<std::int32_t>(span.end), part};
    for (Level& level : levels_) {
      const std::int64_t last = (span.end - 1) / level.width;
      for (std::int64_t i = span.begin / level.width; i <= last; ++i) {
        auto& slice = level.slices[i];
        slice.insert(std::upper_bound(slice.begin(), slice.end(), lows[part], below), taken);
      }
    }
  }

  // Appends to `met` what is there during `span`, by address.
  void meet(const Span& span, std::vector<std::int32_t>& met) const {
    const std::vector<Taken>& slice = narrowest(span);
    std::size_t count = met.size();
    met.resize(count + slice.size());
    for (const Taken& taken : slice) {
      // No branch: nobody could predict it.
      met[count] = taken.part;
      count += (taken.begin < span.end) & (taken.end > span.begin);
    }
    met.resize(count);
  }

 private:
  struct Level {
    std::int64_t width;
    std::vector<std::vector<Taken>> slices;
  };

  const std::vector<Taken>& narrowest(const Span& span) const {
    for (std::size_t i = levels_.size() - 1; i > 0; --i) {
      const std::int64_t at = span.begin / levels_[i].width;
      if (at == (span.end - 1) / levels_[i].width) return levels_[i].slices[at];
    }
    return levels_[0].slices[0];
  }

  std::vector<Level> levels_;
};

// Pieces get addresses; a piece has one or more parts, each with bytes and spans of its own.
class Packer {
 public:
  Packer(std::int32_t pieces, const std::int64_t* first, const Bytes* bytes, const Spans* spans)
      : first_(first, first + pieces + 1),
        bytes_(bytes, bytes + first_[pieces]),
        spans_(spans, spans + first_[pieces]),
        lows_(first_[pieces]),
        addresses_(pieces),
        taken_(first_[pieces], last(spans_)) {}

  // Gives each piece an address, in this order; returns the bytes taken.
  std::int64_t pack(const std::vector<std::int32_t>& order) {
    taken_.clear();
    std::int64_t top = 0;
    for (const std::int32_t piece : order) {
      const std::int64_t begin = first_[piece], end = first_[piece + 1];
      addresses_[piece] = end - begin == 1 ? smallest_gap(begin) : smallest_gap_of_all(begin, end);
      for (std::int64_t part = begin; part < end; ++part) {
        lows_[part] = addresses_[piece] + bytes_[part].offset;
        for (const Span& span : spans_[part]) {
          if (!span.empty()) taken_.add(static_cast<std::int32_t>(part), span, lows_);
        }
      }
      top = std::max(top, high(piece));
    }
    return top;
  }

  const std::vector<std::int64_t>& addresses() const { return addresses_; }

  std::int64_t high(std::int32_t piece) const {
    std::int64_t high = 0;
    for (std::int64_t part = first_[piece]; part < first_[piece + 1]; ++part)
      high = std::max(high, part_high(part));
    return high;
  }

 private:
  static std::int64_t last(const std::vector<Spans>& spans) {
    std::int64_t end = 0;
    for (const Spans& both : spans) end = std::max({end, both[0].end, both[1].end});
    return end;
  }

  std::int64_t part_high(std::int64_t part) const { return lows_[part] + bytes_[part].size; }

  // The placed ones that are there at the same time as `part`, by address, some of them twice.
  void meet(std::int64_t part) {
    met_.clear();
    std::ptrdiff_t first = 0;
    for (const Span& span : spans_[part]) {
      if (!span.empty()) taken_.meet(span, met_);
      if (first == 0) first = std::ssize(met_);
    }
    const auto by_low = [&](std::int32_t a, std::int32_t b) { return lows_[a] < lows_[b]; };
    std::inplace_merge(met_.begin(), met_.begin() + first, met_.end(), by_low);
  }

  std::int64_t smallest_gap(std::int64_t part) {
    meet(part);
    const std::int64_t block = bytes_[part].size;
    std::int64_t top = 0, best = -1, best_gap = INT64_MAX;
    for (const std::int32_t other : met_) {
      const std::int64_t gap = lows_[other] - top;
      if (gap >= block && gap < best_gap) {
        best = top;
        best_gap = gap;
      }
      top = std::max(top, part_high(other));
    }
    return best < 0 ? top : best;
  }

  // The same for a piece of several parts: between addresses that would put a part over one that is placed.
  std::int64_t smallest_gap_of_all(std::int64_t begin, std::int64_t end) {
    forbidden_.clear();
    for (std::int64_t part = begin; part < end; ++part) {
      meet(part);
      for (const std::int32_t other : met_) {
        forbidden_.push_back(
            {lows_[other] - bytes_[part].offset - bytes_[part].size, part_high(other) - bytes_[part].offset});
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

  std::vector<std::int64_t> first_;
  std::vector<Bytes> bytes_;
  std::vector<Spans> spans_;
  std::vector<std::int64_t> lows_;
  std::vector<std::int64_t> addresses_;
  Slices taken_;
  std::vector<std::int32_t> met_;
  std::vector<Span> forbidden_;
};

}  // namespace

extern "C" {

// `first`: the number of each piece's first part, and of all parts. `bytes`: offset and size of each part;
// `spans`: begin and end of two spans for each part, the second one empty if there is none. `order` is the
// first to be tried, and receives the one that packed best; so do `addresses`. Returns the bytes that it
// takes, and in `tried` how many orders were tried: the first and at most `rounds` more.
std::int64_t disco_place(std::int32_t pieces, const std::int64_t* first, const std::int64_t* bytes,
                         const std::int64_t* spans, std::int64_t limit, std::int32_t rounds,
                         std::int32_t* order, std::int64_t* addresses, std::int32_t* tried) {
  static_assert(sizeof(Spans) == 4 * sizeof(std::int64_t));
  static_assert(sizeof(Bytes) == 2 * sizeof(std::int64_t));
  Packer packer(pieces, first, reinterpret_cast<const Bytes*>(bytes), reinterpret_cast<const Spans*>(spans));
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
