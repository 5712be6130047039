// HostStream: the queue between the engine and one thread of a HostDevice.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"
#include "timing.h"

namespace disco {

enum class Task : std::uint8_t { kOp, kCopy, kWait, kQuit };

struct Item {
  Task task = Task::kQuit;
  std::int32_t vertex = -1;
  std::int32_t op = -1;
  int other = -1;   // kWait: stream waited for
  Token token = 0;  // kWait: of `other`; else of this item
  void* dst = nullptr;
  const void* src = nullptr;
  std::int64_t bytes = 0;
  bool first = true;  // kCopy: of the pieces of its vertex
  bool last = true;
  std::int64_t start_ns = 0;  // kCopy: when the link begins with it
  std::int64_t due_ns = 0;    // kCopy: when its time on the link is over; equal to start_ns if not throttled
};

// First in, first out, on one buffer that grows only when it is full.
class ItemQueue {
 public:
  ItemQueue() : items_(16) {}
  bool empty() const { return count_ == 0; }
  void push(const Item& item) {
    if (count_ == items_.size()) grow();
    items_[(head_ + count_++) % items_.size()] = item;
  }
  Item pop() {
    const Item item = items_[head_];
    head_ = (head_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  void grow() {
    std::rotate(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_), items_.end());
    head_ = 0;
    items_.resize(items_.size() * 2);
  }

  std::vector<Item> items_;
  std::size_t head_ = 0;
  std::size_t count_ = 0;
};

struct HostStream {
  Token enqueued = 0;       // written by the enqueuing thread alone
  std::int64_t due_ns = 0;  // likewise: when the link is free again
  std::int64_t end_ns =
      0;  // likewise: when the copy should end that was enqueued last, with its pieces to come
  // Stored under mutex by the stream's thread; by the enqueuing thread if the stream is idle, so that nobody
  // can be waiting for the token.
  std::atomic<Token> finished{0};
  Alarm alarm;  // of the stream's thread
  std::thread thread;

  // Waking a sleeping thread costs the waker 5 to 15 us. What is pushed while the stream's thread spins or
  // naps (see pop) costs nothing.
  void push(const Item& item) {
    {
      const std::lock_guard lock(mutex_);
      items_.push(item);
      pushed_.store(true, std::memory_order_release);
    }
    has_items_.notify_one();
  }

  // The next item. A thread that has just been busy (`warm`) first spins, then naps, at last sleeps. A copy's
  // time on the link starts when it is pushed, so a nap shorter than the copy makes nothing late.
  Item pop(bool warm) {
    const auto pushed = [this] { return pushed_.load(std::memory_order_acquire); };
    if (warm && !pushed() && !spin_until(now_ns() + kSpinNs, pushed)) {
      const std::int64_t nap = std::min(usual_copy_ns_ - alarm.lead_ns(), kMaxNapNs);
      for (int i = 0; i < kNaps && nap >= kMinNapNs && !pushed(); ++i) sleep_until_ns(now_ns() + nap);
    }
    std::unique_lock lock(mutex_);
    has_items_.wait(lock, [this] { return !items_.empty(); });
    const Item item = items_.pop();
    pushed_.store(!items_.empty(), std::memory_order_relaxed);
    return item;
  }

  // Called by the stream's thread with the time on the link of each copy.
  void note_copy(std::int64_t ns) {
    usual_copy_ns_ = std::min(ns, usual_copy_ns_ + (ns - usual_copy_ns_) / 8);
  }

  void finish(Token token) {
    {
      const std::lock_guard lock(mutex_);
      finished.store(token, std::memory_order_release);
    }
    has_finished_.notify_all();
  }

  void wait_for(Token token) {
    const auto done = [&] { return finished.load(std::memory_order_acquire) >= token; };
    if (spin_until(now_ns() + kSpinNs, done)) return;
    std::unique_lock lock(mutex_);
    has_finished_.wait(lock, done);
  }

 private:
  static constexpr int kNaps = 5;
  static constexpr std::int64_t kMaxNapNs = 250'000;
  static constexpr std::int64_t kMinNapNs = 5'000;

  std::int64_t usual_copy_ns_ = 0;  // rather less: it follows a shorter copy at once
  std::mutex mutex_;
  std::condition_variable has_items_;
  std::condition_variable has_finished_;
  ItemQueue items_;
  std::atomic<bool> pushed_{false};  // !items_.empty(), readable without the lock
};

}  // namespace disco
