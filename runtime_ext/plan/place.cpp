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
  std::int32_t piece;
};

// What has got an address so far, by address: all of it, and slice by slice of the time, finer from level to
// level. A piece that is there for a short time looks only at the slice that it lies in.
class Slices {
 public:
  Slices(std::int64_t pieces, std::int64_t end) {
    for (std::int64_t slices = 1;; slices *= kFan) {
      levels_.push_back({(end + slices - 1) / slices + 1, {}});
      levels_.back().slices.resize(slices);
      if (slices * kFan * kPerSlice > pieces) break;
    }
  }

  void clear() {
    for (Level& level : levels_) {
      for (auto& slice : level.slices) slice.clear();
    }
  }

  void add(std::int32_t piece, const Span& span, const std::vector<std::int64_t>& lows) {
    const auto below = [&](std::int64_t low, const Taken& other) { return low < lows[other.piece]; };
    const Taken taken{static_cast<std::int32_t>(span.begin), static_cast<std::int32_t>(span.end), piece};
    for (Level& level : levels_) {
      const std::int64_t last = (span.end - 1) / level.width;
      for (std::int64_t i = span.begin / level.width; i <= last; ++i) {
        auto& slice = level.slices[i];
        slice.insert(std::upper_bound(slice.begin(), slice.end(), lows[piece], below), taken);
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
      met[count] = taken.piece;
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

class Packer {
 public:
  Packer(std::int32_t pieces, const std::int64_t* blocks, const Spans* spans)
      : blocks_(blocks, blocks + pieces),
        spans_(spans, spans + pieces),
        lows_(pieces),
        taken_(pieces, last(spans_)) {}

  // Gives each piece an address, in this order; returns the bytes taken.
  std::int64_t pack(const std::vector<std::int32_t>& order) {
    taken_.clear();
    std::int64_t top = 0;
    for (const std::int32_t piece : order) {
      lows_[piece] = smallest_gap(piece);
      for (const Span& span : spans_[piece]) {
        if (!span.empty()) taken_.add(piece, span, lows_);
      }
      top = std::max(top, high(piece));
    }
    return top;
  }

  const std::vector<std::int64_t>& addresses() const { return lows_; }
  std::int64_t high(std::int32_t piece) const { return lows_[piece] + blocks_[piece]; }

 private:
  static std::int64_t last(const std::vector<Spans>& spans) {
    std::int64_t end = 0;
    for (const Spans& both : spans) end = std::max({end, both[0].end, both[1].end});
    return end;
  }

  // The placed ones that are there at the same time as `piece`, by address, some of them twice.
  void meet(std::int32_t piece) {
    met_.clear();
    std::ptrdiff_t first = 0;
    for (const Span& span : spans_[piece]) {
      if (!span.empty()) taken_.meet(span, met_);
      if (first == 0) first = std::ssize(met_);
    }
    const auto by_low = [&](std::int32_t a, std::int32_t b) { return lows_[a] < lows_[b]; };
    std::inplace_merge(met_.begin(), met_.begin() + first, met_.end(), by_low);
  }

  std::int64_t smallest_gap(std::int32_t piece) {
    meet(piece);
    const std::int64_t block = blocks_[piece];
    std::int64_t top = 0, best = -1, best_gap = INT64_MAX;
    for (const std::int32_t other : met_) {
      const std::int64_t gap = lows_[other] - top;
      if (gap >= block && gap < best_gap) {
        best = top;
        best_gap = gap;
      }
      top = std::max(top, high(other));
    }
    return best < 0 ? top : best;
  }

  std::vector<std::int64_t> blocks_;
  std::vector<Spans> spans_;
  std::vector<std::int64_t> lows_;
  Slices taken_;
  std::vector<std::int32_t> met_;
};

}  // namespace

extern "C" {

// `spans`: begin and end of two spans for each piece, the second one empty if there is none. `order` is the
// first to be tried, and receives the one that packed best; so do `addresses`. Returns the bytes that it
// takes, and in `tried` how many orders were tried: the first and at most `rounds` more.
std::int64_t disco_place(std::int32_t pieces, const std::int64_t* blocks, const std::int64_t* spans,
                         std::int64_t limit, std::int32_t rounds, std::int32_t* order,
                         std::int64_t* addresses, std::int32_t* tried) {
  static_assert(sizeof(Spans) == 4 * sizeof(std::int64_t));
  Packer packer(pieces, blocks, reinterpret_cast<const Spans*>(spans));
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
