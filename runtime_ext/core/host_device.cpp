#include "host_device.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "host_stream.h"
#include "random.h"
#include "scope.h"

namespace disco {
namespace {

constexpr std::int64_t kMaxSleepNs = 10'000'000;  // how late cancel() may be noticed by a sleeping lane
constexpr double kChunkNs = 2e6;                  // how finely a throttled copy is spread over its time
constexpr std::int64_t kMaxChunk = 4 << 20;

}  // namespace

struct HostDevice::Shared {
  int index = 0;
  OpRunner* runner = nullptr;
  ProgressListener* listener = nullptr;
  Span* spans = nullptr;
  std::atomic<int> computing{0};
  std::atomic<std::int64_t> ops_run{0};
  std::vector<std::uint8_t>
      ran;  // by vertex; the thread that runs it writes, before it says that it has finished
  std::atomic<bool> failed{false};
  std::atomic<bool> cancelled{false};
  mutable std::mutex failure_mutex;
  DeviceFailure failure;

  bool skip() const {
    return failed.load(std::memory_order_acquire) || cancelled.load(std::memory_order_acquire);
  }

  void fail(std::int32_t vertex, std::string message) noexcept {
    const std::lock_guard lock(failure_mutex);
    if (failed.load(std::memory_order_relaxed)) return;
    failure.vertex = vertex;
    failure.message = std::move(message);
    failed.store(true, std::memory_order_release);
  }

  void note_ran(std::int32_t vertex) {
    if (static_cast<std::size_t>(vertex) < ran.size()) ran[vertex] = 1;
  }

  void copy_here(const Copy& copy) {
    if (skip()) return;
    if (spans != nullptr && copy.first()) spans[copy.vertex].start = now_ns();
    // A copy of nothing may have no address.
    if (copy.bytes > 0) std::memcpy(copy.dst, copy.src, static_cast<std::size_t>(copy.bytes));
    if (copy.last()) end_copy(copy.vertex);
  }

  void end_copy(std::int32_t vertex) {
    note_ran(vertex);
    if (spans != nullptr) spans[vertex].end = now_ns();
  }

  void run_op(int stream, std::int32_t vertex, std::int32_t op) {
    if (skip()) return;
    if (spans != nullptr) spans[vertex].start = now_ns();
    computing.fetch_add(1, std::memory_order_relaxed);
    const Finally computed([&] {
      computing.fetch_sub(1, std::memory_order_relaxed);
      if (spans != nullptr) spans[vertex].end = now_ns();
    });
    try {
      runner->run(op, index, stream);
      ops_run.fetch_add(1, std::memory_order_relaxed);
      note_ran(vertex);
    } catch (const std::exception& error) {
      fail(vertex, what_of(error));
    } catch (...) {
      fail(vertex, copied("an exception that is not a std::exception"));
    }
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
  if (!(options.link_jitter >= 0.0 && options.link_jitter < 1.0))
    throw std::invalid_argument("host device: link_jitter must be at least 0 and less than 1");
}

// Sleeps until `due`, in pieces, so that `skip` is noticed. Returns whether to go on.
template <typename Skip>
bool sleep_through(std::int64_t due, Skip skip) {
  for (std::int64_t now = now_ns(); now < due && !skip(); now = now_ns()) {
    sleep_until_ns(std::min(due, now + kMaxSleepNs));
  }
  return !skip();
}

}  // namespace

HostDevice::HostDevice(HostDeviceOptions options)
    : options_(std::move(options)),
      inline_(options_.inline_compute && options_.compute_streams == 1),
      shared_(std::make_unique<Shared>()) {
  validate(options_);
  for (int i = 0; i < streams(); ++i) streams_.push_back(std::make_unique<HostStream>());
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
  HostStream& stream = *streams_[index];
  if (index >= compute_streams()) {
    want_exact_timers();
  } else if (options_.on_compute_thread) {
    options_.on_compute_thread(index);
  }
  for (bool warm = false;; warm = true) {
    const Item item = stream.pop(warm);
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
        run_copy(stream, item);
        break;
    }
    stream.finish(item.token);
    shared_->listener->on_progress();
  }
}

// Copies in chunks spread over the copy's time on the link; only the end has to be exact.
void HostDevice::run_copy(HostStream& stream, const Item& item) {
  if (options_.before_copy) options_.before_copy(item.vertex);
  const auto skip = [this] { return shared_->skip(); };
  if (skip()) return;
  if (shared_->spans != nullptr && item.first) shared_->spans[item.vertex].start = now_ns();
  auto* dst = static_cast<std::byte*>(item.dst);
  const auto* src = static_cast<const std::byte*>(item.src);
  stream.note_copy(item.due_ns - item.start_ns);
  const double ns = static_cast<double>(item.due_ns - item.start_ns);
  const double chunks = std::max(1.0, ns / kChunkNs);
  const auto chunk =
      std::min(static_cast<std::int64_t>(static_cast<double>(item.bytes) / chunks) + 1, kMaxChunk);
  for (std::int64_t done = 0; done < item.bytes;) {
    if (done > 0) {
      const double share = static_cast<double>(done) / static_cast<double>(item.bytes);
      if (!sleep_through(item.start_ns + std::llround(ns * share), skip)) return;
    }
    const std::int64_t size = std::min(chunk, item.bytes - done);
    std::memcpy(dst + done, src + done, static_cast<std::size_t>(size));
    done += size;
  }
  const std::int64_t timer = stream.alarm.before(item.due_ns);
  if (now_ns() < timer) {
    if (!sleep_through(timer, skip)) return;
    stream.alarm.woke(item.due_ns, now_ns());
  }
  spin_until(item.due_ns, skip);
  if (item.last) shared_->end_copy(item.vertex);
}

bool HostDevice::small(std::int64_t bytes) const {
  return options_.small_copy > 0 && bytes <= options_.small_copy && options_.link_bandwidth == 0.0 &&
         options_.link_latency == 0.0 && !options_.before_copy;
}

// Time on the link of `bytes` of a copy, or of a piece: what they are late by at random is the same for all
// pieces.
double HostDevice::copy_ns(const Copy& copy, std::int64_t bytes) const {
  double ns = copy.first() ? options_.link_latency * 1e9 : 0.0;
  if (options_.link_bandwidth > 0.0) ns += static_cast<double>(bytes) / options_.link_bandwidth * 1e9;
  if (options_.link_jitter == 0.0) return ns;
  Random random;
  random.seed(options_.link_jitter_seed ^ (step_ << 32) ^ static_cast<std::uint32_t>(copy.vertex));
  random.seed(random.next());
  return ns * (1.0 + options_.link_jitter * (2.0 * random.unit() - 1.0));
}

bool HostDevice::computing() const { return shared_->computing.load(std::memory_order_relaxed) > 0; }

Token HostDevice::enqueue_op(int stream, std::int32_t vertex, std::int32_t op) {
  HostStream& target = *streams_[stream];
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

Token HostDevice::enqueue_copy(int stream, const Copy& copy) {
  HostStream& target = *streams_[stream];
  if (small(copy.bytes) && target.finished.load(std::memory_order_acquire) == target.enqueued) {
    const Token token = ++target.enqueued;
    shared_->copy_here(copy);
    target.due_ns = target.end_ns = now_ns();
    target.finished.store(token, std::memory_order_release);
    return token;
  }
  Item item;
  item.task = Task::kCopy;
  item.vertex = copy.vertex;
  item.dst = copy.dst;
  item.src = copy.src;
  item.bytes = copy.bytes;
  item.first = copy.first();
  item.last = copy.last();
  item.start_ns = std::max(now_ns(), target.due_ns);
  item.due_ns = target.due_ns = item.start_ns + std::llround(copy_ns(copy, copy.bytes));
  target.end_ns = item.start_ns + std::llround(copy_ns(copy, copy.bytes + copy.behind));
  item.token = ++target.enqueued;
  target.push(item);
  return item.token;
}

BatchLimits HostDevice::batch_limits() const {
  if (!small(options_.small_copy)) return {};
  return {kMostCopies, options_.small_copy, kMostCopies * options_.small_copy};
}

std::int64_t HostDevice::expected_end(int stream) const { return streams_[stream]->end_ns; }

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

void HostDevice::begin_step(std::uint64_t step) {
  step_ = step;
  shared_->ops_run.store(0, std::memory_order_relaxed);
}

std::int64_t HostDevice::ops_run() const { return shared_->ops_run.load(std::memory_order_acquire); }

bool HostDevice::ran(std::int32_t vertex) const {
  return shared_->ran.at(static_cast<std::size_t>(vertex)) != 0;
}

bool HostDevice::failed() const { return shared_->failed.load(std::memory_order_acquire); }

DeviceFailure HostDevice::failure() const {
  const std::lock_guard lock(shared_->failure_mutex);
  return shared_->failure;
}

void HostDevice::cancel() { shared_->cancelled.store(true, std::memory_order_release); }

void HostDevice::recover() {
  for (auto& stream : streams_) stream->due_ns = stream->end_ns = 0;
  const std::lock_guard lock(shared_->failure_mutex);
  shared_->failure = {};
  shared_->failed.store(false, std::memory_order_release);
  shared_->cancelled.store(false, std::memory_order_release);
}

void HostDevice::trace(Span* spans, std::int32_t vertices) {
  shared_->spans = spans;
  shared_->ran.assign(static_cast<std::size_t>(vertices), 0);
}

}  // namespace disco
