#include "calls.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "channel.h"

namespace disco::interpose {
namespace {

constexpr std::int64_t kFirstNap = 2'000'000, kLongestNap = 50'000'000;  // nanoseconds

pthread_mutex_t sampling = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) void start() {
  // Only the child's: a parent that samples is in CUDA, where the handlers of a fork would have to wait for
  // it.
  pthread_atfork(nullptr, nullptr, [] { pthread_mutex_init(&sampling, nullptr); });
}

}  // namespace

constinit thread_local Outermost* Scope::current = nullptr;

Sampling::Sampling() { pthread_mutex_lock(&sampling); }
Sampling::~Sampling() { pthread_mutex_unlock(&sampling); }

std::int64_t clock_now() { return now(); }

bool wait_a_little(std::int64_t started, std::int64_t longest, int turn) {
  const std::int64_t left = started + longest - now();
  if (left <= 0 || !store_listens()) return false;
  const std::int64_t nap = std::min({left, kLongestNap, kFirstNap << std::min(turn, 10)});
  const timespec time{nap / 1'000'000'000, nap % 1'000'000'000};
  const int before = errno;
  int cancel = 0;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
  nanosleep(&time, nullptr);
  pthread_setcancelstate(cancel, nullptr);
  errno = before;
  return true;
}

std::uint64_t array_bytes(std::uint64_t texel, std::uint64_t width, std::uint64_t height, std::uint64_t depth,
                          unsigned levels) {
  std::uint64_t bytes = 0;
  for (unsigned level = 0; level < std::min(std::max(levels, 1u), 64u); ++level) {
    bytes += texel * std::max<std::uint64_t>(width >> level, 1) *
             std::max<std::uint64_t>(height >> level, 1) * std::max<std::uint64_t>(depth >> level, 1);
    if ((width >> level | height >> level | depth >> level) <= 1) break;
  }
  return bytes;
}

}  // namespace disco::interpose
