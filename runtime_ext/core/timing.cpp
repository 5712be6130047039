#include "timing.h"

#include <sys/prctl.h>
#include <time.h>

#include <cerrno>

namespace disco {

void sleep_until_ns(std::int64_t deadline) {
  timespec until{};
  until.tv_sec = deadline / 1'000'000'000;
  until.tv_nsec = deadline % 1'000'000'000;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

void want_exact_timers() { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

}  // namespace disco
