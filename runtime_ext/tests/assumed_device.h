// A device that computes nothing: kernels and copies end when their assumed time is over, as on a GPU that
// the loop thread launches to and asks what has ended. So a core or two show what one loop thread manages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/engine.h"
#include "core/program.h"

namespace disco::testing {

struct AssumedTimes {
  std::int64_t kernel_ns = 0;
  std::int64_t copy_ns = 0;
  std::int64_t launch_ns = 0;  // of the launching thread, for each kernel and copy
};

class AssumedDevice final : public Device {
 public:
  explicit AssumedDevice(AssumedTimes times) : times_(times), lanes_(static_cast<std::size_t>(streams())) {}

  void connect(int, OpRunner&, ProgressListener&) override {}
  int compute_streams() const override { return 1; }
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t) override {
    return enqueue(stream, vertex, times_.kernel_ns);
  }
  Token enqueue_copy(int stream, const Copy& copy) override {
    return enqueue(stream, copy.vertex, times_.copy_ns);
  }
  void wait(int stream, int other, Token token) override {
    const Lane& awaited = lanes_[static_cast<std::size_t>(other)];
    if (token <= awaited.finished) return;
    Lane& lane = lanes_[static_cast<std::size_t>(stream)];
    lane.free_ns = std::max(lane.free_ns, awaited.due_ns[token - awaited.finished - 1]);
  }
  Token completed(int stream) override {
    Lane& lane = lanes_[static_cast<std::size_t>(stream)];
    const std::int64_t now = now_ns();
    while (!lane.due_ns.empty() && lane.due_ns.front() <= now) {
      lane.due_ns.pop_front();
      ++lane.finished;
    }
    return lane.finished;
  }
  bool failed() const override { return false; }
  DeviceFailure failure() const override { return {}; }
  void recover() override {}
  void trace(Span* spans, std::int32_t) override { spans_ = spans; }

 private:
  struct Lane {
    std::deque<std::int64_t> due_ns;  // of what is in flight, oldest first
    std::int64_t free_ns = 0;
    Token finished = 0;
  };

  Token enqueue(int stream, std::int32_t vertex, std::int64_t ns) {
    Lane& lane = lanes_[static_cast<std::size_t>(stream)];
    std::int64_t now = now_ns();
    for (const std::int64_t launched = now + times_.launch_ns; now < launched;) now = now_ns();
    const std::int64_t start = std::max(now, lane.free_ns);
    lane.free_ns = start + ns;
    lane.due_ns.push_back(lane.free_ns);
    if (spans_ != nullptr) spans_[vertex] = {start, lane.free_ns};
    return lane.finished + lane.due_ns.size();
  }

  AssumedTimes times_;
  std::vector<Lane> lanes_;
  Span* spans_ = nullptr;
};

// `kernels` on each device, each after the one before and one some way back, as in a layer with a residual.
// Every hundredth waits for a block of the next device's, of fifty kernels before, so that nothing need wait.
inline Program ladders(int devices, int kernels) {
  ProgramBuilder builder;
  std::vector<std::vector<std::int32_t>> made(static_cast<std::size_t>(devices));
  std::vector<std::int32_t> block(made.size(), -1);
  static char memory[2];
  for (int k = 0; k < kernels; ++k) {
    for (std::size_t d = 0; d < made.size(); ++d) {
      VertexDesc kernel;
      kernel.device = static_cast<int>(d);
      kernel.op = k;
      made[d].push_back(builder.add(kernel));
      if (k > 0) builder.edge(made[d][static_cast<std::size_t>(k - 1)], made[d].back());
      if (k > 7) builder.edge(made[d][static_cast<std::size_t>(k - 8)], made[d].back());
      if (k % 100 == 99) builder.edge(block[d], made[d].back());
    }
    if (k % 100 != 49) continue;
    for (std::size_t d = 0; d < made.size(); ++d) {
      const std::size_t from = (d + 1) % made.size();
      block[d] =
          builder.add({Kind::kCopy, static_cast<int>(from), -1, memory + 1, memory, 1, 0, Direction::kPeer});
      builder.edge(made[from].back(), block[d]);
    }
  }
  return std::move(builder).build();
}

inline std::vector<std::unique_ptr<Device>> assumed(int devices, AssumedTimes times) {
  std::vector<std::unique_ptr<Device>> made;
  for (int d = 0; d < devices; ++d) made.push_back(std::make_unique<AssumedDevice>(times));
  return made;
}

}  // namespace disco::testing
