#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

constexpr Dispatch kModes[] = {Dispatch::kPriority, Dispatch::kRandom, Dispatch::kFixed,
                               Dispatch::kSynchronous};

EngineOptions options_of(Dispatch dispatch, int lookahead = 2, std::uint64_t seed = 0) {
  EngineOptions options;
  options.dispatch = dispatch;
  options.lookahead = lookahead;
  options.seed = seed;
  return options;
}

// The rounds of the random tests; sanitizers run about ten times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 150;
#else
constexpr int kRounds = 500;
#endif

TEST(Engine, NoVertexStartsBeforeItsPredecessorsInlineHost) {
  for (int seed = 0; seed < kRounds; ++seed) {
    const Dispatch mode = kModes[seed % 4];
    auto scene = random_scene(seed);
    Checker checker(*scene);
    Engine engine(scene->program(), host(), checker, options_of(mode, 2, seed));
    for (std::uint64_t step = 0; step < 4; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone)
          << "seed " << seed << engine.last_error().message;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed << " step " << step;
    }
    EXPECT_EQ(engine.counters().steps, 4U);
  }
}

TEST(Engine, NoVertexStartsBeforeItsPredecessorsThreadedHost) {
  for (int seed = 0; seed < kRounds; ++seed) {
    const Dispatch mode = kModes[seed % 4];
    auto scene = random_scene(seed);
    Checker checker(*scene);
    Engine engine(scene->program(), host(1 + seed % 3, 0.0, false), checker,
                  options_of(mode, (seed / 4) % 4, seed));
    for (std::uint64_t step = 0; step < 3; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone)
          << "seed " << seed << engine.last_error().message;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed << " step " << step;
    }
  }
}

TEST(Engine, NoVertexStartsBeforeItsPredecessorsPolledDevice) {
  for (int seed = 0; seed < kRounds; ++seed) {
    auto scene = random_scene(seed, {.vertices = 60});
    Checker checker(*scene);
    auto device = std::make_unique<PolledDevice>(1 + seed % 3, seed);
    Engine engine(scene->program(), one(std::move(device)), checker,
                  options_of(kModes[seed % 4], (seed / 4) % 4, seed));
    for (std::uint64_t step = 0; step < 3; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone)
          << "seed " << seed << engine.last_error().message;
      ASSERT_EQ(checker.missing(), 0) << "seed " << seed;
      ASSERT_EQ(checker.broken, 0) << "seed " << seed << " step " << step;
    }
  }
}

// Kernels of `n` vertices without edges, as they were run.
class Recorder : public OpRunner {
 public:
  void run(std::int32_t op, int, int) override { order.push_back(op); }
  std::vector<std::int32_t> order;
};

Scene independent(int n) {
  Scene scene;
  for (int v = 0; v < n; ++v) {
    VertexDesc vertex;
    vertex.op = v;
    scene.vertices.push_back(vertex);
  }
  return scene;
}

TEST(Engine, PriorityIsTheSerialOrder) {
  Scene scene = independent(50);
  scene.edges = {{1, 40}};
  for (const Dispatch mode : {Dispatch::kPriority, Dispatch::kFixed, Dispatch::kSynchronous}) {
    Recorder recorder;
    Engine engine(scene.program(), host(), recorder, options_of(mode));
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    std::vector<std::int32_t> serial(50);
    std::iota(serial.begin(), serial.end(), 0);
    EXPECT_EQ(recorder.order, serial);
  }
}

TEST(Engine, ReadyVerticesOvertakeOnlyByPriority) {
  // 0 -> 3; 1, 2, 4 are free. The freed 3 runs before 4, not after it.
  Scene scene = independent(5);
  scene.edges = {{0, 3}};
  Recorder recorder;
  Engine engine(scene.program(), host(), recorder, options_of(Dispatch::kPriority));
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  EXPECT_EQ(recorder.order, (std::vector<std::int32_t>{0, 1, 2, 3, 4}));
}

TEST(Engine, RandomOrderDependsOnTheSeedAndTheStepOnly) {
  const auto orders = [](std::uint64_t seed) {
    Recorder recorder;
    Engine engine(independent(30).program(), host(), recorder, options_of(Dispatch::kRandom, 2, seed));
    for (int step = 0; step < 2; ++step) {
      engine.begin();
      EXPECT_EQ(engine.wait_end(kPatience), Status::kDone);
    }
    return recorder.order;
  };
  const auto first = orders(1);
  EXPECT_EQ(first, orders(1));
  EXPECT_NE(first, orders(2));
  EXPECT_NE(std::vector(first.begin(), first.begin() + 30), std::vector(first.begin() + 30, first.end()));
}

// One stream whose kernels end one by one at every third poll; its copies end when copies_end says so.
class Depth final : public Device {
 public:
  explicit Depth(int room) : room_(room) {}
  void connect(int, OpRunner&, ProgressListener&) override {}
  int compute_streams() const override { return 1; }
  int queue_room() const override { return room_; }
  Token enqueue_op(int, std::int32_t vertex, std::int32_t) override {
    order.push_back(vertex);
    ahead.push_back(queued - finished);
    deepest = std::max(deepest, ++queued - finished);
    return queued;
  }
  Token enqueue_copy(int, const Copy&) override { return ++copies; }
  void wait(int, int, Token) override { throw std::logic_error("a chain on one stream needs no wait"); }
  Token completed(int stream) override {
    if (stream != 0) return order.size() >= copies_end ? copies : 0;
    if (++polls % 3 == 0 && finished < queued) ++finished;
    return finished;
  }
  void mark(int) override { ++marks; }
  bool failed() const override { return false; }
  DeviceFailure failure() const override { return {}; }
  void recover() override {}
  void trace(Span*, std::int32_t) override {}

  std::vector<std::int32_t> order;
  std::vector<Token> ahead;    // likewise: kernels in flight when each was launched
  std::size_t copies_end = 0;  // kernels launched by then
  Token queued = 0;
  Token finished = 0;
  Token deepest = 0;
  Token copies = 0;
  int polls = 0;
  int marks = 0;

 private:
  int room_;
};

Scene chain(int n, std::int64_t ns = 0) {
  Scene scene = independent(n);
  for (VertexDesc& vertex : scene.vertices) vertex.ns = ns;
  for (int v = 1; v < n; ++v) scene.edges.emplace_back(v - 1, v);
  return scene;
}

TEST(Engine, LookaheadQueuesBehindIssuedKernelsOnly) {
  // A chain of kernels on a polled device: with K = 2 three are in flight, with K = 0 one.
  for (const int lookahead : {0, 1, 2, 5}) {
    NoOps runner;
    auto device = std::make_unique<Depth>(0);
    Depth* depth = device.get();
    Engine engine(chain(40).program(), one(std::move(device)), runner,
                  options_of(Dispatch::kPriority, lookahead));
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
    EXPECT_EQ(depth->deepest, static_cast<Token>(lookahead + 1));
  }
}

// Behind the running kernel kHorizonNs are queued, or K kernels, whichever is more, if there is room.
TEST(Engine, ShortKernelsAreQueuedByTheirTime) {
  struct Case {
    std::int64_t ns;
    int lookahead, room;
    Token deepest;
    int marks;
  };
  constexpr std::int64_t kLong = 100 * kHorizonNs;
  const Case cases[] = {{kLong, 2, 64, 3, 200},
                        {kHorizonNs / 2, 2, 64, 3, 200},
                        {kHorizonNs / 10, 2, 64, 11, 41},
                        {kHorizonNs / 10, 2, 8, 8, 41},
                        {0, 2, 64, 51, 9},
                        {kHorizonNs / 10, 0, 64, 1, 200},
                        {kHorizonNs / 10, 20, 64, 21, 41}};
  for (const Dispatch mode : {Dispatch::kPriority, Dispatch::kFixed}) {
    for (const Case& each : cases) {
      NoOps runner;
      auto device = std::make_unique<Depth>(each.room);
      Depth* depth = device.get();
      Engine engine(chain(200, each.ns).program(), one(std::move(device)), runner,
                    options_of(mode, each.lookahead));
      for (int step = 0; step < 2; ++step) {
        depth->deepest = depth->marks = 0;
        engine.begin();
        ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
        EXPECT_EQ(depth->deepest, each.deepest) << each.ns << " ns, K = " << each.lookahead;
        EXPECT_NEAR(depth->marks, each.marks, 1) << each.ns << " ns, K = " << each.lookahead;
      }
    }
  }
}

// Kernel 1 waits for a copy, which ends when some later kernels were launched. Of the others, which are
// short, no more are in front of it than the look-ahead allows.
TEST(Engine, AWindowInTimeIsNotFilledWithKernelsThatOvertake) {
  constexpr int kLookahead = 2;
  for (const std::size_t copies_end : {1, 10, 20}) {
    Scene scene = independent(60);
    static char word[2];
    scene.vertices[1] = {Kind::kCopy, 0, -1, &word[1], &word[0], 1, 0, Direction::kHostToDevice};
    scene.edges = {{1, 2}, {0, 30}};
    NoOps runner;
    auto device = std::make_unique<Depth>(64);
    Depth* depth = device.get();
    depth->copies_end = copies_end;
    Engine engine(scene.program(), one(std::move(device)), runner,
                  options_of(Dispatch::kPriority, kLookahead));
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
    const auto at = std::find(depth->order.begin(), depth->order.end(), 2) - depth->order.begin();
    EXPECT_LE(at, static_cast<std::ptrdiff_t>(copies_end) + kLookahead + 1);
    EXPECT_LE(depth->ahead[static_cast<std::size_t>(at)], static_cast<Token>(kLookahead + 1));
    EXPECT_GT(depth->deepest, static_cast<Token>(kLookahead + 1)) << "behind it all are next";
    EXPECT_GE(depth->marks + 1, static_cast<int>(copies_end))
        << "the few that are queued are told of one by one";
  }
}

TEST(Engine, WaitsBetweenStreamsAreUsedAndCorrect) {
  int waits = 0;
  for (int seed = 0; seed < 20; ++seed) {
    auto scene = random_scene(seed, {.vertices = 80, .copies = 0.0});
    Checker checker(*scene);
    auto device = std::make_unique<PolledDevice>(3, seed);
    PolledDevice* polled = device.get();
    Engine engine(scene->program(), one(std::move(device)), checker, options_of(Dispatch::kPriority, 3));
    ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
    ASSERT_EQ(checker.broken, 0);
    waits += polled->stream_waits;
  }
  EXPECT_GT(waits, 0);
}

TEST(Engine, OutIsToldBeforeTheGateAndTheRestFollows) {
  // 0 late; 1 out; 2 free; 3 after the gate.
  Scene scene = independent(4);
  scene.vertices[0] = {};
  scene.vertices[0].kind = Kind::kInput;
  scene.vertices[0].flags = kLate;
  scene.vertices[1].flags = kOut;
  scene.edges = {{0, 3}};
  Recorder recorder;
  Engine engine(scene.program(), host(), recorder, {});
  EXPECT_EQ(engine.wait_out(0), Status::kIdle);
  EXPECT_THROW(engine.deliver(), std::logic_error);
  for (int step = 0; step < 3; ++step) {
    recorder.order.clear();
    engine.begin();
    EXPECT_THROW(engine.begin(), std::logic_error);
    ASSERT_EQ(engine.wait_out(kPatience), Status::kDone);
    EXPECT_EQ(engine.wait_end(0.01), Status::kTimeout);
    engine.deliver();
    EXPECT_THROW(engine.deliver(), std::logic_error);
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    EXPECT_EQ(recorder.order, (std::vector<std::int32_t>{1, 2, 3}));
    EXPECT_GT(engine.counters().gate_ns, 1'000'000);
  }
}

TEST(Engine, ProgramsWithNothingToRunEnd) {
  Recorder recorder;
  Engine empty(Program(std::move(ProgramBuilder()).build()), host(), recorder, {});
  empty.begin();
  EXPECT_EQ(empty.wait_out(kPatience), Status::kDone);
  EXPECT_EQ(empty.wait_end(kPatience), Status::kDone);
}

TEST(Engine, ResidentsAreLoadedFirstAndAgainWhenInvalid) {
  for (const int streams : {1, 2}) {
    std::uint64_t host_value = 5;
    std::uint64_t arena = 0;
    std::vector<std::uint64_t> seen;
    class Reader final : public OpRunner {
     public:
      Reader(std::uint64_t& arena, std::vector<std::uint64_t>& seen) : arena_(arena), seen_(seen) {}
      void run(std::int32_t, int, int) override { seen_.push_back(arena_); }

     private:
      std::uint64_t& arena_;
      std::vector<std::uint64_t>& seen_;
    } reader(arena, seen);
    Scene scene = independent(2);
    scene.vertices[0] = {Kind::kInput, 0, -1, &arena, &host_value, sizeof arena, 0};
    Engine engine(scene.program(), host(streams), reader, {});
    const auto step = [&] {
      engine.begin();
      ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
    };
    step();
    host_value = 6;
    step();
    EXPECT_EQ(engine.counters().reload_bytes, 0);
    engine.invalidate();
    step();
    EXPECT_EQ(engine.counters().reload_bytes, 8);
    EXPECT_EQ(seen, (std::vector<std::uint64_t>{5, 5, 6}));
  }
}

TEST(Engine, ResidentsInPlaceAreNotLoadedOnce) {
  // Two residents and a kernel, which fails where that is asked for.
  for (const int streams : {1, 2}) {
    std::uint64_t host_values[2] = {5, 7};
    std::uint64_t arena[2] = {0, 0};
    class Reader final : public OpRunner {
     public:
      explicit Reader(const std::uint64_t* arena) : arena_(arena) {}
      void run(std::int32_t, int, int) override {
        seen = {arena_[0], arena_[1]};
        if (failing) throw std::runtime_error("as asked");
      }
      std::vector<std::uint64_t> seen;
      bool failing = false;

     private:
      const std::uint64_t* arena_;
    } reader(arena);
    Scene scene = independent(3);
    for (int i : {0, 1}) scene.vertices[i] = {Kind::kInput, 0, -1, &arena[i], &host_values[i], 8, 0};
    Engine engine(scene.program(), host(streams), reader, {});
    const auto step = [&](Status expected, std::int64_t loaded) {
      engine.begin();
      ASSERT_EQ(engine.wait_end(kPatience), expected);
      EXPECT_EQ(engine.counters().reload_bytes, loaded);
    };
    EXPECT_FALSE(engine.holds_residents());
    // Before the first step, too: another engine has left one of them.
    arena[1] = 70;
    engine.invalidate({1});
    step(Status::kDone, 8);
    EXPECT_EQ(reader.seen, (std::vector<std::uint64_t>{5, 70}));
    EXPECT_TRUE(engine.holds_residents());
    engine.invalidate({0, 1});
    EXPECT_FALSE(engine.holds_residents());
    step(Status::kDone, 0);
    EXPECT_TRUE(engine.holds_residents());
    // A later list replaces an earlier one; none at all means none.
    engine.invalidate({0, 1});
    engine.invalidate({0});
    step(Status::kDone, 8);
    EXPECT_EQ(reader.seen, (std::vector<std::uint64_t>{5, 7}));
    engine.invalidate({0, 1});
    engine.invalidate();
    step(Status::kDone, 16);
    // The list was for the step that has failed.
    engine.invalidate({0, 1});
    reader.failing = true;
    step(Status::kFailed, 0);
    reader.failing = false;
    EXPECT_FALSE(engine.holds_residents());
    step(Status::kDone, 16);
    EXPECT_THROW(engine.invalidate({3}), std::out_of_range);
  }
}

TEST(Engine, CopiesAreLaunchedWhileAnOpRunsInline) {
  // 0 kernel; 1 offload after 0; 2 reload after 1; 3 kernel after 0 that does not return before both copies
  // are done.
  std::uint64_t words[3] = {1, 2, 3};
  Scene scene = independent(4);
  scene.vertices[1] = {Kind::kCopy, 0, -1, &words[1], &words[0], 8, 0, Direction::kDeviceToHost};
  scene.vertices[2] = {Kind::kCopy, 0, -1, &words[2], &words[1], 8, 0, Direction::kHostToDevice};
  scene.edges = {{0, 1}, {1, 2}, {0, 3}};
  auto devices = host(1, 1e6);
  Device& device = *devices[0];
  class Blocking final : public OpRunner {
   public:
    explicit Blocking(Device& device) : device_(device) {}
    void run(std::int32_t op, int, int) override {
      if (op != 3) return;
      const std::int64_t until = now_ns() + 30'000'000'000;
      while (device_.completed(device_.lane(Direction::kHostToDevice)) < steps + 1) {
        if (now_ns() > until) throw std::runtime_error("the copies did not overlap this op");
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
    Token steps = 0;

   private:
    Device& device_;
  } runner(device);
  Engine engine(scene.program(), std::move(devices), runner, {});
  for (; runner.steps < 20; ++runner.steps) {
    engine.begin();
    ASSERT_EQ(engine.wait_end(kPatience), Status::kDone) << engine.last_error().message;
  }
}

TEST(Engine, EventsOfATracedStepRespectTheEdges) {
  for (const int streams : {1, 2}) {
    auto scene = random_scene(7, {.vertices = 60});
    Checker checker(*scene);
    Engine engine(scene->program(), host(streams), checker, {});
    ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
    EXPECT_TRUE(engine.events().empty());
    engine.set_tracing(true);
    ASSERT_EQ(run_step(engine, checker, 1), Status::kDone);
    const auto events = engine.events();
    EXPECT_EQ(static_cast<std::int64_t>(events.size()), engine.counters().vertices);
    std::vector<TraceEvent> of(scene->vertices.size());
    for (const TraceEvent& event : events) {
      EXPECT_LE(0, event.ready);
      EXPECT_LE(event.ready, event.start);
      EXPECT_LE(0, event.issue);
      EXPECT_LE(event.issue, event.start);
      EXPECT_LE(event.start, event.end);
      EXPECT_LE(event.end, engine.counters().step_ns);
      of[event.vertex] = event;
    }
    for (const auto& [from, to] : scene->edges) {
      if (of[from].vertex < 0) continue;
      EXPECT_LE(of[from].end, of[to].start) << from << " -> " << to;
      EXPECT_LE(of[from].end, of[to].ready) << from << " -> " << to;
    }
    std::int64_t copied = 0;
    for (const TraceEvent& event : events) copied += event.bytes;
    const StepCounters counters = engine.counters();
    EXPECT_EQ(copied, counters.offload_bytes + counters.reload_bytes + counters.transfer_bytes);
    engine.set_tracing(false);
    ASSERT_EQ(run_step(engine, checker, 2), Status::kDone);
    EXPECT_TRUE(engine.events().empty());
  }
}

TEST(Engine, SynchronousModeOverlapsNothing) {
  auto scene = random_scene(3, {.vertices = 60});
  Checker checker(*scene);
  Engine engine(scene->program(), host(2), checker, options_of(Dispatch::kSynchronous));
  ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
  engine.set_tracing(true);
  ASSERT_EQ(run_step(engine, checker, 1), Status::kDone);
  const auto events = engine.events();
  for (std::size_t i = 1; i < events.size(); ++i) EXPECT_LE(events[i - 1].end, events[i].start);
}

}  // namespace
}  // namespace disco::testing
