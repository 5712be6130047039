// Streams that engines share, and steps that wait for the caller's stream or for work that never ends.
#include <gtest/gtest.h>

#include "core/cuda_device.h"
#include "cuda_launcher.h"
#include "fake_cudart.h"
#include "support.h"

namespace disco::testing {
namespace {

// An engine on streams that it shares, which counts as stalled after 50 ms without progress.
struct Shared {
  Shared(FakeCudart& cudart, std::shared_ptr<CudaStreams> streams, std::uint64_t seed, int compute = 1)
      : scene(random_scene(seed, {.vertices = 40, .gate = false})),
        checker(*scene),
        launcher(cudart, checker) {
    CudaDeviceOptions options;
    options.compute_streams = compute;
    options.streams = std::move(streams);
    auto made = std::make_unique<CudaDevice>(FakeCudart::api(), options);
    device = made.get();
    launcher.targets = {device};
    EngineOptions engine_options;
    engine_options.stall_timeout = 0.05;
    engine = std::make_unique<Engine>(scene->program(), one(std::move(made)), launcher, engine_options);
  }

  std::unique_ptr<Scene> scene;
  Checker checker;
  Launcher launcher;
  CudaDevice* device = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(CudaStreams, EnginesWithOtherNumbersOfStreamsRunOnTheSameOnes) {
  FakeCudart cudart(1);
  const auto streams = std::make_shared<CudaStreams>(FakeCudart::api(), 0);
  auto first = std::make_unique<Shared>(cudart, streams, 1, 1);
  const int objects = cudart.objects();
  Shared second(cudart, streams, 2, 2);
  EXPECT_EQ(cudart.objects() - objects, 1 + (2 + 3) * 64) << "one more stream, and events";
  EXPECT_EQ(first->device->native_stream(0), second.device->native_stream(0));
  EXPECT_EQ(first->device->native_stream(1), second.device->native_stream(2)) << "the first lane";
  for (std::uint64_t step = 0; step < 3; ++step) {
    ASSERT_EQ(run_step(*first->engine, first->checker, step), Status::kDone);
    ASSERT_EQ(run_step(*second.engine, second.checker, step), Status::kDone);
  }
  first.reset();
  ASSERT_EQ(run_step(*second.engine, second.checker, 3), Status::kDone) << "on streams that stayed";
  EXPECT_EQ(second.checker.broken, 0);
}

TEST(CudaStreams, WaitingForTheCallerIsNotStalling) {
  FakeCudart cudart(3);
  const CudartApi api = FakeCudart::api();
  const auto streams = std::make_shared<CudaStreams>(api, 0);
  CudaStream caller = nullptr;
  CudaEvent event = nullptr;
  ASSERT_EQ(api.stream_create(&caller, 1), 0);
  ASSERT_EQ(api.event_create(&event, 2), 0);
  Shared rig(cudart, streams, 3);
  cudart.hold(caller);
  ASSERT_EQ(api.event_record(event, caller), 0);
  for (int stream = 0; stream < rig.device->streams(); ++stream) {
    ASSERT_EQ(api.stream_wait_event(rig.device->native_stream(stream), event, 0), 0);
  }
  rig.device->waits_for(event);
  rig.checker.begin(0);
  rig.engine->begin();
  EXPECT_EQ(rig.engine->wait_end(0.3), Status::kTimeout) << "six times as long as a stall takes";
  cudart.hold(nullptr);
  EXPECT_EQ(rig.engine->wait_end(30), Status::kDone) << rig.engine->last_error().message;
  EXPECT_EQ(rig.checker.missing(), 0);
}

TEST(CudaStreams, WorkThatNeverEndsIsReportedBeforeItDrains) {
  FakeCudart cudart(4);
  const auto streams = std::make_shared<CudaStreams>(FakeCudart::api(), 0);
  Shared rig(cudart, streams, 4);
  cudart.hold(rig.device->native_stream(0));
  rig.checker.begin(0);
  rig.engine->begin();
  ASSERT_EQ(rig.engine->wait_end(30), Status::kStalled);
  EXPECT_TRUE(rig.engine->last_error().draining);
  EXPECT_FALSE(rig.engine->abort(0.05));
  EXPECT_THROW(rig.engine->begin(), std::logic_error);
  cudart.hold(nullptr);
  ASSERT_TRUE(rig.engine->abort(30)) << "it was only slow";
  ASSERT_EQ(run_step(*rig.engine, rig.checker, 1), Status::kDone);
}

}  // namespace
}  // namespace disco::testing
