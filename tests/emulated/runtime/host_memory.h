// Host memory that CUDA knows: what is pinned, and what queued copies still read or write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace emulated {

class HostMemory {
 public:
  // A queued copy's use of host memory, as long as it lives.
  using Use = std::shared_ptr<void>;

  bool pin(void* begin, std::size_t bytes);          // false when part of it is pinned already
  std::size_t unpin(void* begin, const char* call);  // its bytes; 0 when nothing was pinned there
  bool pinned(const void* begin, std::size_t bytes) const;
  std::size_t pinned_bytes() const;
  // Of what is pinned, some and not all lies in one registered range: the driver copies no such bytes.
  bool partly_pinned(const void* begin, std::size_t bytes) const;
  Use use(const void* begin, std::size_t bytes, bool written);
  bool used(const void* begin, std::size_t bytes) const;
  bool being_written(const void* begin, std::size_t bytes) const;

 private:
  struct Pending {
    const char* begin;
    const char* end;
    bool written;
  };
  bool pending(const void* begin, std::size_t bytes, bool only_written) const;

  mutable std::mutex mutex_;
  std::map<const char*, std::size_t> pinned_;
  std::map<std::uint64_t, Pending> pending_;
  std::uint64_t uses_ = 0;
};

HostMemory& host_memory();

}  // namespace emulated
