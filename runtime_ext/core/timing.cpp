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

void Sleeper::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  wakes_.notify_one();
}

// Being woken takes a thread tens of microseconds and whoever wakes it about ten, so it is awake by itself
// when something is due, and spins for a moment.
void Sleeper::doze(std::int64_t deadline_ns, std::int64_t due_ns) {
  if (due_ns < deadline_ns) {
    const std::int64_t timer = alarm_.before(due_ns);
    if (now_ns() < timer) {
      sleep_to(timer);
      if (!woken()) alarm_.woke(due_ns, now_ns());
    }
    spin_until(std::max(now_ns(), due_ns) + kSpinNs, [this] { return woken(); });
  }
  if (!woken()) sleep_to(deadline_ns);
  const std::lock_guard lock(mutex_);
  woken_ = false;
}

void Sleeper::sleep_to(std::int64_t until_ns) {
  std::unique_lock lock(mutex_);
  const auto awake = [this] { return woken(); };
  if (until_ns == kNever) {
    wakes_.wait(lock, awake);
  } else {
    wakes_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until_ns)), awake);
  }
}

int want_exact_timers() {
  const int before = prctl(PR_GET_TIMERSLACK, 0UL, 0UL, 0UL, 0UL);
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  return before;
}

void put_timers_back(int before) {
  if (before > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before), 0UL, 0UL, 0UL);
}

}  // namespace disco
