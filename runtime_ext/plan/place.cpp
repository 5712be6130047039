// Addresses for the planner: the loop of disco_accel/plan/place.py, which says what it does and why, as a
// library without PyTorch. Both give the same addresses for the same pieces.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kUnplaced = -1;
constexpr std::int64_t kShares = 4;
// To sort a neighbor takes as long as to pass so many placed pieces by.
constexpr std::ptrdiff_t kSortedPerNeighbor = 8;

struct Span {
  std::int64_t begin;
  std::int64_t end;
  std::int32_t piece;
};

// For each piece those that are there at the same time as it is, some of them twice.
class Neighbors {
 public:
  explicit Neighbors(std::size_t pieces, std::vector<Span> spans) : first_(pieces + 1) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    visit(spans, [&](std::int32_t a, std::int32_t b) { ++first_[a + 1], ++first_[b + 1]; });
    for (std::size_t i = 0; i < pieces; ++i) first_[i + 1] += first_[i];
    all_.resize(first_.back());
    std::vector<std::int64_t> next(first_.begin(), first_.end() - 1);
    visit(spans, [&](std::int32_t a, std::int32_t b) { all_[next[a]++] = b, all_[next[b]++] = a; });
  }

  const std::int32_t* begin(std::int32_t piece) const { return all_.data() + first_[piece]; }
  const std::int32_t* end(std::int32_t piece) const { return all_.data() + first_[piece + 1]; }

 private:
  template <typename Pair>
  static void visit(const std::vector<Span>& spans, Pair pair) {
    std::vector<Span> active;
    for (const Span& span : spans) {
      if (span.begin >= span.end) continue;
      std::size_t kept = 0;
      for (const Span& other : active) {
        if (other.end <= span.begin) continue;
        active[kept++] = other;
        if (other.piece != span.piece) pair(other.piece, span.piece);
      }
      active.resize(kept);
      active.push_back(span);
    }
  }

  std::vector<std::int64_t> first_;
  std::vector<std::int32_t> all_;
};

class Packer {
 public:
  Packer(std::int32_t pieces, const std::int64_t* blocks, std::vector<Span> spans)
      : blocks_(blocks, blocks + pieces),
        neighbors_(pieces, std::move(spans)),
        lows_(pieces),
        turns_(pieces) {}

  // Gives each piece an address, in this order; returns the bytes taken.
  std::int64_t pack(const std::vector<std::int32_t>& order) {
    std::fill(lows_.begin(), lows_.end(), kUnplaced);
    placed_.clear();
    std::int64_t top = 0;
    for (const std::int32_t piece : order) {
      const std::int64_t low = smallest_gap(piece);
      const auto below = [&](std::int64_t value, std::int32_t other) { return value < lows_[other]; };
      placed_.insert(std::upper_bound(placed_.begin(), placed_.end(), low, below), piece);
      lows_[piece] = low;
      top = std::max(top, high(piece));
    }
    return top;
  }

  const std::vector<std::int64_t>& addresses() const { return lows_; }
  std::int64_t high(std::int32_t piece) const { return lows_[piece] + blocks_[piece]; }

 private:
  // The placed ones among the neighbors of `piece`, by address.
  void meet(std::int32_t piece) {
    met_.clear();
    const std::int32_t *first = neighbors_.begin(piece), *last = neighbors_.end(piece);
    if ((last - first) * kSortedPerNeighbor < static_cast<std::ptrdiff_t>(placed_.size())) {
      std::copy_if(first, last, std::back_inserter(met_),
                   [&](std::int32_t i) { return lows_[i] != kUnplaced; });
      std::sort(met_.begin(), met_.end(),
                [&](std::int32_t a, std::int32_t b) { return lows_[a] < lows_[b]; });
    } else {
      ++turn_;
      for (const std::int32_t* other = first; other != last; ++other) turns_[*other] = turn_;
      std::copy_if(placed_.begin(), placed_.end(), std::back_inserter(met_),
                   [&](std::int32_t i) { return turns_[i] == turn_; });
    }
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
  Neighbors neighbors_;
  std::vector<std::int64_t> lows_;
  std::vector<std::int32_t> placed_;  // by address
  std::vector<std::int32_t> met_;
  std::vector<std::int64_t> turns_;  // which turn marked a piece last
  std::int64_t turn_ = 0;
};

}  // namespace

extern "C" {

// `spans`: begin and end of two spans for each piece, the second one empty if there is none. `order` is the
// first to be tried, and receives the one that packed best; so do `addresses`. Returns the bytes that it
// takes, and in `tried` how many orders were tried: the first and at most `rounds` more.
std::int64_t disco_place(std::int32_t pieces, const std::int64_t* blocks, const std::int64_t* spans,
                         std::int64_t limit, std::int32_t rounds, std::int32_t* order,
                         std::int64_t* addresses, std::int32_t* tried) {
  std::vector<Span> all;
  for (std::int32_t i = 0; i < pieces; ++i) {
    for (int k = 0; k < 2; ++k) all.push_back({spans[4 * i + 2 * k], spans[4 * i + 2 * k + 1], i});
  }
  Packer packer(pieces, blocks, std::move(all));
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
