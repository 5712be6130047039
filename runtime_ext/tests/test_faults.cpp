#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

std::unique_ptr<Engine> engine_on(int kind, Scene& scene, Checker& checker, std::uint64_t seed) {
  EngineOptions options;
  options.dispatch = static_cast<Dispatch>(seed % 3);
  options.seed = seed;
  if (kind == 0) return std::make_unique<Engine>(scene.program(), host(), checker, options);
  if (kind == 1) return std::make_unique<Engine>(scene.program(), host(2, 0.0, false), checker, options);
  if (kind == 3) return std::make_unique<Engine>(scene.program(), hosts(3, {}), checker, options);
  return std::make_unique<Engine>(scene.program(), one(std::make_unique<PolledDevice>(2, seed)), checker,
                                  options);
}

TEST(Faults, AnOpThatThrowsIsNamedAndTheNextStepWorks) {
  for (int kind = 0; kind < 4; ++kind) {
    auto scene = random_scene(11 + kind, {.devices = kind == 3 ? 3 : 1, .reuse = 0.3});
    std::int64_t changing = 0;
    for (VertexDesc& vertex : scene->vertices) {
      if (vertex.kind != Kind::kKernel || vertex.op % 3 != 0) continue;
      vertex.flags |= kChanges;
      ++changing;
    }
    Checker checker(*scene);
    const auto engine = engine_on(kind, *scene, checker, kind);
    std::uint64_t step = 0;
    for (std::int32_t v = 0; v < static_cast<std::int32_t>(scene->vertices.size()); ++v) {
      if (scene->vertices[v].kind != Kind::kKernel) continue;
      checker.fail_at = v;
      ASSERT_EQ(run_step(*engine, checker, step++), Status::kFailed) << "kind " << kind << " vertex " << v;
      const EngineError error = engine->last_error();
      EXPECT_EQ(error.vertex, v);
      EXPECT_EQ(error.message, "op " + std::to_string(v) + " was told to fail");
      EXPECT_FALSE(error.draining);
      for (const std::int32_t s : engine->program().successors_of(v)) EXPECT_FALSE(checker.ran(s));
      std::int64_t changed = 0;
      for (std::int32_t w = 0; w < engine->program().size(); ++w) {
        if (engine->program().changes(w) && (w == v || checker.ran(w))) ++changed;
      }
      EXPECT_GE(engine->counters().changes, changed);
      EXPECT_LE(engine->counters().changes, changing);
      checker.fail_at = -1;
      ASSERT_EQ(run_step(*engine, checker, step++), Status::kDone) << "kind " << kind << " vertex " << v;
      ASSERT_EQ(checker.missing(), 0);
      EXPECT_EQ(engine->counters().changes, changing);
    }
    EXPECT_EQ(checker.broken, 0);
  }
}

TEST(Faults, AThrownValueThatIsNoExceptionIsReported) {
  class Thrower final : public OpRunner {
   public:
    void run(std::int32_t, int, int) override { throw 42; }
  } thrower;
  for (const bool inline_compute : {true, false}) {
    ProgramBuilder builder;
    VertexDesc vertex;
    vertex.op = 0;
    builder.add(vertex);
    Engine engine(std::move(builder).build(), host(1, 0.0, inline_compute), thrower, {});
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kFailed);
    EXPECT_EQ(engine.last_error().vertex, 0);
    EXPECT_NE(engine.last_error().message.find("not a std::exception"), std::string::npos);
  }
}

TEST(Faults, AbortAtAnyMomentDrainsAndTheNextStepWorks) {
  for (int kind = 0; kind < 4; ++kind) {
    auto scene = random_scene(21 + kind, {.vertices = 60, .devices = kind == 3 ? 3 : 1});
    Checker checker(*scene);
    const auto engine = engine_on(kind, *scene, checker, kind);
    Random random;
    random.seed(kind);
    int aborted = 0;
    checker.before_return = [](std::int32_t op) {
      if (op % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    };
    for (std::uint64_t step = 0; step < 100; ++step) {
      checker.begin(step);
      engine->begin();
      const std::chrono::microseconds pause(random.below(300));
      const auto abort = [&] {
        std::this_thread::sleep_for(pause);
        EXPECT_TRUE(engine->abort(kPatience));
      };
      Status status = Status::kDone;
      if (step % 2 == 0) {
        std::thread aborter(abort);
        status = engine->wait_out(kPatience);
        if (status == Status::kDone) {
          engine->deliver();  // accepted, too, when abort() has just ended the step
          status = engine->wait_end(kPatience);
        }
        aborter.join();
      } else {
        abort();
        status = engine->wait_end(kPatience);
      }
      ASSERT_TRUE(status == Status::kDone || status == Status::kAborted);
      aborted += status == Status::kAborted ? 1 : 0;
      ASSERT_EQ(run_step(*engine, checker, 1000 + step), Status::kDone);
      ASSERT_EQ(checker.missing(), 0);
    }
    EXPECT_GT(aborted, 0);
    EXPECT_EQ(checker.broken, 0);
  }
}

TEST(Faults, AbortWithoutAStepDoesNothing) {
  auto scene = random_scene(1);
  Checker checker(*scene);
  Engine engine(scene->program(), host(), checker, {});
  EXPECT_TRUE(engine.abort(0));
  EXPECT_EQ(run_step(engine, checker, 0), Status::kDone);
  EXPECT_TRUE(engine.abort(0));
  EXPECT_EQ(run_step(engine, checker, 1), Status::kDone);
}

TEST(Faults, AnAbortThatComesTooLateDoesNotReachTheNextStep) {
  class Short final : public OpRunner {
   public:
    void run(std::int32_t, int, int) override {}
  } runner;
  ProgramBuilder builder;
  VertexDesc vertex;
  vertex.op = 0;
  builder.add(vertex);
  // On threads of its own the device may end the step while the loop thread has yet to wake for the abort.
  Engine engine(std::move(builder).build(), host(1, 0.0, false), runner, {});
  Random random;
  for (int round = 0; round < 3000; ++round) {
    engine.begin();
    for (const std::int64_t until = now_ns() + static_cast<std::int64_t>(random.below(20'000));
         now_ns() < until;) {
    }
    ASSERT_TRUE(engine.abort(kPatience));
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << "round " << round;
  }
}

TEST(Faults, AbortAtTheClosedGateEndsTheStepAndResidentsAreLoadedAgain) {
  auto scene = random_scene(4);
  Checker checker(*scene);
  Engine engine(scene->program(), host(), checker, {});
  checker.begin(0);
  engine.begin();
  ASSERT_EQ(engine.wait_out(kPatience), Status::kDone);
  EXPECT_TRUE(engine.abort(kPatience));
  EXPECT_EQ(engine.wait_end(kPatience), Status::kAborted);
  engine.deliver();
  std::fill(scene->blocks[0].begin(), scene->blocks[0].end(), 0);
  ASSERT_EQ(run_step(engine, checker, 1), Status::kDone);
  EXPECT_EQ(checker.missing(), 0);
  EXPECT_EQ(checker.broken, 0);
}

TEST(Faults, DestroyingAnEngineInTheMiddleOfAStepEndsIt) {
  for (int kind = 0; kind < 4; ++kind) {
    for (int round = 0; round < 40; ++round) {
      auto scene = random_scene(round, {.devices = kind == 3 ? 3 : 1});
      Checker checker(*scene);
      const auto engine = engine_on(kind, *scene, checker, round);
      checker.begin(0);
      engine->begin();
      const Status status = engine->wait_out(round % 2 == 0 ? kPatience : 0.0);
      EXPECT_TRUE(status == Status::kDone || (round % 2 == 1 && status == Status::kTimeout));
    }
  }
}

TEST(Faults, AVertexThatNeverCompletesIsAStallThatNamesWhoWaits) {
  // 0 -> 1 -> 2, and 1 hangs.
  for (const bool release : {true, false}) {
    Scene scene;
    scene.blocks.assign(3, std::vector<std::uint64_t>(1, 0));
    scene.predecessors = {{}, {}, {}};
    scene.origin = {0, 0, 2};
    scene.block = {0, 1, 2};
    scene.overwritten.assign(3, false);
    for (int v = 0; v < 3; ++v) {
      VertexDesc vertex;
      vertex.op = v;
      scene.vertices.push_back(vertex);
    }
    scene.vertices[1] = {
        Kind::kCopy, 0, -1, scene.blocks[1].data(), scene.blocks[0].data(), 8, 0, Direction::kDeviceToHost};
    scene.edges = {{0, 1}, {1, 2}};
    Checker checker(scene);
    auto device = std::make_unique<PolledDevice>(1, 3);
    PolledDevice* polled = device.get();
    polled->hang_at = 1;
    polled->release_on_cancel = release;
    polled->prompt = true;
    EngineOptions options;
    options.stall_timeout = 0.05;
    Engine engine(scene.program(), one(std::move(device)), checker, options);
    ASSERT_EQ(run_step(engine, checker, 0), Status::kStalled);
    const EngineError error = engine.last_error();
    EXPECT_EQ(error.vertex, 1);
    EXPECT_EQ(error.unfinished.in_flight, std::vector<std::int32_t>{1});
    EXPECT_EQ(error.unfinished.in_flight_count, 1);
    EXPECT_EQ(error.unfinished.waiting, (std::vector<Waiting>{{2, 1}}));
    EXPECT_EQ(error.unfinished.waiting_count, 1);
    if (!release) {
      EXPECT_TRUE(engine.last_error().draining);
      EXPECT_THROW(engine.begin(), std::logic_error);
      EXPECT_FALSE(engine.abort(0.01));
      polled->hang_at = -1;
    }
    EXPECT_TRUE(engine.abort(kPatience));
    EXPECT_FALSE(engine.last_error().draining);
    EXPECT_EQ(engine.last_error().status, Status::kStalled);
    polled->hang_at = -1;
    EXPECT_EQ(run_step(engine, checker, 1), Status::kDone);
  }
}

// An op that ends when the engine has asked three times whether something is computing.
class AskedFor final : public OpRunner {
 public:
  void run(std::int32_t, int, int) override {
    inside = true;
    while (asked < 3) std::this_thread::yield();
    inside = false;
  }
  std::atomic<bool> inside{false};
  std::atomic<int> asked{0};
};

// The host device's own answer counts while the op runs. Around it a busy machine may keep its thread waiting
// for any time, which must not look like a stall here.
class AskedDevice final : public ForwardingDevice {
 public:
  AskedDevice(std::unique_ptr<Device> inner, AskedFor& op) : ForwardingDevice(std::move(inner)), op_(op) {}
  bool computing() const override {
    if (op_.inside) {
      denied += inner_->computing() ? 0 : 1;
      ++op_.asked;
    }
    return true;
  }
  mutable std::atomic<int> denied{0};

 private:
  AskedFor& op_;
};

TEST(Faults, ALongOpIsNotAStall) {
  AskedFor op;
  ProgramBuilder builder;
  VertexDesc vertex;
  vertex.op = 0;
  builder.add(vertex);
  EngineOptions options;
  options.stall_timeout = 0.01;
  auto device = std::make_unique<AskedDevice>(std::move(host(1, 0.0, false).front()), op);
  AskedDevice* asked = device.get();
  Engine engine(std::move(builder).build(), one(std::move(device)), op, options);
  engine.begin();
  EXPECT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  EXPECT_EQ(asked->denied, 0);
}

TEST(Faults, WaitingForTheGateIsNotAStall) {
  // 0 out; 1 late; 2 after both. Ops run on the loop thread, which therefore sleeps at the gate alone.
  Scene scene;
  scene.blocks.assign(3, std::vector<std::uint64_t>(1, 0));
  scene.predecessors = {{}, {}, {0}};
  scene.origin = {0, 1, 2};
  scene.block = {0, 1, 2};
  scene.overwritten.assign(3, false);
  scene.vertices.resize(3);
  scene.vertices[0].op = 0;
  scene.vertices[0].flags = kOut;
  scene.vertices[1].kind = Kind::kInput;
  scene.vertices[1].flags = kLate;
  scene.vertices[2].op = 2;
  scene.edges = {{0, 2}, {1, 2}};
  Checker checker(scene);
  EngineOptions options;
  options.stall_timeout = 0.01;
  Engine engine(scene.program(), host(), checker, options);
  checker.begin(0);
  engine.begin();
  ASSERT_EQ(engine.wait_out(kPatience), Status::kDone);
  EXPECT_EQ(engine.wait_end(0.05), Status::kTimeout);
  engine.deliver();
  EXPECT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  EXPECT_TRUE(checker.ran(2));
}

// Fails at one call of enqueue_*, wait or completed.
class RefusingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) override {
    count();
    return inner_->enqueue_op(stream, vertex, op);
  }
  Token enqueue_copy(int stream, const Copy& copy) override {
    count();
    return inner_->enqueue_copy(stream, copy);
  }
  void wait(int stream, int other, Token token) override {
    count();
    inner_->wait(stream, other, token);
  }
  Token completed(int stream) override {
    count();
    return inner_->completed(stream);
  }
  // What was enqueued before the refusal is run to its end here, as a real device's recovery waits for its
  // streams.
  void recover() override {
    for (bool moved = true; moved;) {
      moved = false;
      for (int s = 0; s < streams(); ++s) {
        const Token before = last_[s];
        for (int i = 0; i < 200; ++i) last_[s] = inner_->completed(s);
        moved = moved || last_[s] != before;
      }
    }
    inner_->recover();
  }

  int calls = 0;
  int refuse_at = -1;

 private:
  void count() {
    if (calls++ == refuse_at) throw std::runtime_error("refused call " + std::to_string(refuse_at));
  }
  Token last_[8] = {};
};

TEST(Faults, ADeviceThatRefusesAnyOneCallFailsTheStepOnly) {
  auto scene = random_scene(31, {.vertices = 30});
  Checker checker(*scene);
  auto device = std::make_unique<RefusingDevice>(std::make_unique<PolledDevice>(2, 5));
  RefusingDevice* refusing = device.get();
  EngineOptions options;
  options.copy_piece = 50;
  Engine engine(scene->program(), one(std::move(device)), checker, options);
  std::uint64_t step = 0;
  for (int at = 0; at < 100; ++at) {
    refusing->calls = 0;
    refusing->refuse_at = at;
    const Status status = run_step(engine, checker, step++);
    if (refusing->calls <= at) break;
    ASSERT_EQ(status, Status::kFailed) << "call " << at;
    EXPECT_EQ(engine.last_error().message, "refused call " + std::to_string(at));
    EXPECT_GE(engine.last_error().vertex, 0);
    refusing->refuse_at = -1;
    ASSERT_EQ(run_step(engine, checker, step++), Status::kDone) << "call " << at;
    ASSERT_EQ(checker.missing(), 0);
  }
  EXPECT_EQ(checker.broken, 0);
}

// A caller's thread that cannot be made ready for ops: the guards there take memory.
class NoRoom final : public OpRunner {
 public:
  explicit NoRoom(Checker& checker) : checker_(checker) {}
  void run(std::int32_t op, int device, int stream) override { checker_.run(op, device, stream); }
  bool enter() override {
    if (refuse) throw std::bad_alloc();
    return checker_.enter();
  }
  void leave() override { checker_.leave(); }
  std::atomic<bool> refuse{false};

 private:
  Checker& checker_;
};

TEST(Faults, ACallerThatCannotRunOpsLeavesTheStepToTheLoopThread) {
  auto scene = random_scene(3, {.vertices = 60, .reuse = 0.3});
  Checker checker(*scene);
  checker.callers = 1;
  NoRoom runner(checker);
  Engine engine(scene->program(), host(), runner, {});
  ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
  std::uint64_t step = 1;
  for (int thrown = 0; thrown < 20; ++step) {
    checker.begin(step);
    runner.refuse = true;
    engine.begin(Next::kWait);
    try {
      static_cast<void>(engine.wait_out(kPatience));  // drives unless the loop thread is at work
    } catch (const std::bad_alloc&) {
      ++thrown;
    }
    runner.refuse = false;
    ASSERT_EQ(engine.wait_out(kPatience), Status::kDone) << "step " << step;
    checker.check_outs();
    if (step % 2 == 0) {
      EXPECT_TRUE(engine.abort(kPatience));
      ASSERT_EQ(engine.wait_end(kPatience), Status::kAborted);
    } else {
      engine.deliver(Next::kWait);
      ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
      ASSERT_EQ(checker.missing(), 0);
    }
    // Nobody is inside any more, so the next begin() is accepted.
    ASSERT_EQ(run_step(engine, checker, ++step), Status::kDone);
    ASSERT_EQ(checker.missing(), 0);
  }
  EXPECT_EQ(checker.broken, 0);
}

}  // namespace
}  // namespace disco::testing
