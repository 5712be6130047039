// Random programs under random circumstances. DISCO_RANDOM_PROGRAMS=10000 core_tests
// --gtest_filter=RandomPrograms.* is the long run; DISCO_RANDOM_FIRST is the first seed, to repeat one.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kPrograms = 120;
#else
constexpr int kPrograms = 250;
#endif

int from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}

// What one seed stands for.
struct Circumstances {
  explicit Circumstances(std::uint64_t seed) {
    random.seed(seed * 0x9e3779b97f4a7c15ULL + 1);
    const std::size_t kind = random.below(10);
    scene.vertices = 4 + static_cast<int>(random.below(90));
    scene.max_predecessors = 1 + static_cast<int>(random.below(5));
    scene.copies = random.unit() * 0.6;
    scene.gate = random.below(2) == 0;
    scene.words = 1 + static_cast<int>(random.below(64));
    scene.devices = kind < 5 ? 1 : kind < 9 ? 2 + static_cast<int>(random.below(3)) : 8;
    scene.reuse = random.unit() * 0.6;
    host.compute_streams = 1 + static_cast<int>(random.below(3));
    if (scene.devices == 8) host.compute_streams = 1;
    host.inline_compute = random.below(2) == 0;
    if (scene.devices == 1 && random.below(2) == 0) {
      host.compute_streams = 1;
      host.inline_compute = true;
      callers = static_cast<int>(random.below(4));
      if (random.below(3) == 0) slice = 1e-6 * static_cast<double>(random.below(300));
    }
    if (random.below(3) == 0) {
      host.link_bandwidth = 1e6 * static_cast<double>(1 + random.below(20));
      host.link_latency = 1e-6 * static_cast<double>(random.below(20));
      host.link_jitter = random.below(2) == 0 ? 0.5 : 0.0;
    }
    engine.dispatch = static_cast<Dispatch>(random.below(4));
    engine.lookahead = static_cast<int>(random.below(5));
    engine.copy_depth = 1 + static_cast<int>(random.below(3));
    engine.seed = seed;
    engine.time_ops = random.below(4) == 0;
    polled = scene.devices <= 2 && random.below(8) == 0;
    slow_ops = random.below(3) == 0;
    if (random.below(2) == 0) host.small_copy = 0;
    if (random.below(2) == 0) engine.copy_piece = static_cast<std::int64_t>(1 + random.below(200));
  }

  std::vector<std::unique_ptr<Device>> devices(std::uint64_t seed) const {
    auto made = hosts(scene.devices, host);
    if (!polled) return made;
    auto last = std::make_unique<PolledDevice>(host.compute_streams, seed);
    last->batches = {1 + static_cast<int>(seed % kMostCopies), 1000, 2000};
    made.back() = std::move(last);
    return made;
  }

  Random random;
  SceneOptions scene;
  HostDeviceOptions host;
  EngineOptions engine;
  bool polled = false;
  bool slow_ops = false;
  int callers = 0;  // see Checker
  double slice = 60.0;
};

// Now and then an op takes its time, before it reads or after it has written.
void disturb(Checker& checker, std::uint64_t seed) {
  const auto pause = [seed](std::int32_t op, std::uint64_t where) {
    Random random;
    random.seed(seed * 1000 + static_cast<std::uint64_t>(op) * 2 + where);
    if (random.below(4) != 0) return;
    const std::int64_t until = now_ns() + static_cast<std::int64_t>(random.below(60'000));
    if (random.below(2) == 0) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(until - now_ns()));
    } else {
      while (now_ns() < until) {
      }
    }
  };
  checker.before_read = [pause](std::int32_t op) { pause(op, 0); };
  checker.before_return = [pause](std::int32_t op) { pause(op, 1); };
}

void expect_whole_step(Engine& engine, Checker& checker, std::uint64_t step, double slice) {
  ASSERT_EQ(run_step(engine, checker, step, slice), Status::kDone) << engine.last_error().message;
  ASSERT_EQ(checker.missing(), 0);
  ASSERT_EQ(checker.broken, 0);
}

void expect_events_fit(const Engine& engine, const Scene& scene) {
  std::vector<TraceEvent> of(scene.vertices.size());
  for (const TraceEvent& event : engine.events()) {
    of[event.vertex] = event;
    ASSERT_LE(event.ready, event.start);
    ASSERT_LE(event.issue, event.start);
    ASSERT_LE(event.start, event.end);
  }
  for (const auto& [from, to] : scene.edges) {
    if (scene.vertices[from].kind != Kind::kInput) {
      ASSERT_LE(of[from].end, of[to].ready) << from << " -> " << to;
    }
  }
}

// A step in which op `victim` throws.
void fail_a_step(Engine& engine, Checker& checker, std::int32_t victim, std::uint64_t step) {
  checker.fail_at = victim;
  ASSERT_EQ(run_step(engine, checker, step), Status::kFailed);
  checker.fail_at = -1;
  ASSERT_EQ(engine.last_error().vertex, victim);
  ASSERT_FALSE(engine.last_error().draining);
  for (const std::int32_t s : engine.program().successors_of(victim)) ASSERT_FALSE(checker.ran(s));
}

// A step that is aborted after some time, by the caller or by another thread.
void abort_a_step(Engine& engine, Checker& checker, Random& random, std::uint64_t step) {
  const std::chrono::microseconds pause(random.below(250));
  const auto abort = [&] {
    std::this_thread::sleep_for(pause);
    EXPECT_TRUE(engine.abort(kPatience));
  };
  checker.begin(step);
  engine.begin();
  Status status = Status::kDone;
  if (random.below(2) == 0) {
    std::thread aborter(abort);
    status = engine.wait_out(kPatience);
    if (status == Status::kDone) {
      engine.deliver();
      status = engine.wait_end(kPatience);
    }
    aborter.join();
  } else {
    abort();
    status = engine.wait_end(kPatience);
  }
  ASSERT_TRUE(status == Status::kDone || status == Status::kAborted);
}

std::vector<std::int32_t> some_of(const std::vector<std::int32_t>& all, Random& random) {
  std::vector<std::int32_t> some;
  for (const std::int32_t each : all) {
    if (random.below(2) == 0) some.push_back(each);
  }
  return some;
}

void run_program(std::uint64_t seed) {
  Circumstances given(seed);
  auto scene = random_scene(seed, given.scene);
  Checker checker(*scene);
  if (given.slow_ops) disturb(checker, seed);
  checker.callers = given.callers;
  Engine engine(scene->program(), given.devices(seed), checker, given.engine);
  std::vector<std::int32_t> kernels, residents;
  for (std::int32_t v = 0; v < scene->size(); ++v) {
    if (scene->vertices[v].kind == Kind::kKernel) kernels.push_back(v);
    if (scene->vertices[v].kind == Kind::kInput && scene->vertices[v].bytes > 0) residents.push_back(v);
  }
  for (std::uint64_t step = 0; step < 4; ++step) {
    const bool traced = !given.polled && given.random.below(4) == 0;
    engine.set_tracing(traced);
    const std::size_t fate = given.random.below(5);
    if (fate == 0 && !kernels.empty()) {
      fail_a_step(engine, checker, kernels[given.random.below(kernels.size())], 10 * step);
    } else if (fate == 1) {
      abort_a_step(engine, checker, given.random, 10 * step);
    }
    if (::testing::Test::HasFatalFailure()) return;
    if (engine.holds_residents() && given.random.below(4) == 0) {
      engine.invalidate(some_of(residents, given.random));
    } else if (given.random.below(8) == 0) {
      engine.invalidate();
    }
    expect_whole_step(engine, checker, 10 * step + 1, given.slice);
    if (traced && !::testing::Test::HasFatalFailure()) expect_events_fit(engine, *scene);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(RandomPrograms, EveryVertexSeesItsPredecessorsWhateverHappens) {
  const int first = from_environment("DISCO_RANDOM_FIRST", 0);
  const int count = from_environment("DISCO_RANDOM_PROGRAMS", kPrograms);
  for (int seed = first; seed < first + count; ++seed) {
    run_program(seed);
    if (HasFatalFailure()) {
      FAIL() << "repeat with DISCO_RANDOM_FIRST=" << seed << " DISCO_RANDOM_PROGRAMS=1";
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // it would report the planted races

// Whether the other edges make `to` wait for `from` all the same.
bool implied(const Scene& scene, std::size_t dropped) {
  const auto [from, to] = scene.edges[dropped];
  std::vector<bool> reached(scene.vertices.size(), false);
  reached[from] = true;
  for (std::int32_t v = from; v < to; ++v) {
    if (!reached[v]) continue;
    for (std::size_t i = 0; i < scene.edges.size(); ++i) {
      if (scene.edges[i].first == v && scene.edges[i] != scene.edges[dropped])
        reached[scene.edges[i].second] = true;
    }
  }
  return reached[to];
}

TEST(RandomPrograms, AMissingEdgeIsNoticed) {
  int planted = 0;
  int noticed = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    auto scene = random_scene(seed, {.vertices = 40, .gate = false, .devices = 2, .reuse = 0.5});
    Random random;
    random.seed(seed);
    const std::size_t dropped = random.below(scene->edges.size());
    const Kind from = scene->vertices[scene->edges[dropped].first].kind;
    if (from == Kind::kInput || implied(*scene, dropped)) continue;
    ++planted;
    Checker checker(*scene);
    // The one that should come first waits for the other, as long as that may need if nothing holds it up.
    checker.before_read = [&, late = scene->edges[dropped].first,
                           early = scene->edges[dropped].second](std::int32_t op) {
      if (op != late) return;
      const std::int64_t until =
          now_ns() + (scene->vertices[early].kind == Kind::kKernel ? 5'000'000 : 500'000);
      while (!checker.ran(early) && now_ns() < until) std::this_thread::yield();
    };
    EngineOptions options;
    options.dispatch = Dispatch::kRandom;
    HostDeviceOptions host;
    host.compute_streams = 2;
    host.small_copy = 0;
    Engine engine(scene->program(dropped), hosts(2, host), checker, options);
    for (std::uint64_t step = 0; step < 30 && checker.broken == 0; ++step) {
      ASSERT_EQ(run_step(engine, checker, step), Status::kDone);
      checker.missing();
    }
    noticed += checker.broken > 0 ? 1 : 0;
  }
  EXPECT_GE(planted, 15);
  EXPECT_GE(noticed, planted / 2) << "of " << planted;
}
#endif

}  // namespace
}  // namespace disco::testing
