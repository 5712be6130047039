#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

std::vector<std::unique_ptr<Device>> plain_hosts(int devices, int streams = 1, double bandwidth = 0.0) {
  HostDeviceOptions options;
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
    Engine engine(scene->program(), plain_hosts(devices, 1 + seed % 2), checker, options);
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
    builder.add({Kind::kTransfer, d, -1, arena[2 + d].data(), arena[d].data(), bytes, 0});
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
  const std::uint8_t flags[] = {kToHost, kFromHost, 0};
  constexpr Direction kLanes[] = {Direction::kDeviceToHost, Direction::kHostToDevice, Direction::kPeer};
  ProgramBuilder builder;
  for (std::size_t i = 0; i < 3; ++i) {
    builder.add({Kind::kTransfer, 0, -1, block[i].data(), block[3 + i].data(), 1000, flags[i]});
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
  EXPECT_EQ(engine.counters().transfer_bytes, 3000);
  EXPECT_EQ(engine.counters().changes, 1);
  for (const TraceEvent& event : engine.events()) {
    const int lane = event.vertex < 3 ? 1 + static_cast<int>(kLanes[event.vertex]) : 0;
    EXPECT_EQ(event.stream, lane) << event.vertex;
    EXPECT_EQ(event.device, event.vertex == 4 ? 1 : 0);
  }
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
      before = builder.add({Kind::kTransfer, d, -1, word + 1, word, 8, 0});
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
