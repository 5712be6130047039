#include <gtest/gtest.h>

#include <array>
#include <set>
#include <type_traits>
#include <utility>

#include "core/cuda_device.h"
#include "core/current_device.h"
#include "cuda_launcher.h"
#include "fake_cudart.h"
#include "support.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
// The table is called through its own types: they must be those of the real functions, but for the names of
// handles.
static_assert(std::is_same_v<decltype(&cudaEventQuery), cudaError_t (*)(cudaEvent_t)>);
static_assert(std::is_same_v<decltype(&cudaEventRecord), cudaError_t (*)(cudaEvent_t, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&cudaEventElapsedTime), cudaError_t (*)(float*, cudaEvent_t, cudaEvent_t)>);
static_assert(std::is_same_v<decltype(&cudaHostRegister), cudaError_t (*)(void*, size_t, unsigned)>);
static_assert(std::is_same_v<decltype(&cudaStreamCreateWithFlags), cudaError_t (*)(cudaStream_t*, unsigned)>);
static_assert(sizeof(cudaError_t) == sizeof(int) && sizeof(cudaMemcpyKind) == sizeof(int));
static_assert(sizeof(cudaStream_t) == sizeof(disco::CudaStream) &&
              sizeof(cudaEvent_t) == sizeof(disco::CudaEvent));
static_assert(cudaSuccess == 0 && cudaErrorNotReady == 600);
static_assert(cudaStreamNonBlocking == 1 && cudaEventDisableTiming == 2 && cudaHostRegisterPortable == 1);
static_assert(cudaHostRegisterReadOnly == 8 && cudaDevAttrHostRegisterReadOnlySupported == 113);
static_assert(cudaMemcpyHostToDevice == 1 && cudaMemcpyDeviceToHost == 2 && cudaMemcpyDefault == 4);
#if CUDART_VERSION >= 12080
static_assert(cudaMemcpySrcAccessOrderStream == 1 && sizeof(cudaMemcpyAttributes) == 24);
static_assert(offsetof(cudaMemcpyAttributes, flags) == 20 && sizeof(cudaMemLocation) == 8);
#endif
#endif

namespace disco::testing {
namespace {

struct Rig {
  Rig(std::uint64_t seed, int streams, int lookahead, const SceneOptions& size = {})
      : cudart(seed), scene(random_scene(seed, size)), checker(*scene), launcher(cudart, checker) {
    CudaDeviceOptions options;
    options.compute_streams = streams;
    options.window = seed % 5 == 4 ? 64 : 8;
    for (VertexDesc& vertex : scene->vertices)
      vertex.ns =
          static_cast<std::int64_t>((static_cast<std::uint64_t>(vertex.op + 1) * 37 + seed) % 11) * 9000;
    cudart.batches = std::array{0, 12, 13}[seed % 3];
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), options);
    launcher.targets = {device.get()};
    EngineOptions engine_options;
    engine_options.lookahead = lookahead;
    engine_options.dispatch = static_cast<Dispatch>(seed % 4);
    engine_options.copy_piece = seed % 2 == 0 ? 0 : 24;
    engine = std::make_unique<Engine>(scene->program(), one(std::move(device)), launcher, engine_options);
  }
  Status step(std::uint64_t number) { return run_step(*engine, checker, number); }

  FakeCudart cudart;
  std::unique_ptr<Scene> scene;
  Checker checker;
  Launcher launcher;
  std::unique_ptr<Engine> engine;
};

TEST(CudaDevice, NoVertexStartsBeforeItsPredecessors) {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    Rig rig(seed, 1 + static_cast<int>(seed % 3), static_cast<int>(seed / 3 % 4), {.vertices = 50});
    for (std::uint64_t step = 0; step < 3; ++step) {
      ASSERT_EQ(rig.step(step), Status::kDone) << "seed " << seed << " " << rig.engine->last_error().message;
      ASSERT_EQ(rig.checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(rig.checker.broken, 0) << "seed " << seed;
    }
  }
}

TEST(CudaDevice, AStepCreatesNothingAndEverythingIsGivenBack) {
  FakeCudart* cudart = nullptr;
  auto rig = std::make_unique<Rig>(1, 2, 2);
  cudart = &rig->cudart;
  const int created = cudart->created;
  EXPECT_EQ(created, (2 + 3) * (1 + 8) + 1);  // streams, their events, the clock
  for (std::uint64_t step = 0; step < 3; ++step) ASSERT_EQ(rig->step(step), Status::kDone);
  EXPECT_EQ(cudart->created, created);
  rig->engine.reset();
  EXPECT_EQ(cudart->objects(), 0);
}

TEST(CudaDevice, TheCallersCurrentDeviceIsLeftAlone) {
  FakeCudart cudart(0);
  cudart.contexts = {7};
  const CudaDevice device(FakeCudart::api(), {});
  EXPECT_EQ(cudart.device, 7);
}

TEST(CudaDevice, NoContextIsMadeOnADeviceThatHasNone) {
  FakeCudart cudart(0);
  const CudaDevice device(FakeCudart::api(), {});
  EXPECT_EQ(cudart.contexts, std::set<int>{0});
}

TEST(CudaDevice, WhereTheDeviceIsCurrentNothingIsSet) {
  FakeCudart cudart(0);
  cudart.device = 3;
  const CudartApi api = FakeCudart::api();
  {
    const CurrentDevice current(api, 3);
  }
  EXPECT_TRUE(cudart.contexts.empty());
  EXPECT_EQ(cudart.device, 3);
}

TEST(CudaDevice, TheDeviceIsSetBackWhereTheDriverCannotBeAsked) {
  FakeCudart cudart(0);
  cudart.driver_code = 3;  // not initialised
  const CudaDevice device(FakeCudart::api(), {});
  EXPECT_EQ(cudart.device, 7);
  cudart.device = 5;
  CudartApi without = FakeCudart::api();
  without.primary_context_state = nullptr;
  const CudaDevice other(without, {});
  EXPECT_EQ(cudart.device, 5);
}

TEST(CudaDevice, EveryFailingCallOfTheConstructorIsNamedAndLeaksNothing) {
  for (int at = 0;; ++at) {
    FakeCudart cudart(0);
    cudart.fail_at = at;
    try {
      CudaDeviceOptions options;
      options.window = 4;
      const CudaDevice device(FakeCudart::api(), options);
      // Setting the caller's device back may fail; there is nobody to tell.
      if (cudart.failed_call == "cudaSetDevice") continue;
      EXPECT_GT(at, 4 * 5);
      break;
    } catch (const CudaError& error) {
      EXPECT_EQ(error.call(), cudart.failed_call);
      EXPECT_EQ(error.code(), FakeCudart::kInvalidHandle);
      EXPECT_NE(std::string(error.what()).find(error.call()), std::string::npos);
      EXPECT_EQ(cudart.objects(), 0);
    }
  }
}

TEST(CudaDevice, EveryFailingCallOfAStepFailsThatStepOnly) {
  for (const bool traced : {false, true}) {
    int failures = 0;
    for (int at = 0; at < 400; ++at) {
      Rig rig(6, 2, 2, {.vertices = 30});
      rig.engine->set_tracing(traced);
      ASSERT_EQ(rig.step(0), Status::kDone);
      rig.cudart.calls = 0;
      rig.cudart.fail_at = at;
      const Status status = rig.step(1);
      if (rig.cudart.calls <= at) break;
      const std::string call = rig.cudart.failed_call;
      if (status == Status::kDone) {
        EXPECT_EQ(call, "cudaEventElapsedTime") << "a lost time stamp is no reason to fail, call " << at;
      } else {
        ASSERT_EQ(status, Status::kFailed) << "call " << at;
        EXPECT_NE(rig.engine->last_error().message.find(call + " failed with error 400"), std::string::npos);
        ++failures;
      }
      rig.cudart.fail_at = -1;
      const int before = rig.checker.broken;
      ASSERT_EQ(rig.step(2), Status::kDone) << "call " << at << " " << rig.engine->last_error().message;
      ASSERT_EQ(rig.checker.missing(), 0) << "call " << at;
      EXPECT_EQ(rig.checker.broken, before);
    }
    EXPECT_GT(failures, 30);
  }
}

TEST(CudaDevice, AnAsynchronousErrorListsWhatWasInFlight) {
  Rig rig(8, 1, 2);
  rig.cudart.fail_code = FakeCudart::kLaunchFailure;
  std::int32_t named = 0;
  for (int at = 0; at < 200; ++at) {
    rig.cudart.calls = 0;
    rig.cudart.fail_at = at;
    const Status status = rig.step(at);
    if (status == Status::kDone) break;
    const EngineError error = rig.engine->last_error();
    if (rig.cudart.failed_call == "cudaEventQuery") {
      EXPECT_NE(error.message.find("launch failure"), std::string::npos) << error.message;
      const std::vector<std::int32_t>& in_flight = error.unfinished.in_flight;
      ASSERT_FALSE(in_flight.empty());
      EXPECT_EQ(in_flight.front(), error.vertex);
      EXPECT_EQ(std::set<std::int32_t>(in_flight.begin(), in_flight.end()).size(), in_flight.size());
      EXPECT_LE(in_flight.size(), 8U);
      EXPECT_GE(error.unfinished.in_flight_count, static_cast<std::int32_t>(in_flight.size()));
      EXPECT_GE(error.vertex, 0);
      EXPECT_TRUE(error.later && error.lost);
      ++named;
    }
  }
  EXPECT_GT(named, 0);
}

TEST(CudaDevice, AnErrorThatStaysFailsEveryStepAndHangsNone) {
  for (int at = 0; at < 120; at += 3) {
    Rig rig(10, 2, 2, {.vertices = 30});
    rig.cudart.calls = 0;
    rig.cudart.fail_at = at;
    rig.cudart.fail_code = FakeCudart::kLaunchFailure;
    rig.cudart.sticky = true;
    std::uint64_t step = 0;
    Status status = rig.step(step++);
    while (status == Status::kDone && step < 20) status = rig.step(step++);
    ASSERT_EQ(status, Status::kFailed) << "call " << at;
    EXPECT_NE(rig.engine->last_error().message.find("launch failure"), std::string::npos);
    EXPECT_TRUE(rig.engine->last_error().lost) << "call " << at;
    ASSERT_EQ(rig.step(step), Status::kFailed) << "the next step says so too, call " << at;
    const FakeCudart* cudart = &rig.cudart;
    rig.engine.reset();
    EXPECT_EQ(cudart->objects(), 0);
  }
}

TEST(CudaDevice, AFailureWhereTheLoopThreadStartsIsTheConstructorsAndLeaksNothing) {
  int failures = 0;
  for (int at = 0;; ++at) {
    FakeCudart cudart(0);
    auto scene = random_scene(2, {.vertices = 20});
    Checker checker(*scene);
    Launcher launcher(cudart, checker);
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), CudaDeviceOptions{0, 1, 4, nullptr});
    launcher.targets = {device.get()};
    cudart.calls = 0;
    cudart.fail_at = at;
    try {
      const Engine engine(scene->program(), one(std::move(device)), launcher, {});
      EXPECT_LE(cudart.calls, at);
      break;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(cudart.failed_call), std::string::npos);
      EXPECT_EQ(cudart.objects(), 0);
      ++failures;
    }
  }
  EXPECT_GE(failures, 1);
}

TEST(CudaDevice, NoErrorIsLeftBehindForTheCaller) {
  for (int at = 0; at < 60; ++at) {
    Rig rig(14, 1, 1, {.vertices = 20});
    rig.engine->set_tracing(at % 2 == 1);
    rig.cudart.calls = 0;
    rig.cudart.fail_at = at;
    rig.step(0);
    rig.engine.reset();
    EXPECT_EQ(rig.cudart.last_error, 0) << "call " << at << " " << rig.cudart.failed_call;
  }
}

TEST(CudaDevice, TimingEventsThatCannotBeMadeFailTheTracedStepAndLeakNothing) {
  FakeCudart* cudart = nullptr;
  for (int at = 0; at < 40; at += 5) {
    Rig rig(18, 1, 1, {.vertices = 30});
    cudart = &rig.cudart;
    ASSERT_EQ(rig.step(0), Status::kDone);
    rig.engine->set_tracing(true);
    rig.cudart.calls = 0;
    rig.cudart.fail_at = at;
    ASSERT_EQ(rig.step(1), Status::kFailed) << "call " << at;
    EXPECT_EQ(rig.cudart.failed_call, "cudaEventCreateWithFlags");
    ASSERT_EQ(rig.step(2), Status::kDone) << rig.engine->last_error().message;
    EXPECT_FALSE(rig.engine->events().empty());
    rig.engine.reset();
    EXPECT_EQ(cudart->objects(), 0);
  }
}

TEST(CudaDevice, ALaunchThatThrowsFailsTheStepOnly) {
  Rig rig(12, 2, 2);
  for (std::int32_t v = 0; v < static_cast<std::int32_t>(rig.scene->vertices.size()); ++v) {
    if (rig.scene->vertices[v].kind != Kind::kKernel) continue;
    rig.launcher.throw_at = v;
    ASSERT_EQ(rig.step(2 * v), Status::kFailed);
    EXPECT_EQ(rig.engine->last_error().vertex, v);
    EXPECT_EQ(rig.engine->last_error().message, "no launch of " + std::to_string(v));
    rig.launcher.throw_at = -1;
    ASSERT_EQ(rig.step(2 * v + 1), Status::kDone);
    ASSERT_EQ(rig.checker.missing(), 0);
  }
  EXPECT_EQ(rig.checker.broken, 0);
}

TEST(CudaDevice, EventsComeFromTheDevicesClock) {
  Rig rig(16, 2, 2);
  rig.engine->set_tracing(true);
  ASSERT_EQ(rig.step(0), Status::kDone);
  const auto events = rig.engine->events();
  EXPECT_EQ(static_cast<std::int64_t>(events.size()), rig.engine->counters().vertices);
  for (const TraceEvent& event : events) EXPECT_LT(event.start, event.end);
}

TEST(CudaDevice, AnEventOfACopyInPiecesHoldsAllOfThem) {
  const auto copies = [](std::uint64_t seed) {
    Rig rig(seed, 1, 0, {.vertices = 30, .copies = 0.8, .words = 16});
    rig.engine->set_tracing(true);
    EXPECT_EQ(rig.step(0), Status::kDone);
    const auto events = rig.engine->events();
    EXPECT_EQ(static_cast<std::int64_t>(events.size()), rig.engine->counters().vertices);
    for (const TraceEvent& event : events) EXPECT_LT(event.start, event.end);
    return rig.cudart.copy_kinds.size();
  };
  EXPECT_GT(copies(21), 0U);
  Rig whole(20, 1, 0, {.vertices = 30, .copies = 0.8, .words = 16});
  EXPECT_EQ(whole.step(0), Status::kDone);
  std::size_t vertices = 0;
  for (const VertexDesc& vertex : whole.scene->vertices) {
    vertices += vertex.kind == Kind::kCopy || (vertex.kind == Kind::kInput && vertex.bytes > 0);
  }
  EXPECT_EQ(whole.cudart.copy_kinds.size(), vertices);
}

TEST(CudaDevice, CopiesSayTheirDirection) {
  Rig rig(20, 1, 0, {.vertices = 60, .copies = 0.8});
  ASSERT_EQ(rig.step(0), Status::kDone);
  for (const int kind : rig.cudart.copy_kinds) EXPECT_TRUE(kind == 1 || kind == 2 || kind == 4);
  EXPECT_FALSE(rig.cudart.copy_kinds.empty());
}

TEST(CudaDevice, PinningThatFailsSaysHowMuch) {
  FakeCudart cudart(0);
  {
    const PinnedRegion region(FakeCudart::api(), &cudart, 4096);
  }
  EXPECT_EQ(cudart.calls, 2);
  cudart.fail_at = 2;
  try {
    const PinnedRegion region(FakeCudart::api(), &cudart, 4096);
    FAIL();
  } catch (const CudaError& error) {
    EXPECT_NE(std::string(error.what()).find("4096 bytes"), std::string::npos);
  }
}

TEST(CudaDevice, MemoryThatIsOnlyReadIsRegisteredSoOrNotAtAll) {
  FakeCudart cudart(0);
  {
    const PinnedRegion region(FakeCudart::api(), &cudart, 4096);
    EXPECT_EQ(cudart.register_flags, 1u);
  }
  {
    const PinnedRegion region(FakeCudart::api(), &cudart, 4096, PinnedRegion::Access::kRead);
    EXPECT_EQ(cudart.register_flags, 9u);
  }
  cudart.registers_read_only = false;
  cudart.register_flags = 0;
  EXPECT_THROW(PinnedRegion(FakeCudart::api(), &cudart, 4096, PinnedRegion::Access::kRead), CudaError);
  EXPECT_EQ(cudart.register_flags, 0u);
}

TEST(CudaDevice, OptionsOutOfRangeAreRefused) {
  FakeCudart cudart(0);
  EXPECT_THROW(CudaDevice(FakeCudart::api(), {0, 0, 8, nullptr}), std::invalid_argument);
  EXPECT_THROW(CudaDevice(FakeCudart::api(), {0, 1, 0, nullptr}), std::invalid_argument);
}

TEST(CudaDevice, AWindowSmallerThanTheLookaheadFailsTheStepInWords) {
  FakeCudart cudart(0);
  auto scene = random_scene(4, {.vertices = 40, .copies = 0.0, .gate = false});
  Checker checker(*scene);
  Launcher launcher(cudart, checker);
  auto device = std::make_unique<CudaDevice>(FakeCudart::api(), CudaDeviceOptions{0, 1, 1, nullptr});
  launcher.targets = {device.get()};
  Engine engine(scene->program(), one(std::move(device)), launcher, {});
  ASSERT_EQ(run_step(engine, checker, 0), Status::kFailed);
  EXPECT_NE(engine.last_error().message.find("more than 1 vertices in flight"), std::string::npos);
}

TEST(CudaDevice, LoadingTheRuntimeWorksOrSaysWhatWasLookedFor) {
  try {
    const CudartApi api = CudartApi::load();
    EXPECT_NE(api.event_query, nullptr);
    EXPECT_NE(api.error_string, nullptr);
  } catch (const CudaError& error) {
    EXPECT_EQ(error.code(), -1);
    EXPECT_NE(std::string(error.what()).find("libcudart"), std::string::npos);
  }
}

}  // namespace
}  // namespace disco::testing
