#include "content_hash.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace disco {
namespace {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kRow = kLanes * sizeof(std::uint64_t);
constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15ULL;
constexpr std::size_t kBlock = 1 << 20;
// So much is read before a thread has started.
constexpr std::size_t kAlone = 2 << 20;
// Eight read all that the memory of a machine with a GPU gives; more would only take cores from the step.
constexpr std::size_t kMostThreads = 8;

// For any `lane` a bijection of `word`, and the other way round.
std::uint64_t mixed(std::uint64_t lane, std::uint64_t word) noexcept {
  return std::rotl((lane ^ word) * kPrime, 29);
}

}  // namespace

std::uint64_t content_hash(const void* data, std::size_t nbytes, std::uint64_t seed) noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  std::array<std::uint64_t, kLanes> lanes{};
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = seed + i * kPrime;
  std::array<std::uint64_t, kLanes> words{};
  std::size_t left = nbytes;
  for (; left >= kRow; left -= kRow, at += kRow) {
    std::memcpy(words.data(), at, kRow);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
  }
  if (left > 0) {
    words.fill(0);
    std::memcpy(words.data(), at, left);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
  }
  std::uint64_t hash = nbytes;
  for (const std::uint64_t lane : lanes) hash = mixed(hash, lane);
  return hash;
}

SpansHash::SpansHash(const std::vector<Span>& spans) : process_(getpid()) {
  std::size_t total = 0;
  for (const auto& [data, nbytes] : spans) {
    total += nbytes;
    for (std::size_t begin = 0; begin < nbytes; begin += kBlock) {
      blocks_.emplace_back(data + begin, std::min(kBlock, nbytes - begin));
    }
  }
  hashes_.resize(blocks_.size());
  if (total <= kAlone) {
    read();
    return;
  }
  const std::size_t count = std::clamp<std::size_t>(std::thread::hardware_concurrency() / 4, 1, kMostThreads);
  threads_.reserve(count);
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { read(); });
  } catch (const std::system_error&) {
    // Without another thread to be had the rest is read by finish().
    if (threads_.empty()) read();
  }
}

SpansHash::~SpansHash() { join(); }

void SpansHash::read() noexcept {
  for (std::size_t i = next_++; i < blocks_.size(); i = next_++) {
    hashes_[i] = content_hash(blocks_[i].first, blocks_[i].second);
  }
}

void SpansHash::join() noexcept {
  for (std::thread& thread : threads_) {
    // In a child there is nothing to wait for.
    process_ == getpid() ? thread.join() : thread.detach();
  }
  threads_.clear();
}

std::uint64_t SpansHash::finish() {
  if (process_ != getpid()) throw std::runtime_error("this process was forked while tensors were read");
  read();
  join();
  return content_hash(hashes_.data(), hashes_.size() * sizeof(std::uint64_t));
}

}  // namespace disco
