#include "host_device.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace disco {
namespace {

constexpr std::int64_t kMaxSleepNs = 10'000'000;  // how late cancel() may be noticed by a sleeping lane
constexpr double kChunkSeconds = 0.002;           // how finely a throttled copy is spread over its time
constexpr std::int64_t kMinChunk = 64 << 10;
constexpr std::int64_t kMaxChunk = 4 << 20;

void sleep_until_ns(std::int64_t deadline) {
  timespec until{};
  until.tv_sec = deadline / 1'000'000'000;
  until.tv_nsec = deadline % 1'000'000'000;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

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
  std::int64_t enqueued_ns = 0;
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

}  // namespace

struct HostDevice::Shared {
  int index = 0;
  OpRunner* runner = nullptr;
  ProgressListener* listener = nullptr;
  Span* spans = nullptr;
  std::atomic<int> computing{0};
  std::atomic<bool> failed{false};
  std::atomic<bool> cancelled{false};
  mutable std::mutex failure_mutex;
  DeviceFailure failure;

  bool skip() const {
    return failed.load(std::memory_order_acquire) || cancelled.load(std::memory_order_acquire);
  }

  void fail(std::int32_t vertex, const char* message) {
    const std::lock_guard lock(failure_mutex);
    if (failed.load(std::memory_order_relaxed)) return;
    failure.vertex = vertex;
    failure.message = message;
    failed.store(true, std::memory_order_release);
  }

  void run_op(int stream, std::int32_t vertex, std::int32_t op) {
    if (skip()) return;
    if (spans != nullptr) spans[vertex].start = now_ns();
    computing.fetch_add(1, std::memory_order_relaxed);
    try {
      runner->run(op, index, stream);
    } catch (const std::exception& error) {
      fail(vertex, error.what());
    } catch (...) {
      fail(vertex, "an exception that is not a std::exception");
    }
    computing.fetch_sub(1, std::memory_order_relaxed);
    if (spans != nullptr) spans[vertex].end = now_ns();
  }
};

struct HostDevice::Stream {
  std::mutex mutex;
  std::condition_variable has_items;
  std::condition_variable has_finished;
  ItemQueue items;
  Token enqueued = 0;              // written by the enqueuing thread alone
  std::atomic<Token> finished{0};  // stored under mutex by the stream's thread
  std::int64_t due_ns = 0;         // when the last copy's time on the link is over
  std::thread thread;

  void push(const Item& item) {
    {
      const std::lock_guard lock(mutex);
      items.push(item);
    }
    has_items.notify_one();
  }

  Item pop() {
    std::unique_lock lock(mutex);
    has_items.wait(lock, [this] { return !items.empty(); });
    return items.pop();
  }

  void finish(Token token) {
    {
      const std::lock_guard lock(mutex);
      finished.store(token, std::memory_order_release);
    }
    has_finished.notify_all();
  }

  void wait_for(Token token) {
    std::unique_lock lock(mutex);
    has_finished.wait(lock, [&] { return finished.load(std::memory_order_relaxed) >= token; });
  }
};

namespace {

void validate(const HostDeviceOptions& options) {
  if (options.compute_streams < 1)
    throw std::invalid_argument("host device: compute_streams must be at least 1");
  if (!(options.link_bandwidth >= 0.0))
    throw std::invalid_argument("host device: link_bandwidth must be positive");
  if (!(options.link_latency >= 0.0))
    throw std::invalid_argument("host device: link_latency must not be negative");
}

// The time line of one throttled copy: when byte b must not have arrived yet.
struct Pace {
  std::int64_t start_ns;
  double latency_ns;
  double ns_per_byte;

  std::int64_t due(std::int64_t bytes) const {
    return start_ns + std::llround(latency_ns + ns_per_byte * static_cast<double>(bytes));
  }
};

template <typename Skip>
void copy_paced(const Item& item, const Pace& pace, Skip skip) {
  auto* dst = static_cast<std::byte*>(item.dst);
  const auto* src = static_cast<const std::byte*>(item.src);
  const double per_chunk = pace.ns_per_byte > 0.0 ? kChunkSeconds * 1e9 / pace.ns_per_byte : 1e18;
  const std::int64_t chunk =
      per_chunk < kMaxChunk ? std::max(kMinChunk, static_cast<std::int64_t>(per_chunk)) : kMaxChunk;
  std::int64_t done = 0;
  do {
    const std::int64_t size = std::min(chunk, item.bytes - done);
    if (size > 0) std::memcpy(dst + done, src + done, static_cast<std::size_t>(size));
    done += size;
    const std::int64_t due = pace.due(done);
    for (std::int64_t now = now_ns(); now < due; now = now_ns()) {
      if (skip()) return;
      sleep_until_ns(std::min(due, now + kMaxSleepNs));
    }
  } while (done < item.bytes);
}

}  // namespace

HostDevice::HostDevice(HostDeviceOptions options)
    : options_(std::move(options)),
      inline_(options_.inline_compute && options_.compute_streams == 1),
      shared_(std::make_unique<Shared>()) {
  validate(options_);
  for (int i = 0; i < streams(); ++i) streams_.push_back(std::make_unique<Stream>());
}

HostDevice::~HostDevice() {
  cancel();
  for (auto& stream : streams_) {
    if (stream->thread.joinable()) stream->push(Item{});
  }
  for (auto& stream : streams_) {
    if (stream->thread.joinable()) stream->thread.join();
  }
}

void HostDevice::connect(int index, OpRunner& runner, ProgressListener& listener) {
  shared_->index = index;
  shared_->runner = &runner;
  shared_->listener = &listener;
  for (int i = inline_ ? 1 : 0; i < streams(); ++i) {
    streams_[i]->thread = std::thread([this, i] { serve(i); });
  }
}

void HostDevice::attach_loop_thread() {
  if (inline_ && options_.on_compute_thread) options_.on_compute_thread(0);
}

void HostDevice::serve(int index) {
  Stream& stream = *streams_[index];
  if (index >= compute_streams()) {
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // a paced copy wakes at its time, not 50 us later
  } else if (options_.on_compute_thread) {
    options_.on_compute_thread(index);
  }
  for (;;) {
    const Item item = stream.pop();
    switch (item.task) {
      case Task::kQuit:
        return;
      case Task::kWait:
        streams_[item.other]->wait_for(item.token);
        continue;
      case Task::kOp:
        shared_->run_op(index, item.vertex, item.op);
        break;
      case Task::kCopy:
        if (shared_->skip()) break;
        if (shared_->spans != nullptr) shared_->spans[item.vertex].start = now_ns();
        const double per_byte = options_.link_bandwidth > 0.0 ? 1e9 / options_.link_bandwidth : 0.0;
        const Pace pace{std::max(item.enqueued_ns, stream.due_ns), options_.link_latency * 1e9, per_byte};
        copy_paced(item, pace, [this] { return shared_->skip(); });
        stream.due_ns = shared_->skip() ? 0 : pace.due(item.bytes);
        if (shared_->spans != nullptr) shared_->spans[item.vertex].end = now_ns();
        break;
    }
    stream.finish(item.token);
    shared_->listener->on_progress();
  }
}

bool HostDevice::computing() const { return shared_->computing.load(std::memory_order_relaxed) > 0; }

Token HostDevice::enqueue_op(int stream, std::int32_t vertex, std::int32_t op) {
  Stream& target = *streams_[stream];
  const Token token = ++target.enqueued;
  if (inline_) {
    shared_->run_op(stream, vertex, op);
    target.finished.store(token, std::memory_order_release);
    return token;
  }
  Item item;
  item.task = Task::kOp;
  item.vertex = vertex;
  item.op = op;
  item.token = token;
  target.push(item);
  return token;
}

Token HostDevice::enqueue_copy(int stream, std::int32_t vertex, void* dst, const void* src,
                               std::int64_t bytes) {
  Item item;
  item.task = Task::kCopy;
  item.vertex = vertex;
  item.dst = dst;
  item.src = src;
  item.bytes = bytes;
  item.enqueued_ns = now_ns();
  item.token = ++streams_[stream]->enqueued;
  streams_[stream]->push(item);
  return item.token;
}

void HostDevice::wait(int stream, int other, Token token) {
  if (streams_[other]->finished.load(std::memory_order_acquire) >= token) return;
  if (inline_ && stream == 0) {
    streams_[other]->wait_for(token);
    return;
  }
  Item item;
  item.task = Task::kWait;
  item.other = other;
  item.token = token;
  streams_[stream]->push(item);
}

Token HostDevice::completed(int stream) { return streams_[stream]->finished.load(std::memory_order_acquire); }

bool HostDevice::failed() const { return shared_->failed.load(std::memory_order_acquire); }

DeviceFailure HostDevice::failure() const {
  const std::lock_guard lock(shared_->failure_mutex);
  return shared_->failure;
}

void HostDevice::cancel() { shared_->cancelled.store(true, std::memory_order_release); }

void HostDevice::recover() {
  const std::lock_guard lock(shared_->failure_mutex);
  shared_->failure = {};
  shared_->failed.store(false, std::memory_order_release);
  shared_->cancelled.store(false, std::memory_order_release);
}

void HostDevice::trace(Span* spans, std::int32_t) { shared_->spans = spans; }

}  // namespace disco
