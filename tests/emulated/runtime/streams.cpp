#include "streams.h"

#include <chrono>
#include <cstdio>
#include <thread>

#include "calls.h"
#include "faults.h"
#include "journal.h"
#include "order.h"
#include "settings.h"

namespace emulated {

Stream::Stream(int stream, int on)
    : number(stream), device(on), random_(settings().seed * 1000003 + static_cast<unsigned>(stream)) {}

namespace {

thread_local Stream* capturing = nullptr;  // of this thread

}  // namespace

bool Stream::begin_capture() {
  const std::lock_guard lock(mutex_);
  if (capture_ != nullptr) return false;
  capture_ = std::make_unique<Capture>();
  capture_->thread = std::this_thread::get_id();
  capturing = this;
  return true;
}

std::unique_ptr<Capture> Stream::end_capture() {
  const std::lock_guard lock(mutex_);
  capturing = nullptr;
  return std::move(capture_);
}

cudaStreamCaptureStatus Stream::captured() {
  const std::lock_guard lock(mutex_);
  if (capture_ == nullptr) return cudaStreamCaptureStatusNone;
  return capture_->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t Stream::refuse_in_capture() {
  const std::lock_guard lock(mutex_);
  if (capture_ == nullptr) return cudaSuccess;
  capture_->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

bool Stream::note(Node node) {
  const std::lock_guard lock(mutex_);
  if (capture_ == nullptr) return false;
  if (capture_->thread != std::this_thread::get_id())
    journal().complain(node.work.name + " of one thread is captured by another");
  capture_->nodes.push_back(std::move(node));
  return true;
}

cudaError_t refuse_while_capturing() {
  return capturing == nullptr ? cudaSuccess : capturing->refuse_in_capture();
}

void Stream::put(Work work, const std::vector<Range>& ranges) {
  if (captured() != cudaStreamCaptureStatusNone && note({work, ranges})) return;
  order().issue(number, work.name, ranges);
  if (settings().log) std::fprintf(stderr, "emulated stream %d: %s\n", number, work.name.c_str());
  const std::lock_guard lock(mutex_);
  if (closed_) {
    journal().complain(work.name + " on a destroyed stream");
    return;
  }
  queue_.push_back(std::move(work));
  if (!started_) {
    started_ = busy_ = true;
    std::thread([this] { work_off(); }).detach();
  }
  changed_.notify_all();
}

void Stream::work_off() {
  for (;;) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !queue_.empty() || closed_; });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    delay();
    if (!work.signals) faults().meet(work.name);
    if (work.signals || faults().sticky() == 0) work.run();
  }
}

// Mostly short, now and then as long as it may be.
void Stream::delay() {
  if (settings().jitter_us <= 0) return;
  const double drawn = std::uniform_real_distribution<double>(0, 1)(random_);
  std::this_thread::sleep_for(
      std::chrono::duration<double, std::micro>(drawn * drawn * drawn * settings().jitter_us));
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void Stream::synchronize() {
  const Clock done = order().now(number);
  drain();
  order().host_learns(done);
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

Stream* Streams::create(int device) {
  const std::lock_guard lock(mutex_);
  auto* made = new Stream(static_cast<int>(all_.size()), device);
  all_.push_back(made);
  open_[made] = made;
  return made;
}

Stream* Streams::legacy(int device) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = legacy_.find(device); at != legacy_.end()) return at->second;
  }
  Stream* made = create(device);
  const std::lock_guard lock(mutex_);
  return legacy_.emplace(device, made).first->second;
}

Stream* Streams::find(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return legacy(current_device());
  if (handle == cudaStreamPerThread) {
    journal().complain("per-thread default streams are not emulated");
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto at = open_.find(handle);
  return at == open_.end() ? nullptr : at->second;
}

bool Streams::destroy(cudaStream_t handle) {
  Stream* stream = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto at = open_.find(handle);
    if (at == open_.end()) return false;
    stream = at->second;
    open_.erase(at);
  }
  stream->close();
  return true;
}

void Streams::synchronize(int device) {
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(mutex_);
    all = all_;
  }
  for (Stream* stream : all) {
    if (device < 0 || stream->device == device) stream->synchronize();
  }
}

Streams& streams() {
  static auto* the = new Streams;
  return *the;
}

void take_link_time(std::size_t bytes) {
  if (settings().link_gb_s <= 0) return;
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(static_cast<long>(static_cast<double>(bytes) / settings().link_gb_s)));
}

}  // namespace emulated
