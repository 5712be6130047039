// HostDevice: a device whose arena is host memory, whose streams are threads and whose link may be throttled.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "device.h"

namespace disco {

struct HostStream;
struct Item;

struct HostDeviceOptions {
  int compute_streams = 1;
  // One compute stream only: ops run inside enqueue_op, on the engine's loop thread, without a hand-off.
  bool inline_compute = true;
  // Bytes per second of each copy lane (host to device, device to host and peer are independent); 0 = plain
  // memcpy.
  double link_bandwidth = 0.0;
  // Seconds added to each copy.
  double link_latency = 0.0;
  // Disturbance of the link: each copy's time is multiplied by a factor that is uniform in [1 - link_jitter,
  // 1 + link_jitter] and depends on the seed, the vertex and the step alone, so that whatever order the
  // copies go in, each meets the same disturbance.
  double link_jitter = 0.0;
  std::uint64_t link_jitter_seed = 0;
  // Called at the start of every thread that runs ops, on that thread, with the compute stream's number (the
  // loop thread counts as stream 0's when inline_compute is in force). Sets thread-local state such as the
  // OpenMP thread count.
  std::function<void(int stream)> on_compute_thread;
  // Bytes. On a link without bandwidth and latency a copy of at most so many is made inside enqueue_copy if
  // its lane is idle: waking the lane's thread takes longer. 0 = every copy is made by its lane's thread.
  std::int64_t small_copy = 16 << 10;
  // Called on the lane's thread before each copy; no copy is small then. For tests: a hook that does not
  // return is a copy that never completes.
  std::function<void(std::int32_t vertex)> before_copy;
};

// A copy of b bytes on a throttled lane ends link_latency + b / link_bandwidth seconds after it starts, and
// it starts when it was enqueued or when the copy before it was due, whichever is later: the long-run rate of
// a busy lane is exact and wake-up delays do not add up. Pacing sleeps, but for the last kSpinNs of a copy.
// Of a copy in pieces the first alone has the latency.
class HostDevice final : public Device {
 public:
  // Throws std::invalid_argument on options out of range, std::system_error if a thread cannot be started.
  explicit HostDevice(HostDeviceOptions options);
  ~HostDevice() override;
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  void connect(int index, OpRunner& runner, ProgressListener& listener) override;
  void attach_loop_thread() override;
  void use_threads() override { inline_ = false; }
  int compute_streams() const override { return options_.compute_streams; }
  bool runs_inline() const override { return inline_; }
  bool notifies() const override { return true; }
  bool computing() const override;
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) override;
  Token enqueue_copy(int stream, const Copy& copy) override;
  // None on a throttled link, where a copy's successors would wait for the time of the others.
  BatchLimits batch_limits() const override;
  void wait(int stream, int other, Token token) override;
  Token completed(int stream) override;
  std::int64_t expected_end(int stream) const override;
  void begin_step(std::uint64_t step) override;
  std::int64_t ops_run() const override;
  bool ran(std::int32_t vertex) const override;
  bool failed() const override;
  DeviceFailure failure() const override;
  void cancel() override;
  void recover() override;
  void trace(Span* spans, std::int32_t vertices) override;

 private:
  struct Shared;

  void serve(int index);
  void run_copy(HostStream& stream, const Item& item);
  double copy_ns(const Copy& copy, std::int64_t bytes) const;
  bool small(std::int64_t bytes) const;

  HostDeviceOptions options_;
  bool inline_;
  std::uint64_t step_ = 0;
  std::unique_ptr<Shared> shared_;
  std::vector<std::unique_ptr<HostStream>> streams_;
};

}  // namespace disco
