// What running on CUDA asks of the PyTorch side, through PyTorch's device-generic guards: no CUDA header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../core/cuda_device.h"
#include "workspace.h"

namespace disco {

// The engine's stream `native`, a cudaStream_t, as PyTorch sees it: an external one, whose id is the handle.
c10::Stream external_stream(c10::Device device, CudaStream native);

// Makes a stream of the engine PyTorch's current one for this thread while it lives.
class StreamScope {
 public:
  StreamScope(c10::Device device, CudaStream native);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  c10::impl::VirtualGuardImpl impl_;
  c10::Stream before_;
};

// Orders all streams of a device, and those of other devices that write to its memory, after what the calling
// thread has put on PyTorch's current stream there so far: the optimizer's update, the batch's copy, the
// clone of a value in the arena.
class CallerOrder {
 public:
  // `device` is the engine's on `where`; `writers` are streams of others with the device that they are on.
  CallerOrder(c10::Device where, CudaDevice& device, std::vector<c10::Stream> writers);
  ~CallerOrder();
  CallerOrder(const CallerOrder&) = delete;
  CallerOrder& operator=(const CallerOrder&) = delete;
  // Waits for nothing. May be called while the loop thread enqueues. Throws c10::Error with CUDA's reason.
  void put_after_caller();

 private:
  c10::impl::VirtualGuardImpl impl_;
  c10::Device where_;
  CudaDevice& device_;
  std::vector<c10::Stream> streams_;
  void* event_ = nullptr;
};

// Matrix products of a few bytes on one compute stream. At the first product of a thread on a stream PyTorch
// takes the libraries' workspace: in a planned step that allocation would belong to no schedule, so it is
// made before.
class BlasWarmup {
 public:
  // `stream`: whose workspace the products take, in whatever stream they are made.
  BlasWarmup(c10::Device device, CudaStream stream);
  // Before each op, on the thread and the stream that will run it: takes the workspace unless it is taken.
  // All data types at the first call, later one product of each kind.
  void run();

 private:
  struct Operands {
    at::Tensor matrix, bias, batch, result, batch_result;
  };
  Workspace& workspace_;
  std::uint64_t seen_ = 0;
  bool first_ = true;
  std::vector<Operands> kinds_;
};

// The pages under a host tensor, registered with CUDA as long as this lives. Only for memory whose pages are
// its own (map_arena).
struct Pinned : torch::CustomClassHolder {
  // `read_only`: devices only read there, so that the pages of a private mapping stay shared. Throws
  // CudaError.
  Pinned(at::Tensor tensor, bool read_only);
  ~Pinned() override;

  at::Tensor tensor;
  std::unique_ptr<PinnedRegion> region;
  std::optional<c10::Device> device;  // PyTorch's current one then: giving back makes no context on another
};

}  // namespace disco
