// Copies in pieces: their order, their bytes, and what a step that ends between two of them says.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <numeric>
#include <string>
#include <thread>

#include "support.h"

namespace disco::testing {
namespace {

// Notes what its copy lanes are handed.
class Noted final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Token enqueue_copy(int stream, const Copy& copy) override {
    copies.push_back(copy);
    return ForwardingDevice::enqueue_copy(stream, copy);
  }
  std::vector<Copy> copies;
};

// Kernel 0, reload 1 that waits for it, reload 2 that waits for nothing, and kernel 3 that waits for both.
struct Urgent {
  explicit Urgent(std::int64_t piece, int depth = 1, Dispatch dispatch = Dispatch::kPriority) {
    source.resize(2000);
    std::iota(source.begin(), source.end(), 'a');
    target.assign(2000, ' ');
    ProgramBuilder builder;
    VertexDesc kernel;
    kernel.op = 0;
    builder.add(kernel);
    builder.add({Kind::kCopy, 0, -1, target.data(), source.data(), 1000, 0, Direction::kHostToDevice});
    builder.add(
        {Kind::kCopy, 0, -1, target.data() + 1000, source.data() + 1000, 1000, 0, Direction::kHostToDevice});
    kernel.op = 1;
    builder.add(kernel);
    builder.edge(0, 1);
    builder.edge(1, 3);
    builder.edge(2, 3);
    auto polled = std::make_unique<PolledDevice>(1, 7);
    device = polled.get();
    auto noted = std::make_unique<Noted>(std::move(polled));
    handed = noted.get();
    EngineOptions options;
    options.copy_piece = piece;
    options.copy_depth = depth;
    options.dispatch = dispatch;
    options.lookahead = 0;
    engine = std::make_unique<Engine>(std::move(builder).build(), one(std::move(noted)), ops, options);
  }

  Status step() {
    engine->begin();
    return engine->wait_end(kPatience);
  }

  std::vector<char> source;
  std::vector<char> target;
  NoOps ops;
  PolledDevice* device = nullptr;
  Noted* handed = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(Pieces, AnUrgentCopyWaitsForPiecesNotForCopies) {
  for (const int depth : {1, 2}) {
    Urgent whole(0, depth);
    ASSERT_EQ(whole.step(), Status::kDone);
    ASSERT_EQ(whole.handed->copies.size(), 2U);
    EXPECT_EQ(whole.handed->copies.front().vertex, 2);  // is ready at once, and is not cut

    Urgent cut(100, depth);
    ASSERT_EQ(cut.step(), Status::kDone);
    const auto& copies = cut.handed->copies;
    ASSERT_EQ(copies.size(), 20U);
    EXPECT_EQ(copies.front().vertex, 2);
    EXPECT_EQ(copies.back().vertex, 2);  // the urgent one, ready later, has ended before
    std::vector<std::size_t> urgent;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      if (copies[i].vertex == 1) urgent.push_back(i);
    }
    ASSERT_EQ(urgent.size(), 10U);
    EXPECT_EQ(urgent.back() - urgent.front(), 9U);  // nothing comes between its pieces
    EXPECT_EQ(cut.target, cut.source);
    EXPECT_EQ(cut.engine->counters().vertices, 4);
    EXPECT_EQ(cut.engine->counters().reload_bytes, 2000);
  }
}

TEST(Pieces, AreAllOfACopyOnceAndNoneIsShort) {
  for (const std::int64_t piece : {1, 7, 100, 333, 666, 667, 999, 1000, 5000}) {
    for (const Dispatch dispatch :
         {Dispatch::kPriority, Dispatch::kRandom, Dispatch::kFixed, Dispatch::kSynchronous}) {
      Urgent cut(piece, 2, dispatch);
      for (int step = 0; step < 2; ++step) {
        cut.handed->copies.clear();
        std::fill(cut.target.begin(), cut.target.end(), ' ');
        ASSERT_EQ(cut.step(), Status::kDone);
        ASSERT_EQ(cut.target, cut.source);
        std::int64_t done[2] = {0, 0};
        for (const Copy& copy : cut.handed->copies) {
          std::int64_t& so_far = done[copy.vertex - 1];
          ASSERT_EQ(copy.before, so_far);
          ASSERT_EQ(copy.before + copy.bytes + copy.behind, 1000);
          ASSERT_EQ(copy.dst, cut.target.data() + (copy.vertex - 1) * 1000 + so_far);
          ASSERT_TRUE(copy.bytes >= piece || (copy.first() && copy.last()) || 2 * copy.bytes >= piece);
          so_far += copy.bytes;
        }
        ASSERT_EQ(done[0] + done[1], 2000);
      }
    }
  }
}

// A fixed order is one of copies, not of pieces.
TEST(Pieces, AFixedOrderEndsACopyBeforeItBeginsTheNext) {
  Urgent cut(100, 2, Dispatch::kFixed);
  ASSERT_EQ(cut.step(), Status::kDone);
  for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ(cut.handed->copies[i].vertex, i < 10 ? 1 : 2);
}

TEST(Pieces, TheLatencyAndTheJitterAreACopysOwn) {
  NoOps ops;
  class Deaf final : public ProgressListener {
   public:
    void on_progress() noexcept override {}
  } deaf;
  std::vector<char> source(4000);
  std::array<std::vector<char>, 2> targets = {std::vector<char>(4000), std::vector<char>(4000)};
  HostDeviceOptions options;
  options.link_bandwidth = 1e3;  // 4 s: cancelled, not waited for
  options.link_latency = 5.0;
  options.link_jitter = 0.5;
  HostDevice whole(options), cut(options);
  const int lane = whole.lane(Direction::kHostToDevice);
  std::int64_t seconds[2];
  for (HostDevice* device : {&whole, &cut}) {
    device->connect(0, ops, deaf);
    // A copy that has begun goes on while the other device makes its own.
    std::vector<char>& target = targets[device == &whole ? 0 : 1];
    device->enqueue_copy(lane, {0, target.data(), source.data(), 4000});
    const std::int64_t before = device->expected_end(lane);
    if (device == &whole) {
      device->enqueue_copy(lane, {1, target.data(), source.data(), 4000});
      seconds[0] = device->expected_end(lane) - before;
    } else {
      device->enqueue_copy(lane, {1, target.data(), source.data(), 1500, 0, 2500});
      const std::int64_t expected = device->expected_end(lane) - before;  // with the piece to come
      device->enqueue_copy(lane, {1, target.data() + 1500, source.data() + 1500, 2500, 1500, 0});
      seconds[1] = device->expected_end(lane) - before;
      EXPECT_NEAR(static_cast<double>(expected), static_cast<double>(seconds[1]), 10.0);
    }
    device->cancel();
  }
  EXPECT_NEAR(static_cast<double>(seconds[0]), static_cast<double>(seconds[1]), 10.0);
}

TEST(Pieces, AnEventBeginsWithTheFirstPieceAndEndsWithTheLast) {
  ProgramBuilder builder;
  std::vector<char> source(30'000, 'x'), target(30'000);
  builder.add({Kind::kCopy, 0, -1, target.data(), source.data(), 30'000, 0, Direction::kHostToDevice});
  HostDeviceOptions host;
  std::vector<std::int64_t> pieces;  // when each begins; on the lane's thread alone
  host.before_copy = [&](std::int32_t) { pieces.push_back(now_ns()); };
  NoOps ops;
  EngineOptions options;
  options.copy_piece = 3000;
  Engine engine(std::move(builder).build(), one(std::make_unique<HostDevice>(host)), ops, options);
  engine.set_tracing(true);
  const std::int64_t before = now_ns();
  engine.begin();
  const std::int64_t begun = now_ns();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  const auto events = engine.events();
  ASSERT_EQ(events.size(), 1U);
  ASSERT_EQ(pieces.size(), 10U);
  EXPECT_LE(events[0].start, pieces[1] - before);
  EXPECT_GE(events[0].end, pieces[9] - begun);
  EXPECT_EQ(events[0].bytes, 30'000);
  EXPECT_TRUE(engine.ran(0));
}

// A copy of which a piece is missing has not run, whatever its other pieces have done.
TEST(Pieces, ACopyThatIsCutShortHasNotRun) {
  std::vector<char> source(3000, 'x'), target(3000, ' ');
  ProgramBuilder builder;
  builder.add({Kind::kCopy, 0, -1, target.data(), source.data(), 3000, kChanges, Direction::kDeviceToHost});
  std::atomic<int> begun{0};
  std::atomic<bool> blocked{true};
  HostDeviceOptions host;
  host.before_copy = [&](std::int32_t) {
    if (++begun == 2) {
      while (blocked) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  };
  NoOps ops;
  EngineOptions options;
  options.copy_piece = 1000;
  options.copy_depth = 1;
  Engine engine(std::move(builder).build(), one(std::make_unique<HostDevice>(host)), ops, options);
  engine.begin();
  while (begun < 2) std::this_thread::yield();
  std::thread let_go([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    blocked = false;
  });
  EXPECT_TRUE(engine.abort(kPatience));
  let_go.join();
  EXPECT_EQ(engine.wait_end(kPatience), Status::kAborted);
  EXPECT_FALSE(engine.ran(0));
  EXPECT_EQ(engine.counters().changes, 1);
  EXPECT_LE(begun, 2);
  EXPECT_EQ(target[2999], ' ');
  engine.begin();
  ASSERT_EQ(engine.wait_end(kPatience), Status::kDone);
  EXPECT_TRUE(engine.ran(0));
  EXPECT_EQ(target, source);
}

TEST(Pieces, AStallBetweenTwoPiecesNamesTheCopy) {
  NoOps ops;
  EngineOptions options;
  options.copy_piece = 100;
  options.stall_timeout = 0.05;
  std::vector<char> source(1000, 'x'), target(1000);
  ProgramBuilder builder;
  builder.add({Kind::kCopy, 0, -1, target.data(), source.data(), 1000, 0, Direction::kHostToDevice});
  auto device = std::make_unique<PolledDevice>(1, 3);
  device->hang_at = 0;
  Engine engine(std::move(builder).build(), one(std::move(device)), ops, options);
  engine.begin();
  EXPECT_EQ(engine.wait_end(kPatience), Status::kStalled);
  EXPECT_EQ(engine.last_error().vertex, 0);
  EXPECT_EQ(engine.last_error().unfinished.in_flight, std::vector<std::int32_t>{0});
  EXPECT_TRUE(engine.abort(kPatience));
}

TEST(Pieces, APieceOfNegativeBytesIsRefused) { EXPECT_THROW(Urgent(-1), std::invalid_argument); }

}  // namespace
}  // namespace disco::testing
