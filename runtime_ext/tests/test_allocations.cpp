// Counts heap allocations of the whole process while a step runs. ThreadSanitizer's own operator new tells it
// what is ordered: not there.
#if !defined(__SANITIZE_THREAD__)

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
std::atomic<int> until_failure{0};  // allocations up to the one that fails; 0 = none does
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  if (until_failure.load(std::memory_order_relaxed) > 0 && until_failure.fetch_sub(1) == 1)
    throw std::bad_alloc();
  if (void* memory = std::malloc(bytes); memory != nullptr) return memory;
  throw std::bad_alloc();
}
// Every form that is used, so that none pairs with an operator delete of AddressSanitizer's.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace disco::testing {
namespace {

TEST(Allocations, AreCountedHere) {
  allocations = 0;
  counting = true;
  const auto one = std::make_unique<std::vector<int>>(3);
  counting = false;
  EXPECT_GE(allocations, 1);
}

TEST(Allocations, AStepMakesNone) {
  for (int seed = 0; seed < 60; ++seed) {
    auto scene = random_scene(seed, {.vertices = 80});
    Checker checker(*scene);
    EngineOptions options;
    options.dispatch = static_cast<Dispatch>(seed % 4);
    options.lookahead = seed % 3;
    options.copy_piece = seed % 2 == 0 ? 0 : 40;
    Engine engine(scene->program(), host(1 + seed % 2, 0.0, seed % 3 == 0), checker, options);
    ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
    for (std::uint64_t step = 1; step < 4; ++step) {
      allocations = 0;
      counting = true;
      const Status status = run_step(engine, checker, step);
      counting = false;
      ASSERT_EQ(status, Status::kDone);
      ASSERT_EQ(allocations, 0) << "seed " << seed << " step " << step;
    }
    ASSERT_EQ(checker.missing(), 0);
  }
}

// A step in which an op fails takes memory for what it says, and a traced one for what it records.
TEST(Allocations, AnyOneMayFailAndTheNextStepWorks) {
  for (const int kind : {0, 1, 2}) {
    auto scene = random_scene(11, {.vertices = 30, .devices = kind == 2 ? 2 : 1});
    std::int32_t victim = 0;
    while (scene->vertices[victim].kind != Kind::kKernel) ++victim;
    Checker checker(*scene);
    checker.callers = 1;
    auto devices = kind == 2 ? hosts(2, {}) : host(1 + kind, 0.0, kind == 0);
    Engine engine(scene->program(), std::move(devices), checker, {});
    ASSERT_EQ(run_step(engine, checker, 0), Status::kDone);
    std::uint64_t step = 1;
    for (int nth = 1; nth < 30; ++nth) {
      for (const bool traced : {false, true}) {
        engine.set_tracing(traced);
        checker.fail_at = victim;
        until_failure = nth;
        const Status status = run_step(engine, checker, step++);
        until_failure = 0;
        ASSERT_EQ(status, Status::kFailed) << "kind " << kind << " allocation " << nth;
        EXPECT_NE(engine.last_error().message, "");
        checker.fail_at = -1;
        ASSERT_EQ(run_step(engine, checker, step++), Status::kDone)
            << "kind " << kind << " allocation " << nth;
        ASSERT_EQ(checker.missing(), 0);
        ASSERT_EQ(checker.broken, 0);
      }
    }
  }
}

}  // namespace
}  // namespace disco::testing

#endif
