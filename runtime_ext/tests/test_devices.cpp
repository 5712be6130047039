#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <tuple>

#include "assumed_device.h"
#include "support.h"

namespace disco::testing {
namespace {

std::vector<std::unique_ptr<Device>> plain_hosts(int devices, int streams = 1, double bandwidth = 0.0,
                                                 std::int64_t small_copy = 0) {
  HostDeviceOptions options;
  options.small_copy = small_copy;
  options.compute_streams = streams;
  options.link_bandwidth = bandwidth;
  return hosts(devices, options);
}

// Every op, and every copy that comes to meet(), waits until `expected` of them run at the same time.
class Meeting final : public OpRunner {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void run(std::int32_t, int, int) override {
    if (!meet()) throw std::runtime_error("no other op came: they do not overlap");
  }
  bool meet() {
    ++arrived_;
    const std::int64_t until = now_ns() + 30'000'000'000;
    while (arrived_.load() < expected_) {
      if (now_ns() > until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

 private:
  const int expected_;
  std::atomic<int> arrived_{0};
};

Program one_kernel_each(int devices, int kernels) {
  ProgramBuilder builder;
  for (int v = 0; v < kernels; ++v) {
    VertexDesc vertex;
    vertex.op = v;
    vertex.device = v % devices;
    builder.add(vertex);
  }
  return std::move(builder).build();
}

TEST(Devices, OpsOfSeveralDevicesRunAtTheSameTime) {
  for (int devices = 2; devices <= 8; ++devices) {
    Meeting meeting(devices);
    Engine engine(one_kernel_each(devices, devices), plain_hosts(devices), meeting, {});
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  }
}

TEST(Devices, OpsOfSeveralStreamsRunAtTheSameTime) {
  for (int streams = 2; streams <= 4; ++streams) {
    Meeting meeting(2 * streams);
    Engine engine(one_kernel_each(2, 2 * streams), plain_hosts(2, streams), meeting, {});
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  }
}

TEST(Devices, RandomProgramsRunRightOnTwoToEight) {
  for (int seed = 0; seed < 56; ++seed) {
    const int devices = 2 + seed % 7;
    auto scene = random_scene(seed, {.vertices = 80, .devices = devices, .reuse = 0.3});
    Checker checker(*scene);
    EngineOptions options;
    options.dispatch = static_cast<Dispatch>(seed % 4);
    options.lookahead = seed % 5;
    options.seed = seed;
    Engine engine(scene->program(), plain_hosts(devices, 1 + seed % 2, 0.0, seed % 4 < 2 ? 0 : 256), checker,
                  options);
    for (std::uint64_t step = 0; step < 3; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone)
          << "seed " << seed << ": " << engine.last_error().message;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed << " step " << step;
    }
  }
}

TEST(Devices, ADeviceThatMustBePolledSharesAProgramWithOneThatTells) {
  for (int seed = 0; seed < 60; ++seed) {
    auto scene = random_scene(seed, {.vertices = 60, .devices = 2});
    Checker checker(*scene);
    auto devices = plain_hosts(1);
    devices.push_back(std::make_unique<PolledDevice>(1, seed));
    EngineOptions options;
    options.dispatch = static_cast<Dispatch>(seed % 4);
    Engine engine(scene->program(), std::move(devices), checker, options);
    for (std::uint64_t step = 0; step < 2; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone) << "seed " << seed;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed;
    }
  }
}

// Counters and events of a step are the same, whoever makes the copies.
TEST(Devices, SmallCopiesAreBookedAsAllOthers) {
  using Booked = std::tuple<std::int32_t, std::int16_t, std::int16_t, std::int64_t>;
  for (int seed = 0; seed < 20; ++seed) {
    const int devices = 1 + seed % 4;
    std::array<std::vector<Booked>, 2> booked;
    std::array<StepCounters, 2> counters;
    for (std::size_t small = 0; small < 2; ++small) {
      auto scene = random_scene(seed, {.vertices = 60, .copies = 0.6, .devices = devices});
      Checker checker(*scene);
      EngineOptions options;
      options.dispatch = static_cast<Dispatch>(seed % 4);
      Engine engine(scene->program(), plain_hosts(devices, 1, 0.0, small == 0 ? 0 : 1 << 14), checker,
                    options);
      engine.set_tracing(true);
      ASSERT_EQ(run_step(engine, checker, 0), Status::kDone) << "seed " << seed;
      ASSERT_EQ(checker.missing() + checker.broken, 0) << "seed " << seed;
      for (const TraceEvent& event : engine.events()) {
        EXPECT_LE(event.issue, event.start);
        EXPECT_LE(event.start, event.end);
        booked[small].emplace_back(event.vertex, event.device, event.stream, event.bytes);
      }
      std::sort(booked[small].begin(), booked[small].end());
      counters[small] = engine.counters();
    }
    EXPECT_EQ(booked[0], booked[1]) << "seed " << seed;
    EXPECT_EQ(counters[0].vertices, counters[1].vertices);
    EXPECT_EQ(counters[0].reload_bytes, counters[1].reload_bytes);
    EXPECT_EQ(counters[0].offload_bytes, counters[1].offload_bytes);
    EXPECT_EQ(counters[0].transfer_bytes, counters[1].transfer_bytes);
  }
}

// Two kernels on devices 0 and 1, and transfers 0 -> 1 and 1 -> 0; nothing waits for anything, and none ends
// before all four have begun.
TEST(Devices, TransfersBothWaysOverlapEachOtherAndCompute) {
  std::vector<std::vector<char>> arena(4, std::vector<char>(50'000));
  ProgramBuilder builder;
  for (int d = 0; d < 2; ++d) {
    VertexDesc kernel;
    kernel.op = d;
    kernel.device = d;
    builder.add(kernel);
    const auto bytes = static_cast<std::int64_t>(arena[0].size());
    builder.add({Kind::kCopy, d, -1, arena[2 + d].data(), arena[d].data(), bytes, 0, Direction::kPeer});
  }
  Meeting meeting(4);
  std::atomic<int> alone{0};
  HostDeviceOptions options;
  options.before_copy = [&](std::int32_t) { alone += meeting.meet() ? 0 : 1; };
  Engine engine(std::move(builder).build(), hosts(2, options), meeting, {});
  engine.set_tracing(true);
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  EXPECT_EQ(alone, 0);
  EXPECT_EQ(engine.counters().transfer_bytes, 100'000);
  for (const TraceEvent& event : engine.events()) {
    EXPECT_EQ(event.device, event.vertex / 2);
    EXPECT_EQ(event.stream, event.vertex % 2 == 0 ? 0 : 1 + static_cast<int>(Direction::kPeer));
  }
}

// A transfer to the host, one from there and one to a peer are on three lanes of device 0; they overlap, and
// kernels on both devices with them.
TEST(Devices, TransfersToTheHostAndFromItTakeTheLanesOfTheOtherDevice) {
  std::vector<std::vector<char>> block(6, std::vector<char>(1000));
  constexpr Direction kLanes[] = {Direction::kDeviceToHost, Direction::kHostToDevice, Direction::kPeer};
  ProgramBuilder builder;
  for (std::size_t i = 0; i < 3; ++i) {
    builder.add({Kind::kCopy, 0, -1, block[i].data(), block[3 + i].data(), 1000, 0, kLanes[i]});
  }
  builder.add({Kind::kKernel, 0, 0, nullptr, nullptr, 0, 0});
  builder.add({Kind::kKernel, 1, 1, nullptr, nullptr, 0, kChanges});
  Meeting meeting(5);
  std::atomic<int> alone{0};
  HostDeviceOptions options;
  options.before_copy = [&](std::int32_t) { alone += meeting.meet() ? 0 : 1; };
  Engine engine(std::move(builder).build(), hosts(2, options), meeting, {});
  engine.set_tracing(true);
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  EXPECT_EQ(alone, 0);
  EXPECT_EQ(engine.counters().offload_bytes, 1000);
  EXPECT_EQ(engine.counters().reload_bytes, 1000);
  EXPECT_EQ(engine.counters().transfer_bytes, 1000);
  EXPECT_EQ(engine.counters().changes, 1);
  for (const TraceEvent& event : engine.events()) {
    const int lane = event.vertex < 3 ? 1 + static_cast<int>(kLanes[event.vertex]) : 0;
    EXPECT_EQ(event.stream, lane) << event.vertex;
    EXPECT_EQ(event.device, event.vertex == 4 ? 1 : 0);
  }
}

// Kernels of assumed time run one after the other on each of eight devices that must be asked what has ended,
// and every vertex of the program ran.
TEST(Devices, OneLoopThreadLaunchesForEightThatItAsks) {
  constexpr int kDevices = 8;
  constexpr int kKernels = 250;
  constexpr std::int64_t kKernelNs = 5'000;
  NoOps ops;
  Engine engine(ladders(kDevices, kKernels), assumed(kDevices, {kKernelNs, 2'000, 100}), ops, {});
  engine.set_tracing(true);
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  EXPECT_GE(engine.counters().step_ns, kKernels * kKernelNs);
  std::array<std::array<std::int64_t, 4>, kDevices> free{};
  for (const TraceEvent& event : engine.events()) {  // by start
    EXPECT_LE(event.issue, event.start);
    EXPECT_GE(event.start, free[event.device][event.stream]);
    free[event.device][event.stream] = event.end;
  }
  EXPECT_EQ(engine.counters().vertices, static_cast<std::int64_t>(engine.events().size()));
  EXPECT_EQ(engine.counters().transfer_bytes, kDevices * 3);
}

// Tells only at every sixtieth question what has ended, and how often the thread that asks has slept since it
// asked first.
class ToldAfterManyPolls final : public ForwardingDevice {
 public:
  ToldAfterManyPolls(std::unique_ptr<Device> inner, std::int64_t& naps)
      : ForwardingDevice(std::move(inner)), naps_(naps) {}
  Token completed(int stream) override {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    if (polls_ == 0) first_ = usage.ru_nvcsw;
    naps_ = usage.ru_nvcsw - first_;
    if (++polls_ % 60 == 0) told_[stream] = ForwardingDevice::completed(stream);
    return told_[stream];
  }

 private:
  std::int64_t& naps_;
  std::int64_t first_ = 0;
  std::int64_t polls_ = 0;
  std::array<Token, 4> told_{};
};

// However many questions a step has taken, the loop thread asks on as long as there is progress: it naps
// after thousands in vain, not after thousands in all.
TEST(Devices, TheLoopThreadDoesNotNapBetweenShortKernels) {
  NoOps ops;
  std::int64_t naps = 0;
  Engine engine(ladders(1, 1500),
                one(std::make_unique<ToldAfterManyPolls>(std::move(assumed(1, {}).front()), naps)), ops, {});
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  EXPECT_LE(naps, 1000);
}

// A pipeline: stage d of item i runs on device d and hands its block to the next device. All ops with the
// same i + d wait for each other, so that nothing but full overlap comes to an end.
TEST(Devices, APipelineOverDevicesOverlaps) {
  constexpr int kDevices = 4;
  constexpr int kItems = 12;
  std::vector<std::uint64_t> words(kDevices * kItems * 2);
  ProgramBuilder builder;
  for (int i = 0; i < kItems; ++i) {
    std::int32_t before = -1;
    for (int d = 0; d < kDevices; ++d) {
      VertexDesc kernel;
      kernel.op = i * kDevices + d;
      kernel.device = d;
      const std::int32_t v = builder.add(kernel);
      if (before >= 0) builder.edge(before, v);
      std::uint64_t* word = &words[static_cast<std::size_t>(2 * kernel.op)];
      before = builder.add({Kind::kCopy, d, -1, word + 1, word, 8, 0, Direction::kPeer});
      builder.edge(v, before);
    }
  }
  class Diagonals final : public OpRunner {
   public:
    Diagonals() {
      for (int sum = 0; sum < kItems + kDevices - 1; ++sum) {
        int ops = 0;
        for (int d = 0; d < kDevices; ++d) ops += sum - d >= 0 && sum - d < kItems ? 1 : 0;
        meetings_.push_back(std::make_unique<Meeting>(ops));
      }
    }
    void run(std::int32_t op, int device, int stream) override {
      meetings_[static_cast<std::size_t>(op / kDevices + op % kDevices)]->run(op, device, stream);
    }

   private:
    std::vector<std::unique_ptr<Meeting>> meetings_;
  } diagonals;
  Engine engine(std::move(builder).build(), plain_hosts(kDevices), diagonals, {});
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
}

}  // namespace
}  // namespace disco::testing
