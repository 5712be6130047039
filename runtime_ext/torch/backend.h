// What depends on the kind of device that ops run on: one subclass of Backend for each kind, in a file of its
// own, entered in Backend::of.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../core/device.h"
#include "engine_settings.h"
#include "planned_alloc.h"

namespace disco {

class OpTable;

// What one engine's devices ask of PyTorch. Calls come from the threads that they are documented for.
class EngineSide {
 public:
  virtual ~EngineSide() = default;
  // Runs or launches op `op` of `table` on a compute stream of device `number`, counted among those that were
  // started; on the thread that has the stream.
  virtual void run(const OpTable& table, std::int32_t op, int number, int stream) = 0;
  // See OpRunner, of device `number`.
  virtual void before_recording(int /*number*/, int /*stream*/) {}
  virtual void settings(std::vector<std::uint64_t>& /*words*/) {}
  // On the caller's thread: all that the engine launches from now on comes after the work that this thread
  // has put on PyTorch's current stream.
  virtual void put_after_caller() {}
  // Whether work that does not end may write to its memory for ever, so that nothing of it can be freed.
  virtual bool may_never_end() const { return false; }
};

// A device to start, and the memory there that ops use, which outlives it.
struct StartedOn {
  c10::Device device;
  at::Tensor arena;
};

// The devices of one engine and their PyTorch side, which outlives them.
struct Started {
  std::unique_ptr<EngineSide> side;
  std::vector<std::unique_ptr<Device>> devices;
};

class Backend {
 public:
  // The backend for `device`. Throws std::invalid_argument where there is none.
  static const Backend& of(c10::Device device);
  virtual ~Backend() = default;

  // Of tensors on such a device.
  virtual c10::DispatchKey key() const = 0;
  // What its ops allocate.
  virtual MemoryKind memory() const = 0;
  // With which boxed calls go to their kernels at once; empty: through the dispatcher. All tensors of an op
  // are on one device and outside autograd, so the kernel is known without looking at them.
  virtual c10::DispatchKeySet kernels() const { return {}; }
  // Whether small ops are computed without PyTorch, see direct.h.
  virtual bool computes_small_ops() const { return false; }
  // Puts the decorator of the allocator in place, once; safe to call again.
  virtual void install_allocator() const {}
  // A copy of `value` on `device` in memory of its own.
  virtual at::Tensor copy_of(const at::Tensor& value, c10::Device device) const;
  // Devices for an engine, all of this kind: `links` has a bandwidth and a latency for each. Throws
  // std::invalid_argument, and what the devices' constructors throw.
  virtual Started start(const std::vector<StartedOn>& devices, const Settings& settings,
                        const std::vector<double>& links) const = 0;
};

const Backend& host_backend();
const Backend& cuda_backend();

// A device in host memory beside those that a backend starts: its ops run one at a time, on a thread of their
// own with `threads` OpenMP threads. Its EngineSide is OpTable::run.
std::unique_ptr<Device> start_host_device(int threads);

}  // namespace disco
