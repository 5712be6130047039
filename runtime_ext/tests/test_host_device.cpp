#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

class Counter final : public ProgressListener {
 public:
  void on_progress() noexcept override {
    const std::lock_guard lock(mutex_);
    ++count_;
    wakes_.notify_all();
  }
  bool wait_for(int count) {
    std::unique_lock lock(mutex_);
    return wakes_.wait_for(lock, std::chrono::seconds(60), [&] { return count_ >= count; });
  }

  int count() {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wakes_;
  int count_ = 0;
};

struct Link {
  explicit Link(double bandwidth, double latency = 0.0, std::int64_t small_copy = 0) {
    HostDeviceOptions options;
    options.small_copy = small_copy;
    options.link_bandwidth = bandwidth;
    options.link_latency = latency;
    device = std::make_unique<HostDevice>(options);
    device->connect(0, ops, counter);
    lane = device->lane(Direction::kHostToDevice);
  }
  ~Link() { device.reset(); }

  // `copies` copies of `bytes` each, enqueued together: each is due `ns` after it was enqueued or after the
  // one before it, to the nanosecond, and the last does not arrive before it is due. How late it is,
  // benchmarks say.
  void expect_copies(int copies, std::size_t bytes, std::int64_t ns) {
    const std::vector<char> source(bytes, 'x');
    std::vector<char> target(bytes, ' ');
    for (int i = 0; i < copies; ++i) {
      const std::int64_t free = device->expected_end(lane);
      const std::int64_t before = now_ns();
      device->enqueue_copy(lane, {0, target.data(), source.data(), static_cast<std::int64_t>(bytes)});
      const std::int64_t after = now_ns();
      EXPECT_GE(device->expected_end(lane), std::max(before, free) + ns) << "copy " << i;
      EXPECT_LE(device->expected_end(lane), std::max(after, free) + ns) << "copy " << i;
    }
    seen += copies;
    EXPECT_TRUE(counter.wait_for(seen));
    EXPECT_GE(now_ns(), device->expected_end(lane));
    EXPECT_EQ(source, target);
  }

  NoOps ops;
  Counter counter;
  std::unique_ptr<HostDevice> device;
  int lane = 0;
  int seen = 0;
};

TEST(HostDevice, ALongCopyTakesItsBytesOverTheBandwidth) {
  Link(200e6).expect_copies(1, 10'000'000, 50'000'000);
}

TEST(HostDevice, BackToBackCopiesDoNotDrift) { Link(100e6).expect_copies(100, 50'000, 500'000); }

TEST(HostDevice, LatencyIsPaidByEachCopy) { Link(100e6, 0.002).expect_copies(10, 100'000, 3'000'000); }

TEST(HostDevice, PacingSleepsInsteadOfSpinning) {
  Link link(10e6);
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_SELF, &before);
  const std::int64_t start = now_ns();
  link.expect_copies(4, 1'000'000, 100'000'000);
  const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
  getrusage(RUSAGE_SELF, &after);
  const auto cpu = [](const rusage& usage) {
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  };
  EXPECT_LE(cpu(after) - cpu(before), 0.5 * seconds);
}

TEST(HostDevice, AnUnthrottledLaneCopiesAtOnce) {
  Link link(0.0);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{5'000'000}})
    link.expect_copies(3, bytes, 0);
}

// What ends inside enqueue_copy is not told of: whoever enqueued it sees it in completed().
TEST(HostDevice, ASmallCopyOnAnIdleLaneEndsWhereItIsEnqueued) {
  const std::int64_t kSmall = HostDeviceOptions{}.small_copy;
  Link link(0.0, 0.0, kSmall);
  const std::vector<char> source(kSmall + 1, 'x');
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, kSmall}) {
    std::vector<char> target(source.size(), ' ');
    const Token token = link.device->enqueue_copy(link.lane, {0, target.data(), source.data(), bytes});
    EXPECT_EQ(link.device->completed(link.lane), token);
    EXPECT_TRUE(std::equal(target.begin(), target.begin() + bytes, source.begin()));
    EXPECT_EQ(target[static_cast<std::size_t>(bytes)], ' ');
  }
  EXPECT_EQ(link.counter.count(), 0);
  link.expect_copies(1, source.size(), 0);  // one byte more is told of
  EXPECT_EQ(link.counter.count(), 1);
}

TEST(HostDevice, ASmallCopyWaitsForTheLargeOneBeforeIt) {
  Link link(0.0, 0.0, HostDeviceOptions{}.small_copy);
  const std::vector<char> large(20'000'000, 'l');
  const std::vector<char> small(100, 's');
  std::vector<char> target(large.size());
  for (int round = 0; round < 5; ++round) {
    link.device->enqueue_copy(link.lane, {0, target.data(), large.data(), 20'000'000});
    const Token token = link.device->enqueue_copy(link.lane, {1, target.data(), small.data(), 100});
    while (link.device->completed(link.lane) < token) std::this_thread::yield();
    EXPECT_EQ(target[99], 's');
    EXPECT_EQ(target[100], 'l');
  }
}

TEST(HostDevice, ACancelledSmallCopyCopiesNothing) {
  Link link(0.0, 0.0, HostDeviceOptions{}.small_copy);
  char source = 's';
  char target = ' ';
  link.device->trace(nullptr, 2);
  link.device->cancel();
  const Token token = link.device->enqueue_copy(link.lane, {0, &target, &source, 1});
  EXPECT_EQ(link.device->completed(link.lane), token);
  EXPECT_EQ(target, ' ');
  EXPECT_FALSE(link.device->ran(0));
  link.device->recover();
  link.device->enqueue_copy(link.lane, {1, &target, &source, 1});
  EXPECT_EQ(target, 's');
  EXPECT_TRUE(link.device->ran(1));
}

TEST(HostDevice, LanesAreIndependent) {
  Link link(100e6);
  const std::vector<char> source(2'000'000, 'x');
  std::vector<char> one(source.size());
  std::vector<char> two(source.size());
  const auto bytes = static_cast<std::int64_t>(source.size());
  const std::int64_t before = now_ns();
  link.device->enqueue_copy(link.device->lane(Direction::kHostToDevice),
                            {0, one.data(), source.data(), bytes});
  link.device->enqueue_copy(link.device->lane(Direction::kDeviceToHost),
                            {1, two.data(), source.data(), bytes});
  const std::int64_t after = now_ns();
  for (const Direction direction : {Direction::kHostToDevice, Direction::kDeviceToHost}) {
    const std::int64_t due = link.device->expected_end(link.device->lane(direction));
    EXPECT_GE(due, before + 20'000'000);
    EXPECT_LE(due, after + 20'000'000);
  }
  EXPECT_TRUE(link.counter.wait_for(2));
}

TEST(HostDevice, CancelCutsASlowCopyShortAndSkipsWhatIsQueued) {
  Link link(1e3);
  const std::vector<char> source(1'000'000, 'x');
  std::vector<char> target(source.size());
  for (int i = 0; i < 5; ++i) {
    link.device->enqueue_copy(link.lane,
                              {0, target.data(), source.data(), static_cast<std::int64_t>(source.size())});
  }
  link.device->cancel();
  EXPECT_TRUE(link.counter.wait_for(5));
  link.device->recover();
  EXPECT_FALSE(link.device->failed());
  link.seen = 5;
  link.expect_copies(1, 10, 10'000'000);  // no debt from the copy that was cut
}

TEST(HostDevice, ComputeThreadsRunTheHookAndTheLoopThreadCountsAsStreamZeroInline) {
  for (const bool inline_compute : {true, false}) {
    std::mutex mutex;
    std::vector<int> hooked;
    HostDeviceOptions options;
    options.compute_streams = inline_compute ? 1 : 3;
    options.on_compute_thread = [&](int stream) {
      const std::lock_guard lock(mutex);
      hooked.push_back(stream);
    };
    auto scene = random_scene(2);
    Checker checker(*scene);
    {
      Engine engine(scene->program(), one(std::make_unique<HostDevice>(options)), checker, {});
      ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
    }
    std::sort(hooked.begin(), hooked.end());
    EXPECT_EQ(hooked, inline_compute ? std::vector<int>({0}) : std::vector<int>({0, 1, 2}));
  }
}

TEST(HostDevice, StreamOrderedWaitsHold) {
  HostDeviceOptions options;
  options.compute_streams = 2;
  Counter counter;
  class Order final : public OpRunner {
   public:
    void run(std::int32_t op, int, int) override {
      if (op == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const std::lock_guard lock(mutex);
      order.push_back(op);
    }
    std::mutex mutex;
    std::vector<std::int32_t> order;
  } runner;
  HostDevice device(options);
  device.connect(0, runner, counter);
  const Token first = device.enqueue_op(0, 0, 0);
  device.wait(1, 0, first);
  device.enqueue_op(1, 1, 1);
  EXPECT_TRUE(counter.wait_for(2));
  const std::lock_guard lock(runner.mutex);
  EXPECT_EQ(runner.order, (std::vector<std::int32_t>{0, 1}));
}

TEST(HostDevice, OptionsOutOfRangeAreRefused) {
  HostDeviceOptions none;
  none.compute_streams = 0;
  EXPECT_THROW(HostDevice{none}, std::invalid_argument);
  HostDeviceOptions negative;
  negative.link_bandwidth = -1;
  EXPECT_THROW(HostDevice{negative}, std::invalid_argument);
  HostDeviceOptions late;
  late.link_latency = -1;
  EXPECT_THROW(HostDevice{late}, std::invalid_argument);
}

}  // namespace
}  // namespace disco::testing
