// Timing: waking at a known moment. Sleeping is cheap but wakes tens of microseconds late; spinning is exact
// but takes a core.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "device.h"

namespace disco {

// Longest spin at the end of a wait.
constexpr std::int64_t kSpinNs = 20'000;
constexpr std::int64_t kNever = INT64_MAX;

// Sleeps until the clock of now_ns() shows `deadline`, or up to the machine's wake-up delay later.
void sleep_until_ns(std::int64_t deadline);
// Timers of the calling thread go off within 1 us of their time instead of within 50. Returns what it was
// before, for put_timers_back().
int want_exact_timers();
void put_timers_back(int before);

// Tells the core that this thread polls.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls `done` until it holds or the clock shows `deadline`; returns whether it held. The thread keeps its
// core: were it offered to a kernel between two polls, Linux would leave it there for the rest of a tick, up
// to 4 ms, where a wait is some 10 us. Steps behind a link of 0.2 GB/s took 3 % longer by that.
template <typename Done>
bool spin_until(std::int64_t deadline, Done done) {
  for (;;) {
    if (done()) return true;
    if (now_ns() >= deadline) return false;
    relax();
  }
}

// Learns how long before a moment a sleep must end so that the thread is awake at that moment and has not
// spun for long.
class Alarm {
 public:
  // The time to set a timer to, for being awake at `due`.
  std::int64_t before(std::int64_t due) const { return due - lead_ns_; }
  std::int64_t lead_ns() const { return lead_ns_; }
  // A timer set to before(due) woke the thread at `now`.
  void woke(std::int64_t due, std::int64_t now) {
    const std::int64_t early = due - now;
    lead_ns_ += early < 0 ? std::min(-early, kSpinNs) / 2 : (kWantedNs - early) / 8;
    lead_ns_ = std::clamp(lead_ns_, std::int64_t{0}, kMaxLeadNs);
  }

 private:
  static constexpr std::int64_t kWantedNs = 8'000;
  static constexpr std::int64_t kMaxLeadNs = 120'000;
  std::int64_t lead_ns_ = 50'000;
};

// Where one thread sleeps until another wakes it, or until a moment. One wake() ends one doze(), also if it
// comes first.
class Sleeper {
 public:
  void wake();
  // Until wake() or `deadline_ns`. `due_ns`: when wake() is expected; kNever if nobody knows.
  void doze(std::int64_t deadline_ns, std::int64_t due_ns);

 private:
  void sleep_to(std::int64_t until_ns);
  bool woken() const { return woken_.load(std::memory_order_acquire); }

  std::mutex mutex_;
  std::condition_variable wakes_;
  std::atomic<bool> woken_{false};  // set under mutex_
  Alarm alarm_;
};

}  // namespace disco
