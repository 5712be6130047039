#pragma once

#include <cstddef>
#include <cstdint>

namespace disco {

// A small, fast, seedable generator (splitmix64).
class Random {
 public:
  void seed(std::uint64_t value) { state_ = value; }
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // uniform in [0, 1)

 private:
  std::uint64_t state_ = 0;
};

}  // namespace disco
