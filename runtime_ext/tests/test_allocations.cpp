// Counts heap allocations of the whole process while a step runs. Sanitizers bring their own operator new:
// not there.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  if (void* memory = std::malloc(bytes); memory != nullptr) return memory;
  throw std::bad_alloc();
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

}  // namespace
}  // namespace disco::testing

#endif
