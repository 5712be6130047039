// Segments, and the graphs that a GPU makes of them: what is launched as one, what it waits for, and what
// happens where that cannot be done.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/launch_graphs.h"
#include "cuda_launcher.h"
#include "fake_cudart.h"
#include "support.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
static_assert(cudaStreamCaptureModeThreadLocal == 1 && cudaStreamCaptureStatusActive == 1);
static_assert(cudaEventRecordExternal == 1 && cudaMemoryTypeDevice == 2);
static_assert(cudaGraphNodeTypeKernel == 0 && cudaGraphNodeTypeMemcpy == 1 && cudaGraphNodeTypeMemset == 2);
static_assert(cudaGraphNodeTypeEmpty == 5 && cudaGraphNodeTypeEventRecord == 7);
static_assert(offsetof(cudaMemcpy3DParms, srcPtr) == 4 * sizeof(void*));
static_assert(offsetof(cudaMemcpy3DParms, dstPtr) == 12 * sizeof(void*));
static_assert(sizeof(cudaMemcpy3DParms) <= 20 * sizeof(void*) && sizeof(cudaPointerAttributes) <= 280);
#endif

namespace disco::testing::graphs {
namespace {

constexpr std::int64_t kNs = 10'000;
constexpr std::int64_t kGraphBytes = 64 << 20;  // that graphs may take

VertexDesc kernel(std::int32_t op, std::uint8_t flags = 0, std::int64_t ns = kNs) {
  VertexDesc vertex;
  vertex.op = op;
  vertex.ns = ns;
  vertex.flags = flags;
  return vertex;
}

// Launches kernels that note their numbers; what they depend on, and what they do where they are recorded, a
// test changes.
class Noting final : public OpRunner {
 public:
  explicit Noting(FakeCudart& cudart) : cudart_(cudart) {}
  void run(std::int32_t op, int, int stream) override {
    const CudaStream on = device->launch_stream(stream);
    if (device->recording() && op == throws) throw std::runtime_error("op 5 asks for its result");
    if (device->recording() && op == waits) FakeCudart::api().stream_synchronize(on);
    const std::uintptr_t address = addresses[op];
    cudart_.launch(on, [this, op, address] { done.push_back({op, address}); }, op);
    if (op == copies) FakeCudart::api().memcpy_async(&there, &here, sizeof here, 4, on);
  }
  bool repeats(std::int32_t op, int) override { return op != draws; }
  void before_recording(int, int stream) override {
    cudart_.launch(device->launch_stream(stream), [this] { done.push_back({-1, 0}); });
  }
  void depends_on(std::int32_t op, std::vector<std::uint64_t>& words) override {
    if (op == external) words.push_back(addresses[op]);
  }
  void settings(std::vector<std::uint64_t>& words) override { words.push_back(setting); }

  CudaDevice* device = nullptr;
  std::int32_t draws = -1, external = -1, throws = -1, waits = -1, copies = -1;
  std::uint64_t setting = 0;
  std::map<std::int32_t, std::uintptr_t> addresses;
  std::vector<std::pair<std::int32_t, std::uintptr_t>> done;
  std::uint64_t here = 0, there = 0;

 private:
  FakeCudart& cudart_;
};

// An engine for the given program on a fake GPU that makes graphs.
struct Bench {
  explicit Bench(Program program, EngineOptions options = {}, std::int32_t draws = -1,
                 int compute_streams = 1)
      : cudart(1), runner(cudart) {
    CudaDeviceOptions on_device{0, compute_streams, 64, nullptr};
    on_device.graphs = true;
    on_device.graph_bytes = kGraphBytes;
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), on_device);
    runner.device = device.get();
    runner.draws = draws;
    options.graphs = true;
    engine = std::make_unique<Engine>(std::move(program), one(std::move(device)), runner, options);
  }
  Status step() {
    runner.done.clear();
    engine->begin();
    const Status out = engine->wait_out(kPatience);
    if (out != Status::kDone) return out;
    engine->deliver();
    return engine->wait_end(kPatience);
  }
  // Kernels in the order in which they ran.
  std::vector<std::int32_t> order() const {
    std::vector<std::int32_t> ops;
    for (const auto& [op, address] : runner.done) ops.push_back(op);
    return ops;
  }
  std::int64_t launches() const { return engine->counters().launches; }
  GraphFigures figures() const { return engine->graph_figures(); }

  FakeCudart cudart;
  Noting runner;
  std::unique_ptr<Engine> engine;
};

// Kernels of so many nanoseconds, each behind the one before.
Program chain_of(int kernels, std::int64_t ns = kNs) {
  ProgramBuilder builder;
  for (int v = 0; v < kernels; ++v) {
    builder.add(kernel(v, 0, ns));
    if (v > 0) builder.edge(v - 1, v);
  }
  return std::move(builder).build();
}

std::vector<std::int32_t> numbers(int count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = i;
  return all;
}

TEST(LaunchGraphs, AChainIsLaunchedInFewCallsFromTheSecondStepOn) {
  constexpr int kKernels = 200;
  Bench bench(chain_of(kKernels));
  ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), kKernels) << "the first step warms up";
  EXPECT_EQ(bench.figures().graphs, 0);
  for (int step = 1; step < 5; ++step) {
    ASSERT_EQ(bench.step(), Status::kDone) << bench.engine->last_error().message;
    EXPECT_EQ(bench.order(), numbers(kKernels));
    EXPECT_EQ(bench.launches(), 4);
  }
  EXPECT_EQ(bench.figures().graphs, 4);
  EXPECT_EQ(bench.figures().kernels, kKernels);
  EXPECT_EQ(bench.figures().bytes, 4 * 4096);
  EXPECT_EQ(bench.cudart.named["cudaGraphInstantiateWithFlags"], 4) << "once each";
  FakeCudart& cudart = bench.cudart;
  bench.engine.reset();
  EXPECT_EQ(cudart.objects(), 0);
}

TEST(LaunchGraphs, LongKernelsMakeShortGraphsAndFewKernelsNone) {
  {
    Bench bench(chain_of(100, 90'000));
    for (int step = 0; step < 2; ++step) ASSERT_EQ(bench.step(), Status::kDone);
    EXPECT_EQ(bench.launches(), 10) << "of a millisecond, eleven kernels at most, and one behind";
  }
  Bench few(chain_of(3));
  for (int step = 0; step < 3; ++step) ASSERT_EQ(few.step(), Status::kDone);
  EXPECT_EQ(few.launches(), 3);
}

TEST(LaunchGraphs, TheyAreOffWhereKernelsWaitForEachOtherOrStreamsAreShared) {
  EngineOptions without;
  without.lookahead = 0;
  EngineOptions fixed;
  fixed.dispatch = Dispatch::kFixed;
  for (const EngineOptions& options : {without, fixed}) {
    Bench bench(chain_of(20), options);
    for (int step = 0; step < 3; ++step) ASSERT_EQ(bench.step(), Status::kDone);
    EXPECT_EQ(bench.launches(), 20);
  }
  Bench shared(chain_of(20), {}, -1, 2);
  for (int step = 0; step < 3; ++step) ASSERT_EQ(shared.step(), Status::kDone);
  EXPECT_EQ(shared.launches(), 20);
}

// Kernels 0 to 19 in a row; a copy waits for 4, and 12 for the copy.
TEST(LaunchGraphs, ACopyWaitsForItsKernelAloneAndIsWaitedForInFrontOfAGraph) {
  std::uint64_t from = 4711, to = 0;
  ProgramBuilder builder;
  std::int32_t copy = -1;
  for (int op = 0; op < 20; ++op) {
    if (op == 10) copy = builder.add({Kind::kCopy, 0, -1, &to, &from, 8, 0, Direction::kDeviceToHost});
    const std::int32_t v = builder.add(kernel(op));
    if (op > 0) builder.edge(v - (op == 10 ? 2 : 1), v);
    if (op == 12) builder.edge(copy, v);
  }
  builder.edge(4, copy);
  Bench bench(std::move(builder).build());
  ASSERT_EQ(bench.step(), Status::kDone);
  CudaStream down = nullptr;
  down = bench.runner.device->native_stream(bench.runner.device->lane(Direction::kDeviceToHost));
  for (int step = 1; step < 4; ++step) {
    bench.runner.done.clear();
    bench.cudart.hold(down);
    bench.engine->begin();
    EXPECT_EQ(bench.engine->wait_end(0.05), Status::kTimeout);
    bench.cudart.hold(nullptr);
    ASSERT_EQ(bench.engine->wait_end(kPatience), Status::kDone) << bench.engine->last_error().message;
    EXPECT_EQ(bench.order(), numbers(20));
    EXPECT_EQ(bench.launches(), 2);
    EXPECT_EQ(to, from);
    to = 0;
  }
}

// The copy must begin while the kernels behind its own still wait.
TEST(LaunchGraphs, ACopyBeginsBeforeTheGraphEnds) {
  std::uint64_t from = 4711, to = 0;
  ProgramBuilder builder;
  for (int op = 0; op < 12; ++op) {
    builder.add(kernel(op));
    if (op > 0) builder.edge(op - 1, op);
  }
  builder.edge(5, builder.add({Kind::kCopy, 0, -1, &to, &from, 8, kOut, Direction::kDeviceToHost}));
  Bench bench(std::move(builder).build());
  for (int step = 0; step < 3; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 1);
  bench.cudart.held_tag = 9;
  to = 0;
  bench.engine->begin();
  EXPECT_EQ(bench.engine->wait_out(5.0), Status::kDone);
  EXPECT_EQ(to, from);
  EXPECT_EQ(bench.engine->wait_end(0.05), Status::kTimeout);
  bench.cudart.held_tag = -1;
  EXPECT_EQ(bench.engine->wait_end(kPatience), Status::kDone);
}

TEST(LaunchGraphs, NoneSpansTheGate) {
  ProgramBuilder builder;
  for (int op = 0; op < 10; ++op) {
    builder.add(kernel(op, op == 9 ? kOut : 0));
    if (op > 0) builder.edge(op - 1, op);
  }
  VertexDesc gate;
  gate.kind = Kind::kInput;
  gate.flags = kLate;
  builder.add(gate);
  for (int op = 10; op < 20; ++op) {
    const std::int32_t v = builder.add(kernel(op));
    builder.edge(op == 10 ? 9 : v - 1, v);
    if (op == 12) builder.edge(10, v);  // 10 and 11 may run before
  }
  Bench bench(std::move(builder).build());
  for (int step = 0; step < 4; ++step) {
    ASSERT_EQ(bench.step(), Status::kDone) << bench.engine->last_error().message;
    EXPECT_EQ(bench.order(), numbers(20));
  }
  EXPECT_EQ(bench.launches(), 2) << "0 to 11 and 12 to 19";
}

TEST(LaunchGraphs, AKernelThatDrawsIsLaunchedAlone) {
  Bench bench(chain_of(20), {}, 10);
  for (int step = 0; step < 3; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 3);
  EXPECT_EQ(bench.order(), numbers(20));
  EXPECT_EQ(bench.figures().refused, "");
}

TEST(LaunchGraphs, AnAddressThatMovesIsFollowed) {
  Bench bench(chain_of(20));
  bench.runner.external = 7;
  const auto step_at = [&](std::uintptr_t address) {
    bench.runner.addresses[7] = address;
    ASSERT_EQ(bench.step(), Status::kDone) << bench.engine->last_error().message;
    EXPECT_EQ(bench.order(), numbers(20));
    EXPECT_EQ(bench.runner.done.at(7).second, address);
  };
  step_at(100);
  step_at(100);
  EXPECT_EQ(bench.launches(), 1);
  step_at(200);
  EXPECT_EQ(bench.launches(), 1) << "recorded anew";
  EXPECT_EQ(bench.cudart.named["cudaGraphInstantiateWithFlags"], 2);
  step_at(100);
  EXPECT_EQ(bench.launches(), 20) << "it moves: one by one, and from the next step on without it";
  for (const std::uintptr_t address : {300, 400, 500}) step_at(address);
  EXPECT_EQ(bench.launches(), 3);
  EXPECT_EQ(bench.figures().graphs, 2);
  FakeCudart& cudart = bench.cudart;
  bench.engine.reset();
  EXPECT_EQ(cudart.objects(), 0);
}

TEST(LaunchGraphs, UnderOtherSettingsKernelsAreLaunchedOneByOne) {
  Bench bench(chain_of(20));
  for (int step = 0; step < 2; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  bench.runner.setting = 1;
  ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 20);
  bench.runner.setting = 0;
  ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 1);
}

// 5 throws, waits for the stream, or copies from the host while it is recorded.
TEST(LaunchGraphs, WhatCannotBeRecordedIsLeftOutAndTheStepIsRight) {
  for (int kind = 0; kind < 3; ++kind) {
    Bench bench(chain_of(20));
    bench.cudart.host_memory = {&bench.runner.here};
    (kind == 0 ? bench.runner.throws : kind == 1 ? bench.runner.waits : bench.runner.copies) = 5;
    for (int step = 0; step < 5; ++step) {
      ASSERT_EQ(bench.step(), Status::kDone) << "kind " << kind << " " << bench.engine->last_error().message;
      EXPECT_EQ(bench.order(), numbers(20));
    }
    // Which kernel copied nobody can tell: none of its segment is in a graph.
    EXPECT_EQ(bench.launches(), kind == 2 ? 20 : 3);
    EXPECT_EQ(bench.figures().refused, kind == 0   ? "op 5 asks for its result"
                                       : kind == 1 ? "the runtime cannot record it"
                                                   : "a kernel copies from or to the host");
    EXPECT_EQ(bench.cudart.last_error, 0);
    FakeCudart& cudart = bench.cudart;
    bench.engine.reset();
    EXPECT_EQ(cudart.objects(), 0);
  }
}

TEST(LaunchGraphs, EveryFailingCallLeavesTheStepsRight) {
  int refused = 0, failed = 0;
  for (int at = 0; at < 400; ++at) {
    Bench bench(chain_of(20));
    ASSERT_EQ(bench.step(), Status::kDone);
    bench.cudart.calls = 0;
    bench.cudart.fail_at = at;
    const Status status = bench.step();
    if (bench.cudart.calls <= at) break;
    bench.cudart.fail_at = -1;
    if (status == Status::kDone) {
      EXPECT_EQ(bench.order(), numbers(20)) << bench.cudart.failed_call;
      refused += bench.figures().refused.empty() ? 0 : 1;
    } else {
      ASSERT_EQ(status, Status::kFailed) << bench.cudart.failed_call;
      ++failed;
    }
    for (int step = 0; step < 3; ++step) {
      ASSERT_EQ(bench.step(), Status::kDone) << bench.cudart.failed_call;
      EXPECT_EQ(bench.order(), numbers(20)) << bench.cudart.failed_call;
    }
    EXPECT_EQ(bench.cudart.last_error, 0) << bench.cudart.failed_call;
    FakeCudart& cudart = bench.cudart;
    bench.engine.reset();
    EXPECT_EQ(cudart.objects(), 0);
  }
  EXPECT_GT(refused, 8);
  EXPECT_GT(failed, 1);
}

// Of those that exceed it the last is given back.
TEST(LaunchGraphs, ThoseThatTakeTooMuchMemoryAreNotMade) {
  for (const auto& [each, kept] : {std::pair{kGraphBytes / 4, 4}, std::pair{kGraphBytes / 3, 3}}) {
    Bench bench(chain_of(640));
    bench.cudart.graph_bytes = static_cast<std::size_t>(each);
    for (int step = 0; step < 5; ++step) {
      ASSERT_EQ(bench.step(), Status::kDone);
      EXPECT_EQ(bench.order(), numbers(640));
    }
    EXPECT_EQ(bench.figures().graphs, kept);
    EXPECT_EQ(bench.figures().bytes, kept * each);
    EXPECT_EQ(bench.launches(), kept + (10 - kept) * 64);
    EXPECT_NE(bench.figures().refused.find("graphs "), std::string::npos);
  }
}

// What one engine has taken, another with the same memory cannot take; when the first is gone, it can.
TEST(LaunchGraphs, EnginesThatShareTheirMemoryTakeNoMoreTogether) {
  FakeCudart cudart(1);
  cudart.graph_bytes = kGraphBytes / 4;
  Noting runner(cudart);
  CudaDeviceOptions options;
  options.graphs = true;
  options.graph_bytes = kGraphBytes;
  options.graph_memory = std::make_shared<GraphMemory>();
  const auto engine_of = [&](int kernels) {
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), options);
    runner.device = device.get();
    EngineOptions with_graphs;
    with_graphs.graphs = true;
    return std::make_unique<Engine>(chain_of(kernels), one(std::move(device)), runner, with_graphs);
  };
  const auto steps = [&](Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      engine.begin();
      ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    }
  };
  auto first = engine_of(192);
  steps(*first);
  EXPECT_EQ(first->graph_figures().graphs, 3);
  auto second = engine_of(192);
  steps(*second);
  EXPECT_EQ(second->graph_figures().graphs, 1);
  EXPECT_EQ(options.graph_memory->taken, kGraphBytes);
  first.reset();
  EXPECT_EQ(options.graph_memory->taken, kGraphBytes / 4);
  second.reset();
  EXPECT_EQ(options.graph_memory->taken, 0);
  auto third = engine_of(192);
  steps(*third);
  EXPECT_EQ(third->graph_figures().graphs, 3);
}

TEST(LaunchGraphs, TracedStepsAreRunKernelByKernel) {
  Bench bench(chain_of(20));
  for (int step = 0; step < 2; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  bench.engine->set_tracing(true);
  ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 20);
  EXPECT_EQ(bench.engine->events().size(), 20U);
  for (const TraceEvent& event : bench.engine->events()) EXPECT_LT(event.start, event.end);
  bench.engine->set_tracing(false);
  ASSERT_EQ(bench.step(), Status::kDone);
  EXPECT_EQ(bench.launches(), 1);
}

TEST(LaunchGraphs, AFaultNamesTheKernelsOfTheGraphs) {
  Bench bench(chain_of(40));
  for (int step = 0; step < 2; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  bench.cudart.held_tag = 0;
  bench.cudart.calls = 0;
  bench.cudart.fail_code = FakeCudart::kLaunchFailure;
  bench.cudart.sticky = true;
  bench.cudart.fail_at = 50;
  ASSERT_EQ(bench.step(), Status::kFailed);
  const EngineError error = bench.engine->last_error();
  EXPECT_TRUE(error.later && error.lost);
  EXPECT_EQ(error.unfinished.in_flight, numbers(8));
  EXPECT_EQ(error.unfinished.in_flight_count, 40);
}

TEST(LaunchGraphs, AStepIsAbandonedWhileAGraphRuns) {
  Bench bench(chain_of(200));
  for (int step = 0; step < 3; ++step) ASSERT_EQ(bench.step(), Status::kDone);
  bench.cudart.held_tag = 30;
  bench.engine->begin();
  EXPECT_EQ(bench.engine->wait_end(0.02), Status::kTimeout);
  EXPECT_FALSE(bench.engine->abort(0.01)) << "the graph does not end";
  bench.cudart.held_tag = -1;
  EXPECT_TRUE(bench.engine->abort(kPatience));
  ASSERT_EQ(bench.step(), Status::kDone) << bench.engine->last_error().message;
  EXPECT_EQ(bench.order(), numbers(200));
  EXPECT_EQ(bench.launches(), 4);
}

TEST(LaunchGraphs, TheTrialFindsOutWhetherEventsAreResetAtTheLaunch) {
  FakeCudart cudart(3);
  EXPECT_EQ(LaunchGraphs::trial(FakeCudart::api()), "");
  cudart.events_reset = false;
  EXPECT_NE(LaunchGraphs::trial(FakeCudart::api()).find("counts as done"), std::string::npos);
  cudart.events_reset = true;
  CudartApi without = FakeCudart::api();
  without.graphs.launch = nullptr;
  EXPECT_NE(LaunchGraphs::trial(without).find("lacks functions"), std::string::npos);
  const int calls = cudart.calls;
  EXPECT_EQ(LaunchGraphs::trial(FakeCudart::api()), "");
  const int needed = cudart.calls - calls;
  for (int at = 0; at < needed - 1; ++at) {  // the last one is for what has gone wrong
    cudart.calls = 0;
    cudart.fail_at = at;
    EXPECT_NE(LaunchGraphs::trial(FakeCudart::api()), "") << cudart.failed_call;
    EXPECT_EQ(cudart.objects(), 0) << cudart.failed_call;
  }
}

// Random programs: copies in both directions, memory that is written over, the gate, streams in any order;
// kernels that draw.
TEST(LaunchGraphs, NoVertexStartsBeforeItsPredecessors) {
  std::int64_t in_graphs = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const SceneOptions size{.vertices = 120, .copies = seed % 3 * 0.1, .gate = seed % 2 == 0, .reuse = 0.3};
    FakeCudart cudart(seed);
    const auto scene = random_scene(seed, size);
    Checker checker(*scene);
    Launcher launcher(cudart, checker);
    launcher.draws = seed % 4 == 0 ? 3 : -1;
    for (VertexDesc& vertex : scene->vertices) vertex.ns = 1000 * static_cast<std::int64_t>(seed % 7);
    CudaDeviceOptions on_device{0, 1, seed % 5 == 4 ? 64 : 8, nullptr};
    on_device.graphs = true;
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), on_device);
    launcher.targets = {device.get()};
    EngineOptions options;
    options.graphs = true;
    options.lookahead = 1 + static_cast<int>(seed % 3);
    options.dispatch = seed % 2 == 0 ? Dispatch::kPriority : Dispatch::kRandom;
    Engine engine(scene->program(), one(std::move(device)), launcher, options);
    for (std::uint64_t step = 0; step < 5; ++step) {
      launcher.throw_at = step == 3 && seed % 3 == 0 ? static_cast<std::int32_t>(seed) : -1;
      const Status status = run_step(engine, checker, step);
      if (launcher.throw_at >= 0 && status == Status::kFailed) continue;
      ASSERT_EQ(status, Status::kDone) << "seed " << seed << " " << engine.last_error().message;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed;
    }
    in_graphs += engine.graph_figures().kernels;
  }
  EXPECT_GT(in_graphs, 1000);
}

}  // namespace
}  // namespace disco::testing::graphs
