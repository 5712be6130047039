// Small copies that are ready together: what goes in one call, in which order, and who waits for what.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "support.h"

namespace disco::testing {
namespace {

// Notes the vertices of each call for copies; refuses the call for copy `refused`.
class Calls final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Token enqueue_copy(int stream, const Copy& copy) override {
    note({copy.vertex});
    return ForwardingDevice::enqueue_copy(stream, copy);
  }
  Token enqueue_copies(int stream, std::span<const Copy> copies, std::int32_t& blamed) override {
    std::vector<std::int32_t> vertices;
    for (const Copy& copy : copies) {
      EXPECT_TRUE(copy.first() && copy.last());
      vertices.push_back(blamed = copy.vertex);
      if (copy.vertex == refused) throw std::runtime_error("no room for it");
    }
    note(vertices);
    return ForwardingDevice::enqueue_copies(stream, copies, blamed);
  }
  std::vector<std::vector<std::int32_t>> made;
  std::int32_t refused = -1;

 private:
  void note(std::vector<std::int32_t> vertices) { made.push_back(std::move(vertices)); }
};

using Made = std::vector<std::vector<std::int32_t>>;

// Reloads of so many bytes each, which are ready at once, and behind each a kernel that notes its number.
struct Reloads {
  explicit Reloads(const std::vector<std::int64_t>& sizes, EngineOptions options = {},
                   BatchLimits limits = {kMostCopies, 100, 400}) {
    const std::int64_t all = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    source.resize(static_cast<std::size_t>(all));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>('a' + i % 23);
    target.assign(source.size(), ' ');
    ProgramBuilder builder;
    std::int64_t at = 0;
    for (const std::int64_t size : sizes) {
      builder.add(
          {Kind::kCopy, 0, -1, target.data() + at, source.data() + at, size, 0, Direction::kHostToDevice});
      at += size;
    }
    count = static_cast<std::int32_t>(sizes.size());
    for (std::int32_t v = 0; v < count; ++v) {
      VertexDesc kernel;
      kernel.op = v;
      builder.add(kernel);
      builder.edge(v, count + v);
    }
    auto polled = std::make_unique<PolledDevice>(1, 7);
    device = polled.get();
    device->batches = limits;
    auto noted = std::make_unique<Calls>(std::move(polled));
    calls = noted.get();
    options.copy_depth = 1;
    engine = std::make_unique<Engine>(std::move(builder).build(), one(std::move(noted)), ops, options);
  }

  Status step() {
    calls->made.clear();
    target.assign(target.size(), ' ');
    engine->begin();
    return engine->wait_end(kPatience);
  }

  std::int32_t count = 0;
  std::vector<char> source;
  std::vector<char> target;
  NoOps ops;
  PolledDevice* device = nullptr;
  Calls* calls = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(Batches, SmallCopiesThatAreReadyTogetherGoInOneCall) {
  Reloads reloads({100, 100, 100, 100, 1, 100, 101, 0, 50, 50});
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(reloads.step(), Status::kDone);
    // As many bytes as may go together, then up to the one that is too large, then the rest.
    EXPECT_EQ(reloads.calls->made, (Made{{0, 1, 2, 3}, {4, 5}, {6}, {7, 8, 9}}));
    EXPECT_EQ(reloads.target, reloads.source);
    EXPECT_EQ(reloads.engine->counters().vertices, 20);
    EXPECT_EQ(reloads.engine->counters().reload_bytes, 702);
    for (std::int32_t v = 0; v < 20; ++v) EXPECT_TRUE(reloads.engine->ran(v));
  }
}

TEST(Batches, NoMoreCopiesThanTheDeviceTakes) {
  Reloads many(std::vector<std::int64_t>(40, 1));
  ASSERT_EQ(many.step(), Status::kDone);
  ASSERT_EQ(many.calls->made.size(), 3U);
  EXPECT_EQ(many.calls->made[0].size(), 16U);
  EXPECT_EQ(many.calls->made[2].size(), 8U);
  Reloads none(std::vector<std::int64_t>(4, 1), {}, {});
  ASSERT_EQ(none.step(), Status::kDone);
  EXPECT_EQ(none.calls->made, (Made{{0}, {1}, {2}, {3}}));
}

// A copy that becomes ready while others are on their way goes as soon as the lane has room.
TEST(Batches, NoCopyWaitsForOthersToBecomeReady) {
  ProgramBuilder builder;
  std::vector<char> bytes(8, 'x'), target(8);
  for (int v = 0; v < 2; ++v) {
    VertexDesc kernel;
    kernel.op = v;
    builder.add(kernel);
    builder.add(
        {Kind::kCopy, 0, -1, target.data() + 4 * v, bytes.data() + 4 * v, 4, 0, Direction::kHostToDevice});
    if (v > 0) builder.edge(1, 2);
    builder.edge(2 * v, 2 * v + 1);
  }
  auto polled = std::make_unique<PolledDevice>(1, 7);
  polled->batches = {kMostCopies, 100, 400};
  auto noted = std::make_unique<Calls>(std::move(polled));
  Calls& calls = *noted;
  NoOps ops;
  Engine engine(std::move(builder).build(), one(std::move(noted)), ops, {});
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  EXPECT_EQ(calls.made, (Made{{1}, {3}}));
  EXPECT_EQ(target, bytes);
}

// The one before the last hangs: all that went with it is in flight, and what waits for them waits.
TEST(Batches, SuccessorsWaitForAllCopiesOfACall) {
  EngineOptions options;
  options.stall_timeout = 0.05;
  Reloads reloads({10, 10, 10, 10}, options);
  reloads.device->hang_at = 2;
  ASSERT_EQ(reloads.step(), Status::kStalled);
  const EngineError error = reloads.engine->last_error();
  EXPECT_EQ(error.unfinished.in_flight, (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(error.unfinished.waiting_count, 4);
  EXPECT_EQ(error.unfinished.waiting.front(), (Waiting{4, 0}));
  EXPECT_TRUE(reloads.engine->abort(kPatience));
  for (std::int32_t v = 4; v < 8; ++v) EXPECT_FALSE(reloads.engine->ran(v));
  ASSERT_EQ(reloads.step(), Status::kDone);
  EXPECT_EQ(reloads.target, reloads.source);
}

TEST(Batches, ACopyThatIsRefusedIsNamed) {
  Reloads reloads({10, 10, 10, 10});
  reloads.calls->refused = 2;
  ASSERT_EQ(reloads.step(), Status::kFailed);
  const EngineError error = reloads.engine->last_error();
  EXPECT_EQ(error.vertex, 2);
  EXPECT_FALSE(error.later);
  EXPECT_EQ(error.message, "no room for it");
  reloads.calls->refused = -1;
  ASSERT_EQ(reloads.step(), Status::kDone);
  EXPECT_EQ(reloads.target, reloads.source);
}

TEST(Batches, EveryOrderHasTheSameBytes) {
  const std::vector<std::int64_t> sizes(30, 30);
  for (const Dispatch dispatch :
       {Dispatch::kPriority, Dispatch::kFixed, Dispatch::kRandom, Dispatch::kSynchronous}) {
    EngineOptions options;
    options.dispatch = dispatch;
    Reloads reloads(sizes, options);
    ASSERT_EQ(reloads.step(), Status::kDone);
    EXPECT_EQ(reloads.target, reloads.source);
    std::vector<std::int32_t> order;
    for (const auto& call : reloads.calls->made) order.insert(order.end(), call.begin(), call.end());
    EXPECT_EQ(order.size(), 30U);
    EXPECT_EQ(std::is_sorted(order.begin(), order.end()), dispatch != Dispatch::kRandom);
    // One vertex at a time is what the last is for.
    EXPECT_EQ(reloads.calls->made.size(), dispatch == Dispatch::kSynchronous ? 30U : 3U);
  }
}

TEST(Batches, ACopyThatBecomesReadyWaitsForNoMoreThanAPiece) {
  EngineOptions options;
  options.copy_piece = 60;
  Reloads reloads({30, 30, 30, 80, 200, 30}, options);
  ASSERT_EQ(reloads.step(), Status::kDone);
  // 80 bytes are no more than a piece and a half.
  EXPECT_EQ(reloads.calls->made, (Made{{0, 1}, {2}, {3}, {4}, {4}, {4}, {5}}));
  EXPECT_EQ(reloads.target, reloads.source);
}

TEST(Batches, TracedCopiesGoOneByOne) {
  Reloads reloads(std::vector<std::int64_t>(4, 10));
  reloads.engine->set_tracing(true);
  ASSERT_EQ(reloads.step(), Status::kDone);
  EXPECT_EQ(reloads.calls->made, (Made{{0}, {1}, {2}, {3}}));
  reloads.engine->set_tracing(false);
  ASSERT_EQ(reloads.step(), Status::kDone);
  EXPECT_EQ(reloads.calls->made, (Made{{0, 1, 2, 3}}));
}

TEST(Batches, TheHostDeviceTakesThemWhereItsLinkTakesNoTime) {
  HostDeviceOptions options;
  EXPECT_EQ(HostDevice(options).batch_limits().copies, kMostCopies);
  EXPECT_EQ(HostDevice(options).batch_limits().each, options.small_copy);
  options.link_bandwidth = 1e9;
  EXPECT_EQ(HostDevice(options).batch_limits().copies, 1);
  options = {};
  options.small_copy = 0;
  EXPECT_EQ(HostDevice(options).batch_limits().copies, 1);
}

}  // namespace
}  // namespace disco::testing
