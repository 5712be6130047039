// The host backend: ops run on threads of this process, copies on the host device's lanes.
#include <ATen/EmptyTensor.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "../core/host_device.h"
#include "backend.h"
#include "compute_thread.h"
#include "ops.h"
#include "planned_alloc.h"

namespace disco {
namespace {

class HostSide : public EngineSide {
 public:
  void run(const OpTable& table, std::int32_t op, int /*number*/, int /*stream*/) override { table.run(op); }
};

class HostBackend : public Backend {
 public:
  c10::DispatchKey key() const override { return c10::DispatchKey::CPU; }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  c10::DispatchKeySet kernels() const override { return c10::DispatchKeySet(c10::DispatchKey::CPU); }
  bool computes_small_ops() const override { return true; }
  void install_allocator() const override { install_cpu_decorator(); }

  at::Tensor copy_of(const at::Tensor& value, c10::Device device) const override {
    if (!value.is_non_overlapping_and_dense()) return Backend::copy_of(value, device);
    at::Tensor copy = at::detail::empty_strided_cpu(value.sizes(), value.strides(), value.scalar_type());
    if (value.numel() > 0) std::memcpy(copy.mutable_data_ptr(), value.const_data_ptr(), value.nbytes());
    return copy;
  }

  Started start(const std::vector<StartedOn>& /*devices*/, const Settings& settings,
                const std::vector<double>& links) const override {
    Started started{std::make_unique<HostSide>(), {}};
    for (std::size_t d = 0; 2 * d < links.size(); ++d) {
      HostDeviceOptions options = settings.host;
      options.link_bandwidth = links[2 * d];
      options.link_latency = links.at(2 * d + 1);
      started.devices.push_back(std::make_unique<HostDevice>(options));
    }
    return started;
  }
};

}  // namespace

const Backend& host_backend() {
  static const HostBackend backend;
  return backend;
}

std::unique_ptr<Device> start_host_device(int threads) {
  HostDeviceOptions options;
  options.inline_compute = false;
  options.on_compute_thread = [threads](int) { prepare_compute_thread(threads); };
  return std::make_unique<HostDevice>(std::move(options));
}

at::Tensor Backend::copy_of(const at::Tensor& value, c10::Device device) const {
  return value.to(device, false, /*copy=*/true);
}

const Backend& Backend::of(c10::Device device) {
  if (device.is_cpu()) return host_backend();
  if (device.is_cuda()) return cuda_backend();
  throw std::invalid_argument("no backend for " + device.str() + ": use cpu or cuda");
}

}  // namespace disco
