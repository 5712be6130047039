#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/cuda_device.h"
#include "core/peer_copies.h"
#include "cuda_launcher.h"
#include "fake_cudart.h"
#include "support.h"

namespace disco::testing {
namespace {

using Peers = FakeCudart::Peers;
using Bytes = std::vector<unsigned char>;

// A prime number of random bytes over and over: each piece of a copy begins at another one of them. To draw
// them all took half of the time of all tests under ThreadSanitizer.
Bytes drawn(std::size_t size, std::uint64_t seed) {
  constexpr std::size_t kPeriod = 4099;
  Random random;
  random.seed(seed);
  Bytes period(kPeriod);
  for (unsigned char& byte : period) byte = static_cast<unsigned char>(random.below(256));
  Bytes bytes;
  while (bytes.size() < size) {
    const auto count = static_cast<std::ptrdiff_t>(std::min(kPeriod, size - bytes.size()));
    bytes.insert(bytes.end(), period.begin(), period.begin() + count);
  }
  return bytes;
}

// GPU 0 and its neighbours 1 and 2.
struct Senders {
  explicit Senders(bool direct) : api(FakeCudart::api()), own(api, 0) {
    for (const int ordinal : {1, 2}) {
      arenas.emplace_back(3 * PeerCopies::kPiece + 5);
      streams.push_back(std::make_shared<CudaStreams>(api, ordinal));
    }
    std::vector<Neighbour> neighbours;
    for (std::size_t i = 0; i < arenas.size(); ++i) {
      neighbours.push_back({static_cast<int>(i) + 1, arenas[i].data(), arenas[i].size(), direct, streams[i]});
    }
    copies = std::make_unique<PeerCopies>(api, 0, std::move(neighbours));
  }
  CudaStream lane() const { return own.lane(Direction::kPeer); }

  CudartApi api;
  CudaStreams own;
  std::vector<Bytes> arenas;
  std::vector<std::shared_ptr<CudaStreams>> streams;
  std::unique_ptr<PeerCopies> copies;
};

TEST(PeerCopies, BytesOfAnyNumberArriveThroughHostMemory) {
  constexpr std::size_t kPiece = PeerCopies::kPiece;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    FakeCudart cudart(seed);
    Senders senders(false);
    const int created = cudart.created;
    for (const std::size_t size : {std::size_t{1}, kPiece - 1, kPiece, kPiece + 1, 3 * kPiece + 5}) {
      std::vector<Bytes> sent;
      for (std::size_t i = 0; i < 2; ++i) {
        sent.push_back(drawn(size, seed + i));
        unsigned char* const target = senders.arenas[i].data();
        const Neighbour* to = senders.copies->holder(target, static_cast<std::int64_t>(size));
        ASSERT_NE(to, nullptr);
        EXPECT_EQ(to->ordinal, static_cast<int>(i) + 1);
        senders.copies->enqueue(*to, senders.lane(), target, sent[i].data(), size);
      }
      // Who waits for the lane waits for the bytes.
      senders.api.stream_synchronize(senders.lane());
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(std::equal(sent[i].begin(), sent[i].end(), senders.arenas[i].begin())) << size;
      }
    }
    EXPECT_EQ(cudart.created, created) << "a copy makes nothing";
    EXPECT_EQ(cudart.peer_copies, 0);
    for (const int kind : cudart.copy_kinds) EXPECT_TRUE(kind == 1 || kind == 2);
  }
}

TEST(PeerCopies, AReachableNeighbourGetsOneCopy) {
  FakeCudart cudart(0);
  cudart.reaching = {{0, 1}, {0, 2}};
  Senders senders(true);
  const Bytes sent = drawn(100, 1);
  unsigned char* const target = senders.arenas[1].data();
  senders.copies->enqueue(*senders.copies->holder(target, 100), senders.lane(), target, sent.data(), 100);
  senders.api.stream_synchronize(senders.lane());
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), target));
  EXPECT_EQ(cudart.peer_copies, 1);
  EXPECT_TRUE(cudart.copy_kinds.empty());
}

TEST(PeerCopies, MemoryOfNoNeighbourIsNobodys) {
  FakeCudart cudart(0);
  const Senders senders(false);
  const Bytes elsewhere(8);
  EXPECT_EQ(senders.copies->holder(elsewhere.data(), 8), nullptr);
  EXPECT_EQ(senders.copies->holder(senders.arenas[0].data() + senders.arenas[0].size(), 8), nullptr);
  EXPECT_EQ(senders.copies->holder(senders.arenas[0].data(), 0), nullptr);
}

TEST(PeerCopies, EveryFailingCallOfTheConstructorLeaksNothing) {
  for (int at = 0;; ++at) {
    FakeCudart cudart(0);
    const CudartApi api = FakeCudart::api();
    bool failed = false;
    {
      const auto streams = std::make_shared<CudaStreams>(api, 1);
      streams->arrivals();
      const int before = cudart.objects();
      cudart.calls = 0;
      cudart.fail_at = at;
      Bytes arena(8);
      try {
        const PeerCopies copies(api, 0, {{1, arena.data(), arena.size(), false, streams}});
      } catch (const CudaError& error) {
        EXPECT_EQ(error.call(), cudart.failed_call);
        failed = true;
      }
      cudart.fail_at = -1;
      EXPECT_EQ(cudart.objects(), before) << "call " << at;
    }
    EXPECT_EQ(cudart.objects(), 0);
    if (!failed && cudart.failed_call.empty()) {
      EXPECT_GT(at, 4);
      break;
    }
  }
}

TEST(PeerCopies, ATrialSaysWhetherBytesArrive) {
  for (const auto& [peers, path] :
       {std::pair(Peers::kRight, PeerPath::kDirect), std::pair(Peers::kNone, PeerPath::kNoAccess),
        std::pair(Peers::kRefused, PeerPath::kNoAccess), std::pair(Peers::kWrong, PeerPath::kWrongBytes)}) {
    FakeCudart cudart(0);
    cudart.peers = peers;
    cudart.contexts = {7};
    const CudartApi api = FakeCudart::api();
    const CudaStreams first(api, 0), second(api, 1);
    Bytes here(1000), there(1000);
    const TrialSide from{0, here.data(), first.lane(Direction::kPeer)};
    const TrialSide to{1, there.data(), second.lane(Direction::kPeer)};
    EXPECT_EQ(try_peer_path(api, from, to, here.size()), path);
    // A second time access is there already.
    EXPECT_EQ(try_peer_path(api, from, to, here.size()), path);
    EXPECT_EQ(cudart.device, 7);
    EXPECT_EQ(cudart.last_error, 0);
  }
}

// Two GPUs under one engine, each the other's neighbour: every transfer goes to the other one.
struct Pair {
  Pair(std::uint64_t seed, bool direct) : cudart(seed) {
    cudart.reaching = {{0, 1}, {1, 0}};
    scene = random_scene(seed, {.vertices = 60, .copies = 0.6, .devices = 2, .reuse = 0.3});
    checker = std::make_unique<Checker>(*scene);
    launcher = std::make_unique<Launcher>(cudart, *checker);
    launcher->ordinals = {0, 1};
    const CudartApi api = FakeCudart::api();
    std::vector<std::shared_ptr<CudaStreams>> streams;
    for (const int ordinal : {0, 1}) streams.push_back(std::make_shared<CudaStreams>(api, ordinal));
    std::vector<std::unique_ptr<Device>> devices;
    for (const int ordinal : {0, 1}) {
      CudaDeviceOptions options{ordinal, 1 + static_cast<int>(seed % 2), 8, streams[ordinal]};
      options.neighbours = {{1 - ordinal, nullptr, SIZE_MAX, direct, streams[1 - ordinal]}};
      auto device = std::make_unique<CudaDevice>(api, options);
      if (!direct) device->expect_arrivals();
      launcher->targets.push_back(device.get());
      devices.push_back(std::move(device));
    }
    EngineOptions options;
    options.dispatch = static_cast<Dispatch>(seed % 4);
    options.lookahead = static_cast<int>(seed % 3);
    engine = std::make_unique<Engine>(scene->program(), std::move(devices), *launcher, options);
  }

  FakeCudart cudart;
  std::unique_ptr<Scene> scene;
  std::unique_ptr<Checker> checker;
  std::unique_ptr<Launcher> launcher;
  std::unique_ptr<Engine> engine;
};

TEST(SeveralCudaDevices, NoVertexStartsBeforeItsPredecessors) {
  int peer_copies = 0;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    Pair pair(seed, seed % 2 == 0);
    for (std::uint64_t step = 0; step < 3; ++step) {
      pair.engine->set_tracing(step == 1);
      ASSERT_EQ(run_step(*pair.engine, *pair.checker, step), Status::kDone)
          << "seed " << seed << " " << pair.engine->last_error().message;
      ASSERT_EQ(pair.checker->missing(), 0) << "seed " << seed;
      ASSERT_EQ(pair.checker->broken, 0) << "seed " << seed;
    }
    peer_copies += pair.cudart.peer_copies;
    const FakeCudart* cudart = &pair.cudart;
    pair.engine.reset();
    EXPECT_EQ(cudart->objects(), 0);
  }
  EXPECT_GT(peer_copies, 40);
}

TEST(SeveralCudaDevices, EveryFailingCallOfAStepFailsThatStepOnly) {
  for (const bool direct : {false, true}) {
    int failures = 0;
    for (int at = 0; at < 600; ++at) {
      Pair pair(4, direct);
      ASSERT_EQ(run_step(*pair.engine, *pair.checker, 0), Status::kDone);
      pair.cudart.calls = 0;
      pair.cudart.fail_at = at;
      const Status status = run_step(*pair.engine, *pair.checker, 1);
      if (pair.cudart.calls <= at) break;
      pair.cudart.fail_at = -1;
      if (status != Status::kDone) {
        ASSERT_EQ(status, Status::kFailed) << "call " << at;
        ++failures;
      }
      const int before = pair.checker->broken;
      ASSERT_EQ(run_step(*pair.engine, *pair.checker, 2), Status::kDone)
          << "call " << at << " " << pair.engine->last_error().message;
      ASSERT_EQ(pair.checker->missing(), 0) << "call " << at;
      EXPECT_EQ(pair.checker->broken, before);
    }
    EXPECT_GT(failures, 30);
  }
}

}  // namespace
}  // namespace disco::testing
