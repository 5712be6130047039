// Hashes of memory that read every byte.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace disco {

// A change of one 8-byte word always changes the hash, any other change but for one chance in 2^64 or so. Not
// meant against who wants it to collide. As fast as memory is read.
std::uint64_t content_hash(const void* data, std::size_t nbytes, std::uint64_t seed = 0) noexcept;

using Span = std::pair<const std::byte*, std::size_t>;

// One hash of all spans in their order, made by threads of its own if there is much to read.
class SpansHash {
 public:
  // Begins to read. The spans must stay until finish() or the destructor has returned.
  explicit SpansHash(const std::vector<Span>& spans);
  ~SpansHash();
  SpansHash(const SpansHash&) = delete;
  SpansHash& operator=(const SpansHash&) = delete;

  // Whether finish() has nothing to wait for or to read.
  bool done() const { return threads_.empty(); }
  // Reads along, waits for the threads and returns the hash. Throws std::runtime_error in a process that was
  // forked meanwhile, where the threads do not exist.
  std::uint64_t finish();

 private:
  void read() noexcept;
  void join() noexcept;

  std::vector<Span> blocks_;
  std::vector<std::uint64_t> hashes_;
  std::atomic<std::size_t> next_ = 0;
  std::vector<std::thread> threads_;
  pid_t process_;
};

}  // namespace disco
