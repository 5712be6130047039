// What the ends of kernels cost where no event is recorded behind each, and that nobody goes without one.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/cuda_device.h"
#include "fake_cudart.h"
#include "support.h"

namespace disco::testing {
namespace {

// Launches kernels that note their numbers. Kernel `held` does not start before open(): until then its stream
// waits for an event of another one, of which nothing is done.
class Noting final : public OpRunner {
 public:
  explicit Noting(FakeCudart& cudart) : cudart_(cudart) {
    api_.stream_create(&gate_, 0);
    api_.event_create(&opened_, 0);
    cudart_.hold(gate_);
    api_.event_record(opened_, gate_);
  }
  void run(std::int32_t op, int, int stream) override {
    if (op == held) api_.stream_wait_event(device->native_stream(stream), opened_, 0);
    cudart_.launch(device->native_stream(stream), [this, op] { done.push_back(op); });
  }
  void open() { cudart_.hold(nullptr); }

  CudaDevice* device = nullptr;
  std::int32_t held = -1;
  std::vector<std::int32_t> done;

 private:
  FakeCudart& cudart_;
  const CudartApi api_ = FakeCudart::api();
  CudaStream gate_ = nullptr;
  CudaEvent opened_ = nullptr;
};

struct Bench {
  explicit Bench(int compute_streams = 1, std::uint64_t seed = 0) : cudart(seed), runner(cudart) {
    device =
        std::make_unique<CudaDevice>(FakeCudart::api(), CudaDeviceOptions{0, compute_streams, 64, nullptr});
    runner.device = device.get();
  }
  void connect() {
    class Nobody final : public ProgressListener {
      void on_progress() noexcept override {}
    };
    static Nobody nobody;
    device->connect(0, runner, nobody);
  }
  // Until `token` of `stream` is told of, or for a while.
  bool ends(int stream, Token token) {
    for (int i = 0; i < 200; ++i) {
      if (device->completed(stream) >= token) return true;
    }
    return false;
  }
  int records() { return cudart.named["cudaEventRecord"]; }

  FakeCudart cudart;
  Noting runner;
  std::unique_ptr<CudaDevice> device;
};

VertexDesc kernel(std::int32_t op, std::int64_t ns) {
  VertexDesc vertex;
  vertex.op = op;
  vertex.ns = ns;
  return vertex;
}

// Kernels of so many nanoseconds, each behind the one before.
Program chain_of(int kernels, std::int64_t ns) {
  ProgramBuilder builder;
  for (int v = 0; v < kernels; ++v) {
    builder.add(kernel(v, ns));
    if (v > 0) builder.edge(v - 1, v);
  }
  return std::move(builder).build();
}

TEST(CudaEvents, AChainOfShortKernelsCostsFewCallsBesideTheirLaunches) {
  constexpr int kKernels = 1000;
  constexpr std::int64_t kNs = 10'000;
  for (const int lookahead : {0, 1, 2}) {
    Bench bench;
    EngineOptions options;
    options.lookahead = lookahead;
    bench.cudart.named.clear();
    Engine engine(chain_of(kKernels, kNs), one(std::move(bench.device)), bench.runner, options);
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
    EXPECT_EQ(bench.runner.done.size(), static_cast<std::size_t>(kKernels));
    EXPECT_TRUE(std::is_sorted(bench.runner.done.begin(), bench.runner.done.end()));
    EXPECT_EQ(bench.cudart.named["cudaStreamWaitEvent"], 0);
    // One for each half of the window in time, and now and then one of an idle loop thread.
    const int most =
        lookahead == 0 ? kKernels : 3 * kKernels * static_cast<int>(kNs) / static_cast<int>(kHorizonNs);
    EXPECT_LE(bench.records(), most) << "K = " << lookahead;
    EXPECT_GE(bench.records(), lookahead == 0 ? kKernels : 1);
  }
}

// Kernel 9 hangs. Kernel 5 is handed out, or what a copy that waits for it alone brings to the host, all the
// same.
TEST(CudaEvents, AnEdgeThatLeavesTheStreamDoesNotWaitForWhatIsQueuedBehind) {
  for (const bool copied : {false, true}) {
    Bench bench;
    bench.runner.held = 9;
    std::uint64_t from = 4711, to = 0;
    ProgramBuilder builder;
    for (int v = 0; v < 12; ++v) {
      VertexDesc vertex = kernel(v, 5'000);
      if (v == 5 && !copied) vertex.flags = kOut;
      builder.add(vertex);
      if (v > 0) builder.edge(v - 1, v);
    }
    if (copied)
      builder.edge(5, builder.add({Kind::kCopy, 0, -1, &to, &from, 8, kOut, Direction::kDeviceToHost}));
    Engine engine(std::move(builder).build(), one(std::move(bench.device)), bench.runner, {});
    engine.begin();
    EXPECT_EQ(engine.wait_out(5.0), Status::kDone);
    EXPECT_EQ(to, copied ? from : 0);
    EXPECT_EQ(engine.wait_end(0.05), Status::kTimeout);
    bench.runner.open();
    EXPECT_EQ(engine.wait_end(kPatience), Status::kDone);
  }
}

TEST(CudaEvents, AKernelWithoutAMarkIsToldOfInTheEnd) {
  Bench bench;
  bench.connect();
  const int before = bench.records();
  Token token = 0;
  for (int op = 0; op < 40; ++op) {
    token = bench.device->enqueue_op(0, op, op);
    bench.device->completed(0);
  }
  EXPECT_EQ(bench.records(), before) << "more is coming";
  EXPECT_TRUE(bench.ends(0, token));
  EXPECT_EQ(bench.records(), before + 1);
  EXPECT_EQ(bench.runner.done.size(), 40U);
}

TEST(CudaEvents, AMarkTellsOfWhatCameBeforeItAndOfNothingElse) {
  Bench bench;
  bench.connect();
  bench.runner.held = 3;
  Token marked = 0;
  for (int op = 0; op < 6; ++op) {
    const Token token = bench.device->enqueue_op(0, op, op);
    if (op == 2) {
      marked = token;
      bench.device->mark(0);
    }
  }
  EXPECT_TRUE(bench.ends(0, marked));
  EXPECT_FALSE(bench.ends(0, marked + 1));
  EXPECT_EQ(bench.device->completed(0), marked);
  bench.runner.open();
  EXPECT_TRUE(bench.ends(0, 6));
}

// Stream 1 waits for token 2 of stream 0: kernel 1.
TEST(CudaEvents, AWaitForATokenWithoutAnEventTakesTheNextOneOrANewOne) {
  for (const int mark_behind : {-1, 0, 1, 2, 4}) {
    for (std::int32_t held = 0; held < 6; ++held) {
      Bench bench(2, static_cast<std::uint64_t>(held));
      bench.connect();
      bench.runner.held = held;
      for (int op = 0; op < 6; ++op) {
        bench.device->enqueue_op(0, op, op);
        if (op == mark_behind) bench.device->mark(0);
      }
      const int before = bench.records();
      bench.device->wait(1, 0, 2);
      const int waited_for = mark_behind < 1 ? 5 : mark_behind;
      EXPECT_EQ(bench.records() - before, mark_behind < 1 ? 1 : 0);
      const Token token = bench.device->enqueue_op(1, 10, 10);
      EXPECT_EQ(bench.ends(1, token), held > waited_for)
          << "mark behind " << mark_behind << ", held " << held;
      bench.runner.open();
      EXPECT_TRUE(bench.ends(1, token));
      const auto at = [&](int op) {
        return std::find(bench.runner.done.begin(), bench.runner.done.end(), op);
      };
      EXPECT_LT(at(1), at(10));
    }
  }
}

// One after the other in a ring that is as long as what is in flight.
TEST(CudaEvents, TheRingIsUsedAgainOnlyWhereItsKernelsHaveEnded) {
  Bench bench;
  bench.connect();
  bench.runner.held = 0;
  Token token = 0;
  for (int op = 0; op < 64; ++op) token = bench.device->enqueue_op(0, op, op);
  EXPECT_THROW(bench.device->enqueue_op(0, 64, 64), std::logic_error);
  EXPECT_FALSE(bench.ends(0, 1));
  EXPECT_THROW(bench.device->enqueue_op(0, 64, 64), std::logic_error);
  bench.runner.open();
  EXPECT_TRUE(bench.ends(0, token));
  EXPECT_EQ(bench.device->enqueue_op(0, 64, 64), token + 1);
  EXPECT_LT(bench.device->completed(0), token + 1);
  EXPECT_TRUE(bench.ends(0, token + 1));
}

// After a mark that the runtime refused nothing is left behind.
TEST(CudaEvents, AMarkThatIsRefusedFailsTheStepAlone) {
  for (int at = 0; at < 60; ++at) {
    Bench bench;
    Engine engine(chain_of(40, 30'000), one(std::move(bench.device)), bench.runner, {});
    bench.cudart.calls = 0;
    bench.cudart.fail_at = at;
    engine.begin();
    const Status status = engine.wait_end(kPatience);
    if (bench.cudart.failed_call.empty()) break;
    ASSERT_EQ(status, Status::kFailed) << "call " << at;
    EXPECT_NE(engine.last_error().message.find(bench.cudart.failed_call), std::string::npos);
    bench.cudart.fail_at = -1;
    bench.runner.done.clear();
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
    EXPECT_EQ(bench.runner.done.size(), 40U);
  }
}

// A kernel's fault is told by the next call, often a mark: kernels without an event are named all the same.
TEST(CudaEvents, AFaultThatAnyCallTellsNamesKernelsInFlight) {
  for (int at = 0; at < 60; ++at) {
    Bench bench;
    Engine engine(chain_of(40, 30'000), one(std::move(bench.device)), bench.runner, {});
    bench.cudart.calls = 0;
    bench.cudart.sticky = true;
    bench.cudart.fail_at = at;
    engine.begin();
    const Status status = engine.wait_end(kPatience);
    if (bench.cudart.failed_call.empty()) break;
    ASSERT_EQ(status, Status::kFailed) << "call " << at;
    EXPECT_GT(engine.last_error().unfinished.in_flight_count, 0) << "call " << at;
  }
}

}  // namespace
}  // namespace disco::testing
