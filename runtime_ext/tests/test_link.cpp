// The throttled link of the host device: copies take their time on it, and are disturbed only as asked.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

constexpr std::int64_t kBytes = 40'000;
constexpr double kBandwidth = 100e6;
constexpr std::int64_t kCopyNs = 400'000;

class Deaf final : public ProgressListener {
 public:
  void on_progress() noexcept override {}
};

// Reloads of 0.4 ms each, and after each a kernel that reads it.
struct Stream {
  using Wrap = std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)>;
  explicit Stream(int copies) : Stream(copies, {}, true, [](auto device) { return device; }) {}
  // `chained`: each reload waits for the kernel before it.
  Stream(int copies, HostDeviceOptions options, bool chained, const Wrap& wrap)
      : source(kBytes, 'x'), target(kBytes) {
    options.link_bandwidth = kBandwidth;
    ProgramBuilder builder;
    for (int i = 0; i < copies; ++i) {
      builder.add({Kind::kCopy, 0, -1, target.data(), source.data(), kBytes, 0, Direction::kHostToDevice});
      VertexDesc kernel;
      kernel.op = i;
      builder.add(kernel);
      builder.edge(2 * i, 2 * i + 1);
      if (chained && i > 0) builder.edge(2 * i - 1, 2 * i);
    }
    engine = std::make_unique<Engine>(std::move(builder).build(),
                                      one(wrap(std::make_unique<HostDevice>(options))), ops, EngineOptions{});
  }

  void step() {
    engine->begin();
    ASSERT_EQ(engine->wait_end(kPatience), Status::kDone);
  }

  std::vector<char> source;
  std::vector<char> target;
  NoOps ops;
  std::unique_ptr<Engine> engine;
};

TEST(Link, NoCopyEndsBeforeItsTimeAndNoKernelStartsBeforeItsCopy) {
  Stream stream(40);
  stream.engine->set_tracing(true);
  for (int round = 0; round < 5; ++round) {
    stream.step();
    std::vector<TraceEvent> of(80);
    for (const TraceEvent& event : stream.engine->events()) of[event.vertex] = event;
    std::int64_t free = 0;
    for (int i = 0; i < 40; ++i) {
      free = std::max(free, of[2 * i].issue) + kCopyNs;
      EXPECT_GE(of[2 * i].end, free) << "copy " << i;
      EXPECT_GE(of[2 * i + 1].start, of[2 * i].end) << "kernel " << i;
    }
  }
}

// Each copy but the last stays on the link until the next one has been handed to it, so that an engine which
// waited for the end of a copy first would stall.
TEST(Link, TheLinkAlwaysHasTheNextCopy) {
  std::atomic<int> handed{0};
  class Counted final : public ForwardingDevice {
   public:
    Counted(std::unique_ptr<Device> inner, std::atomic<int>& handed)
        : ForwardingDevice(std::move(inner)), handed_(handed) {}
    Token enqueue_copy(int stream, const Copy& copy) override {
      const Token token = ForwardingDevice::enqueue_copy(stream, copy);
      ++handed_;
      return token;
    }

   private:
    std::atomic<int>& handed_;
  };
  HostDeviceOptions options;
  options.before_copy = [&](std::int32_t vertex) {
    const std::int64_t until = now_ns() + 30'000'000'000;
    while (vertex / 2 < 39 && handed < vertex / 2 + 2 && now_ns() < until) std::this_thread::yield();
    EXPECT_TRUE(vertex / 2 == 39 || handed >= vertex / 2 + 2) << "copy " << vertex / 2;
  };
  Stream stream(40, options, false, [&](std::unique_ptr<Device> device) {
    return std::make_unique<Counted>(std::move(device), handed);
  });
  stream.step();
}

// Times on the link of `count` copies in the given order, from expected_end(): exact, whatever the machine
// does.
std::vector<std::int64_t> link_times(const HostDeviceOptions& options, std::uint64_t step,
                                     const std::vector<std::int32_t>& order) {
  NoOps ops;
  Deaf deaf;
  std::vector<char> source(100 * kBytes, 'x');
  std::vector<char> target(source.size());
  HostDevice device(options);  // after the buffers: its threads are in them until it ends
  device.connect(0, ops, deaf);
  device.begin_step(step);
  const int lane = device.lane(Direction::kHostToDevice);
  std::vector<std::int64_t> times(order.size());
  // Ahead of them 20 s of copies keep the lane busy, so that each of the others starts where the last one
  // ends. They are cancelled, not waited for.
  for (int i = 0; i < 500; ++i) {
    device.enqueue_copy(lane, {1'000'000 + i, target.data(), source.data(), 100 * kBytes});
  }
  std::int64_t before = device.expected_end(lane);
  for (const std::int32_t v : order) {
    device.enqueue_copy(lane, {v, target.data(), source.data(), kBytes});
    times[static_cast<std::size_t>(v)] = device.expected_end(lane) - before;
    before = device.expected_end(lane);
  }
  device.cancel();
  return times;
}

TEST(Link, JitterBelongsToTheCopyNotToTheOrder) {
  HostDeviceOptions options;
  options.link_bandwidth = kBandwidth;
  options.link_jitter = 0.5;
  options.link_jitter_seed = 3;
  std::vector<std::int32_t> order(400);
  for (int i = 0; i < 400; ++i) order[i] = i;
  const auto times = link_times(options, 7, order);
  std::reverse(order.begin(), order.end());
  EXPECT_EQ(times, link_times(options, 7, order));
  EXPECT_NE(times, link_times(options, 8, order));
  options.link_jitter_seed = 4;
  EXPECT_NE(times, link_times(options, 7, order));
  double sum = 0;
  for (const std::int64_t time : times) {
    EXPECT_GE(time, kCopyNs / 2);
    EXPECT_LE(time, kCopyNs + kCopyNs / 2);
    sum += static_cast<double>(time);
  }
  EXPECT_NEAR(sum / 400, kCopyNs, kCopyNs * 0.06);
  EXPECT_LE(*std::min_element(times.begin(), times.end()), kCopyNs * 0.55);
  EXPECT_GE(*std::max_element(times.begin(), times.end()), kCopyNs * 1.45);
  options.link_jitter = 0.0;
  EXPECT_EQ(link_times(options, 7, order), std::vector<std::int64_t>(400, kCopyNs));
}

TEST(Link, JitterOutOfRangeIsRefused) {
  for (const double jitter : {-0.1, 1.0, std::nan("")}) {
    HostDeviceOptions options;
    options.link_jitter = jitter;
    EXPECT_THROW(HostDevice{options}, std::invalid_argument);
  }
}

// A copy that hangs, in the lane's thread or on a link that is far too slow, is a stall that says who waits.
TEST(Link, ACopyThatNeverCompletesIsAStall) {
  for (const bool hook : {true, false}) {
    std::atomic<bool> blocked{true};
    HostDeviceOptions options;
    if (hook) {
      options.before_copy = [&](std::int32_t vertex) {
        while (vertex == 1 && blocked) std::this_thread::sleep_for(std::chrono::microseconds(100));
      };
    } else {
      options.link_bandwidth = 0.001;
    }
    // 0 -> copy 1 -> 2 -> 3, and 4 that waits for nobody.
    std::uint64_t words[2] = {7, 0};
    ProgramBuilder builder;
    for (int v = 0; v < 5; ++v) {
      VertexDesc vertex;
      vertex.op = v;
      if (v == 1) vertex = {Kind::kCopy, 0, -1, &words[1], &words[0], 8, 0, Direction::kHostToDevice};
      builder.add(vertex);
      if (v > 0 && v < 4) builder.edge(v - 1, v);
    }
    NoOps ops;
    EngineOptions engine_options;
    engine_options.stall_timeout = 0.1;
    // A lane that a busy machine does not let run is slow; what hangs is known here.
    class Hanging final : public ForwardingDevice {
     public:
      Hanging(std::unique_ptr<Device> inner, std::atomic<bool>& hangs)
          : ForwardingDevice(std::move(inner)), hangs_(hangs) {}
      bool computing() const override { return !hangs_; }

     private:
      std::atomic<bool>& hangs_;
    };
    Engine engine(std::move(builder).build(),
                  one(std::make_unique<Hanging>(std::make_unique<HostDevice>(options), blocked)), ops,
                  engine_options);
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kStalled);
    const EngineError error = engine.last_error();
    EXPECT_EQ(error.vertex, 1);
    EXPECT_EQ(error.unfinished.in_flight, std::vector<std::int32_t>{1});
    EXPECT_EQ(error.unfinished.waiting, (std::vector<Waiting>{{2, 1}, {3, 2}}));
    EXPECT_EQ(error.unfinished.waiting_count, 2);
    if (hook) {
      EXPECT_TRUE(engine.last_error().draining);
      EXPECT_THROW(engine.begin(), std::logic_error);
      blocked = false;
    }
    EXPECT_TRUE(engine.abort(kPatience));
    if (!hook) continue;
    engine.begin();
    EXPECT_EQ(engine.wait_end(kPatience), Status::kDone);
    EXPECT_EQ(words[1], 7U);
  }
}

}  // namespace
}  // namespace disco::testing
