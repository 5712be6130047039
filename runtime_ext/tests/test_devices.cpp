#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

constexpr double kPatience = 60.0;

std::vector<std::unique_ptr<Device>> plain_hosts(int devices, int streams = 1, double bandwidth = 0.0) {
  HostDeviceOptions options;
  options.compute_streams = streams;
  options.link_bandwidth = bandwidth;
  return hosts(devices, options);
}

// Every op waits until `expected` ops run at the same time.
class Meeting final : public OpRunner {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void run(std::int32_t, int, int) override {
    ++arrived_;
    const std::int64_t until = now_ns() + 30'000'000'000;
    while (arrived_.load() < expected_) {
      if (now_ns() > until) throw std::runtime_error("no other op came: they do not overlap");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
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

// Two kernels on devices 0 and 1, and transfers 0 -> 1 and 1 -> 0 of 5 ms each; nothing waits for anything.
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
  class Sleeper final : public OpRunner {
   public:
    void run(std::int32_t, int, int) override { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
  } sleeper;
  Engine engine(std::move(builder).build(), plain_hosts(2, 1, 10e6), sleeper, {});
  engine.set_tracing(true);
  std::int64_t shortest = INT64_MAX;
  for (int round = 0; round < 20; ++round) {
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    EXPECT_EQ(engine.counters().transfer_bytes, 100'000);
    shortest = std::min(shortest, engine.counters().step_ns);
    for (const TraceEvent& event : engine.events()) {
      EXPECT_EQ(event.device, event.vertex / 2);
      EXPECT_EQ(event.stream, event.vertex % 2 == 0 ? 0 : 1 + static_cast<int>(Direction::kPeer));
    }
  }
  EXPECT_GE(shortest, 5'000'000);
  EXPECT_LE(shortest, 9'000'000);
}

// A pipeline: stage d of item i runs on device d and hands its block to the next device. With sleeping ops it
// must take about (items + devices - 1) ops, not items * devices.
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
  class Sleeper final : public OpRunner {
   public:
    void run(std::int32_t, int, int) override { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
  } sleeper;
  Engine engine(std::move(builder).build(), plain_hosts(kDevices), sleeper, {});
  double shortest = 1e9;
  for (int round = 0; round < 10; ++round) {
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    shortest = std::min(shortest, static_cast<double>(engine.counters().step_ns) * 1e-6);
  }
  EXPECT_LE(shortest, 2.0 * kItems * kDevices / 2);
}

}  // namespace
}  // namespace disco::testing
