// One call of CUDA, from its claim to its entry. A runtime calls the driver: the outermost call counts, one
// within it may wait for memory and does nothing else.
#pragma once
#include <cerrno>
#include <cstdint>

#include "account.h"
#include "devices.h"
#include "library.h"

namespace disco::interpose {

inline constexpr int kSuccess = 0;
inline constexpr int kOutOfMemory = 2;     // in both layers
inline constexpr int kMissing = 302;       // "a link to a shared object failed to resolve", in both layers
inline constexpr int kDeviceLocation = 1;  // CU_MEM_LOCATION_TYPE_DEVICE, cudaMemLocationTypeDevice
inline constexpr int kReservedNow = 5, kUsedNow = 7;  // attributes of a pool, in both layers
inline constexpr unsigned kUnbacked = 0x40 | 0x80;    // arrays that are sparse, or whose mapping is deferred
inline constexpr int kMostDropped = 64;

// The part of cudaMemPoolProps and CUmemPoolProps that is read here.
struct PoolProps {
  int type, handle_types, location_type, location;
};

struct Outermost {
  Claim claim;
  bool may_wait = false;
  bool waited = false;
};

// A call that is on its way in this thread.
class Scope {
 public:
  Scope() : before_(current) {
    if (before_ == nullptr) current = &own_;
  }
  ~Scope() { current = before_; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  bool outermost() const { return before_ == nullptr; }
  static Outermost& call() { return *current; }

 private:
  static constinit thread_local Outermost* current __attribute__((tls_model("initial-exec")));
  Outermost own_;
  Outermost* before_;
};

// Sleep a little longer than the last time; false: the time is over, or the store is.
bool wait_a_little(std::int64_t started, std::int64_t longest, int turn);
std::int64_t clock_now();

// `call`, made again while it fails for want of memory and the store may still make room.
template <typename Call>
int patiently(Call call) {
  int code = call();
  Outermost& outermost = Scope::call();
  if (code != kOutOfMemory || !outermost.may_wait || outermost.waited) return code;
  outermost.waited = true;
  const std::int64_t longest = patience(outermost.claim), started = clock_now();
  if (longest == 0) return code;
  for (int turn = 0; code == kOutOfMemory && wait_a_little(started, longest, turn); ++turn) code = call();
  if (code == kOutOfMemory) waited_in_vain(outermost.claim);
  return code;
}

// What an array of these texels takes: the driver's padding is not known.
std::uint64_t array_bytes(std::uint64_t texel, std::uint64_t width, std::uint64_t height, std::uint64_t depth,
                          unsigned levels);

inline std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// `free` gives back what `key` stands for, once it is out of the table.
template <typename Free>
int release(Kind kind, std::uint64_t key, Free free, Entry* entry) {
  *entry = {};
  const bool known = key != 0 && take(kind, key, entry);
  const int code = free();
  if (!known) return code;
  if (code == kSuccess) {
    freed(*entry);
  } else {
    put_back(*entry);
  }
  return code;
}

// Samples of pools come in the order in which they were taken.
class Sampling {
 public:
  Sampling();
  ~Sampling();
  Sampling(const Sampling&) = delete;
  Sampling& operator=(const Sampling&) = delete;
};

}  // namespace disco::interpose
