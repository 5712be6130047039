// Small copies on a GPU: one event for those of a call, and one call where the runtime has one.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/cuda_device.h"
#include "fake_cudart.h"
#include "support.h"

namespace disco::testing {
namespace {

constexpr int kCopies = 5;

// Offloads that are ready together, the third of nothing; each goes home again behind its own.
struct Round {
  explicit Round(int batches, std::uint64_t seed = 1) : cudart(seed) {
    cudart.batches = batches;
    ProgramBuilder builder;
    for (int i = 0; i < kCopies; ++i) {
      const auto bytes = static_cast<std::int64_t>(i == 2 ? 0 : 8 + 8 * i);
      source[i].assign(8, static_cast<std::uint64_t>(i + 1));
      middle[i].assign(8, 0);
      target[i].assign(8, 0);
      builder.add(
          {Kind::kCopy, 0, -1, middle[i].data(), source[i].data(), bytes, 0, Direction::kDeviceToHost});
    }
    for (int i = 0; i < kCopies; ++i) {
      const auto bytes = static_cast<std::int64_t>(8 + 8 * i);
      builder.add({Kind::kCopy, 0, -1, target[i].data(), middle[i].data(), i == 2 ? 0 : bytes, 0,
                   Direction::kHostToDevice});
      builder.edge(i, kCopies + i);
    }
    auto device = std::make_unique<CudaDevice>(FakeCudart::api(), CudaDeviceOptions{});
    gpu = device.get();
    EngineOptions options;
    options.stall_timeout = 5;
    engine = std::make_unique<Engine>(std::move(builder).build(), one(std::move(device)), ops, options);
  }

  Status step() {
    for (auto* words : {&middle, &target}) {
      for (auto& each : *words) each.assign(8, 0);
    }
    cudart.named.clear();
    cudart.batch_sizes.clear();
    cudart.calls = 0;
    engine->begin();
    return engine->wait_end(kPatience);
  }
  bool right() const {
    for (int i = 0; i < kCopies; ++i) {
      for (int word = 0; word < 8; ++word) {
        const bool copied = i != 2 && word <= i;
        if (target[i][word] != (copied ? source[i][word] : 0)) return false;
      }
    }
    return true;
  }

  FakeCudart cudart;
  NoOps ops;
  std::array<std::vector<std::uint64_t>, kCopies> source, middle, target;
  CudaDevice* gpu = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(CudaBatches, OneCallAndOneEventForCopiesThatAreReadyTogether) {
  for (const int version : {12, 13}) {
    Round round(version);
    ASSERT_EQ(round.step(), Status::kDone) << round.engine->last_error().message;
    EXPECT_TRUE(round.right());
    // A copy of nothing is none of the runtime's.
    EXPECT_EQ(round.cudart.batch_sizes, (std::vector<std::size_t>{4, 4}));
    EXPECT_EQ(round.cudart.named["cudaMemcpyAsync"], 0);
    EXPECT_EQ(round.cudart.named["cudaEventRecord"], 2);
  }
}

TEST(CudaBatches, WhereTheRuntimeHasNoneOneEventIsEnoughToo) {
  Round round(0);
  ASSERT_EQ(round.step(), Status::kDone) << round.engine->last_error().message;
  EXPECT_TRUE(round.right());
  EXPECT_EQ(round.cudart.named["cudaMemcpyAsync"], 8);
  EXPECT_EQ(round.cudart.named["cudaEventRecord"], 2);
}

// As drivers do that are older than the runtime.
TEST(CudaBatches, ARefusedBatchIsMadeOneByOneAndNoneIsAskedForAgain) {
  for (const int code : {36, 801, FakeCudart::kInvalidValue}) {
    Round round(13);
    round.cudart.fail_at = 0;
    round.cudart.fail_code = code;
    ASSERT_EQ(round.step(), Status::kDone) << round.engine->last_error().message;
    EXPECT_EQ(round.cudart.failed_call, "cudaMemcpyBatchAsync");
    EXPECT_TRUE(round.right());
    EXPECT_EQ(round.cudart.last_error, 0);
    EXPECT_EQ(round.cudart.named["cudaMemcpyBatchAsync"], 1);
    EXPECT_EQ(round.cudart.named["cudaEventRecord"], 2);
    round.cudart.fail_at = -1;
    ASSERT_EQ(round.step(), Status::kDone);
    EXPECT_EQ(round.cudart.named["cudaMemcpyBatchAsync"], 0);
    EXPECT_TRUE(round.right());
  }
}

TEST(CudaBatches, EveryFailingCallFailsThatStepOnlyAndNamesACopy) {
  for (const int version : {0, 13}) {
    std::set<std::int32_t> blamed;
    for (int at = 0; at < 60; ++at) {
      Round round(version);
      ASSERT_EQ(round.step(), Status::kDone);
      round.cudart.fail_at = at;
      const Status status = round.step();
      if (round.cudart.calls <= at) break;
      const EngineError error = round.engine->last_error();
      if (status == Status::kDone) {
        EXPECT_EQ(round.cudart.failed_call, "cudaMemcpyBatchAsync");
        EXPECT_TRUE(round.right());
      } else {
        EXPECT_NE(error.message.find(round.cudart.failed_call + " failed with error 400"), std::string::npos);
        ASSERT_GE(error.vertex, 0);
        if (round.cudart.failed_call == "cudaMemcpyAsync") blamed.insert(error.vertex);
      }
      round.cudart.fail_at = -1;
      ASSERT_EQ(round.step(), Status::kDone) << round.engine->last_error().message;
      EXPECT_TRUE(round.right()) << at;
    }
    // One by one, each but those of nothing has its turn.
    EXPECT_EQ(blamed.size(), version == 0 ? 8U : 0U);
  }
}

// What a fault hits while the copies are in flight is told with the names of all.
TEST(CudaBatches, AFaultInFlightNamesAllCopiesOfTheCall) {
  for (const int version : {0, 12, 13}) {
    Round round(version);
    const CudaStream lane = round.gpu->native_stream(round.gpu->lane(Direction::kDeviceToHost));
    round.cudart.hold(lane);
    round.cudart.fail_code = FakeCudart::kLaunchFailure;
    round.cudart.fail_at = 100;
    round.cudart.sticky = true;
    ASSERT_EQ(round.step(), Status::kFailed);
    const EngineError error = round.engine->last_error();
    EXPECT_TRUE(error.later && error.lost);
    EXPECT_EQ(error.unfinished.in_flight, (std::vector<std::int32_t>{0, 1, 2, 3, 4}));
    EXPECT_EQ(error.unfinished.in_flight_count, kCopies);
    round.cudart.hold(nullptr);
    round.cudart.fail_at = -1;
  }
}

}  // namespace
}  // namespace disco::testing
