// Callers on several threads, and a process that forks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

TEST(Threads, SeveralCallersAreServedOrRefused) {
  auto scene = random_scene(5, {.vertices = 60, .reuse = 0.3});
  Checker checker(*scene);
  checker.begin(0);
  checker.once = false;
  for (const int every : {0, 1, 3}) {
    checker.callers = every;
    Engine engine(scene->program(), host(1, 0.0, every > 0), checker, {});
    engine.set_tracing(true);
    std::atomic<int> ended{0};
    std::atomic<int> refused{0};
    const auto caller = [&](std::uint64_t seed) {
      Random random;
      random.seed(seed);
      for (int i = 0; i < 400; ++i) {
        try {
          const std::size_t what = random.below(20);
          if (what < 5) {
            engine.begin(what < 2 ? Next::kWait : Next::kAnything);
          } else if (what < 8) {
            engine.wait_out(random.unit() * 1e-3);
          } else if (what < 11) {
            engine.deliver(what < 9 ? Next::kWait : Next::kAnything);
          } else if (what < 14) {
            ended += engine.wait_end(random.unit() * 1e-3) == Status::kDone ? 1 : 0;
          } else if (what == 14) {
            EXPECT_TRUE(engine.abort(kPatience));
          } else if (what == 15) {
            engine.invalidate();
          } else if (what == 16) {
            engine.events();
          } else if (what == 17) {
            engine.set_tracing(random.below(2) == 0);
          } else if (what == 18) {
            EXPECT_LE(engine.counters().vertices, 60);
          } else {
            EXPECT_NE(engine.last_error().status, Status::kFailed) << engine.last_error().message;
          }
        } catch (const std::logic_error&) {
          ++refused;
        }
      }
    };
    // On a busy machine the threads may run one after the other, and few steps reach their end.
    const auto short_of = [&] { return ended == 0 || refused == 0 || (every > 0 && checker.entered == 0); };
    for (std::uint64_t round = 0; round < 5000 && short_of(); ++round) {
      std::vector<std::thread> callers;
      for (std::uint64_t c = 0; c < 4; ++c) callers.emplace_back(caller, 4 * round + c);
      for (std::thread& thread : callers) thread.join();
    }
    EXPECT_GT(ended, 0);
    EXPECT_GT(refused, 0);
    EXPECT_TRUE(engine.abort(kPatience));
    EXPECT_EQ(run_step(engine, checker, 0), Status::kDone);
    EXPECT_EQ(checker.missing(), 0);
    EXPECT_EQ(checker.broken, 0);
    EXPECT_EQ(checker.entered > 0, every > 0);
  }
}

// How many ops of one step the caller ran itself.
int ran_by_caller(Engine& engine, Checker& checker, std::uint64_t step) {
  std::atomic<int> mine{0};
  checker.before_read = [&, caller = std::this_thread::get_id()](std::int32_t) {
    mine += std::this_thread::get_id() == caller ? 1 : 0;
  };
  EXPECT_EQ(run_step(engine, checker, step), Status::kDone);
  EXPECT_EQ(checker.missing(), 0);
  checker.before_read = nullptr;
  return mine;
}

TEST(Threads, ACallerThatWaitsRunsTheOpsItselfIfItMay) {
  auto scene = random_scene(3, {.vertices = 60, .reuse = 0.3});
  Checker checker(*scene);
  Engine engine(scene->program(), host(), checker, {});
  EXPECT_EQ(ran_by_caller(engine, checker, 0), 0);
  checker.callers = 1;
  // A loop thread that has not gone to sleep yet, as on a busy machine, does the step itself.
  std::uint64_t step = 1;
  int ran = 0;
  for (; step <= 100'000 && ran < 20; ++step) ran += ran_by_caller(engine, checker, step) > 0 ? 1 : 0;
  EXPECT_EQ(ran, 20);
  EXPECT_EQ(checker.broken, 0);
  Engine worker(scene->program(), host(1, 0.0, false), checker, {});
  EXPECT_EQ(ran_by_caller(worker, checker, step), 0);
}

// begin() wakes the loop's thread, and the caller may run the step before that thread is up: what a device
// reports just when it looks around must reach the caller.
TEST(Threads, NoReportIsLostToALoopThreadThatWakesWhileACallerRunsTheStep) {
  auto scene = random_scene(11, {.vertices = 12, .copies = 0.9, .gate = false});
  Checker checker(*scene);
  checker.callers = 1;
  Engine engine(scene->program(), host(1, 64.0 / 20e-6), checker, {});
  const int steps = 2000;
  int late = 0;
  for (int step = 0; step < steps && late == 0; ++step) {
    checker.begin(step);
    engine.begin(Next::kAnything);
    late += engine.wait_end(kPatience) == Status::kDone ? 0 : 1;
  }
  EXPECT_EQ(late, 0);
  EXPECT_EQ(checker.broken, 0);
}

TEST(Threads, WhatACallerLeavesUndoneGoesOnWithoutIt) {
  auto scene = random_scene(3, {.vertices = 60, .gate = false, .reuse = 0.3});
  Checker checker(*scene);
  checker.callers = 1;
  Engine engine(scene->program(), host(), checker, {});
  for (std::uint64_t step = 0; step < 20; ++step) {
    checker.begin(step);
    engine.begin(Next::kWait);
    static_cast<void>(engine.wait_end(1e-6));  // long enough for one op
    const std::int64_t until = now_ns() + 60'000'000'000;
    while (engine.counters().steps <= step && now_ns() < until) std::this_thread::yield();
    EXPECT_EQ(engine.wait_end(0), Status::kDone);
    EXPECT_EQ(checker.missing(), 0);
  }
  EXPECT_EQ(checker.broken, 0);
}

TEST(Threads, ASecondBeginIsRefusedWhileAnotherThreadWaits) {
  auto scene = random_scene(9);
  Checker checker(*scene);
  Engine engine(scene->program(), host(), checker, {});
  checker.begin(0);
  engine.begin();
  ASSERT_EQ(engine.wait_out(kPatience), Status::kDone);
  std::atomic<bool> inside{false};
  Status seen = Status::kIdle;
  std::thread other([&] {
    inside = true;
    seen = engine.wait_end(kPatience);
  });
  while (!inside) std::this_thread::yield();
  EXPECT_THROW(engine.begin(), std::logic_error);
  EXPECT_THROW(engine.events(), std::logic_error);
  engine.deliver();
  other.join();
  EXPECT_EQ(seen, Status::kDone);
  EXPECT_EQ(run_step(engine, checker, 1), Status::kDone);
}

TEST(Threads, TheEndsOfACopyThatMayBeRunningAreNotChanged) {
  // 0 late; 1 reload before the gate, 2 reload behind it.
  std::uint64_t values[2] = {1, 2};
  std::uint64_t arena[3] = {};
  Scene scene;
  scene.vertices.resize(3);
  scene.vertices[0].kind = Kind::kInput;
  scene.vertices[0].flags = kLate;
  scene.vertices[1] = {Kind::kCopy, 0, -1, &arena[0], &values[0], 8, kOut, Direction::kHostToDevice};
  scene.vertices[2] = {Kind::kCopy, 0, -1, &arena[1], &values[0], 8, 0, Direction::kHostToDevice};
  scene.edges = {{0, 2}};
  Checker checker(scene);
  std::atomic<bool> go{false};
  HostDeviceOptions options;
  options.before_copy = [&](std::int32_t vertex) {
    while (vertex == 2 && !go) std::this_thread::yield();
  };
  Engine engine(scene.program(), hosts(1, options), checker, {});
  engine.begin();
  EXPECT_THROW(engine.set_source(1, &values[1]), std::logic_error);
  EXPECT_THROW(engine.set_source(3, &values[1]), std::out_of_range);
  EXPECT_THROW(engine.set_target(1, &arena[2]), std::logic_error);
  EXPECT_THROW(engine.set_target(3, &arena[2]), std::out_of_range);
  engine.set_source(2, &values[1]);
  engine.set_target(2, &arena[2]);
  ASSERT_EQ(engine.wait_out(kPatience), Status::kDone);
  engine.deliver();
  EXPECT_THROW(engine.set_source(2, &values[0]), std::logic_error);
  EXPECT_THROW(engine.set_target(2, &arena[1]), std::logic_error);
  go = true;
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  engine.set_source(1, &values[1]);
  engine.set_target(1, &arena[1]);
  EXPECT_EQ(arena[0], 1U);
  EXPECT_EQ(arena[1], 0U);
  EXPECT_EQ(arena[2], 2U);
}

// Whether each call is refused as it should be in a forked process.
template <typename Call>
bool refused(Call call) {
  try {
    call();
  } catch (const std::logic_error& error) {
    return std::string(error.what()).find("the engine was started before fork()") == 0;
  }
  return false;
}

bool all_refused(Engine& engine) {
  return refused([&] { engine.begin(); }) && refused([&] { engine.wait_out(1); }) &&
         refused([&] { engine.deliver(); }) && refused([&] { engine.wait_end(1); }) &&
         refused([&] { engine.abort(1); }) && refused([&] { engine.invalidate(); }) &&
         refused([&] { engine.set_source(2, nullptr); }) && refused([&] { engine.set_target(2, nullptr); }) &&
         refused([&] { engine.last_error(); }) && refused([&] { engine.program(); }) &&
         refused([&] { engine.counters(); }) && refused([&] { engine.set_tracing(true); }) &&
         refused([&] { engine.events(); });
}

TEST(Threads, AForkedProcessIsToldAndDoesNotHang) {
  for (int round = 0; round < 20; ++round) {
    auto scene = random_scene(round);
    Checker checker(*scene);
    auto engine =
        std::make_unique<Engine>(scene->program(), host(1, 0.0, round % 4 < 2), checker, EngineOptions{});
    checker.begin(0);
    if (round % 2 == 0) engine->begin();  // in the middle of a step, perhaps with locks held
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      const bool right = all_refused(*engine);
      engine.reset();
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(engine->abort(kPatience));
    EXPECT_EQ(run_step(*engine, checker, 1), Status::kDone);
    EXPECT_EQ(checker.missing(), 0);
    EXPECT_EQ(checker.broken, 0);
  }
}

}  // namespace
}  // namespace disco::testing
