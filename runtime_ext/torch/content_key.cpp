#include "content_key.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace disco {
namespace {

using Key = std::array<std::uint64_t, 2>;

struct Block {
  const std::byte* data;
  std::size_t nbytes;
};

constexpr std::size_t kBlock = 1 << 20;
constexpr std::size_t kAlone = 2 << 20;  // read before threads have started
constexpr std::size_t kMostThreads = 16;
constexpr std::size_t kLanes = 4;
constexpr std::size_t kRow = kLanes * 16;

// Half of their bits set, odd; for the states that lanes begin with, and the end.
constexpr Key kSecret = {0x2d358dccaa6c78a5ULL, 0x8bb84b93962eacc9ULL};

// One step of a state of 128 bits over 128 bits of content. Both halves of the product are kept, and each
// factor beside it, so that nothing is forgotten where the other is zero.
void step(Key& state, std::uint64_t first, std::uint64_t second) noexcept {
  const std::uint64_t a = first ^ state[0], b = second ^ state[1];
  const auto product = static_cast<unsigned __int128>(a) * b;
  state[0] = static_cast<std::uint64_t>(product) ^ std::rotl(b, 32);
  state[1] = static_cast<std::uint64_t>(product >> 64) + std::rotl(a, 29);
}

void read_row(std::array<Key, kLanes>& lanes, const std::byte* at) noexcept {
  std::array<std::uint64_t, 2 * kLanes> words;
  std::memcpy(words.data(), at, kRow);
  for (std::size_t lane = 0; lane < kLanes; ++lane) step(lanes[lane], words[2 * lane], words[2 * lane + 1]);
}

Key key_of(const std::byte* data, std::size_t nbytes) noexcept {
  std::array<Key, kLanes> lanes;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = {kSecret[0] * (2 * lane + 1), kSecret[1] * (2 * lane + 1)};
  }
  std::size_t left = nbytes;
  for (; left >= kRow; left -= kRow, data += kRow) read_row(lanes, data);
  if (left > 0) {
    std::array<std::byte, kRow> last{};
    std::memcpy(last.data(), data, left);
    read_row(lanes, last.data());
  }
  Key key = {kSecret[0] ^ nbytes, kSecret[1]};
  for (const Key& lane : lanes) step(key, lane[0], lane[1]);
  // So that each bit of the key depends on each of the last lane's.
  for (int round = 0; round < 3; ++round) step(key, kSecret[0], kSecret[1]);
  return key;
}

std::vector<Block> blocks_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Block> blocks;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu()) throw std::invalid_argument("only tensors on the CPU have a content key");
    if (!tensor.is_non_overlapping_and_dense())
      throw std::invalid_argument("a tensor with holes has no content key");
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    for (std::size_t begin = 0; begin < tensor.nbytes(); begin += kBlock) {
      blocks.push_back({data + begin, std::min(kBlock, tensor.nbytes() - begin)});
    }
  }
  return blocks;
}

}  // namespace

std::vector<std::int64_t> content_key(const std::vector<at::Tensor>& tensors) {
  const std::vector<Block> blocks = blocks_of(tensors);
  std::vector<Key> keys(blocks.size());
  std::atomic<std::size_t> next = 0;
  const auto read = [&] {
    for (std::size_t i = next++; i < blocks.size(); i = next++)
      keys[i] = key_of(blocks[i].data, blocks[i].nbytes);
  };
  std::size_t total = 0;
  for (const Block& block : blocks) total += block.nbytes;
  const std::size_t helpers =
      total <= kAlone ? 0 : std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMostThreads) - 1;
  std::vector<std::thread> threads;
  threads.reserve(helpers);
  try {
    while (threads.size() < helpers) threads.emplace_back(read);
  } catch (const std::system_error&) {
    // Without another thread to be had this one reads the rest.
  }
  read();
  for (std::thread& thread : threads) thread.join();
  const Key key = key_of(reinterpret_cast<const std::byte*>(keys.data()), keys.size() * sizeof(Key));
  return {static_cast<std::int64_t>(key[0]), static_cast<std::int64_t>(key[1])};
}

TORCH_LIBRARY_FRAGMENT(disco_accel, m) { m.def("content_key", &content_key); }

}  // namespace disco
