#include "cuda_side.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "backend.h"
#include "ops.h"
#include "planned_alloc.h"

namespace disco {

c10::Stream external_stream(c10::Device device, CudaStream native) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(native));
}

StreamScope::StreamScope(c10::Device device, CudaStream native)
    : impl_(c10::DeviceType::CUDA), before_(impl_.exchangeStream(external_stream(device, native))) {}

StreamScope::~StreamScope() { impl_.exchangeStream(before_); }

CallerOrder::CallerOrder(c10::Device device) : impl_(c10::DeviceType::CUDA), device_(device) {}

CallerOrder::~CallerOrder() {
  if (event_ != nullptr) impl_.destroyEvent(event_, device_.index());
}

void CallerOrder::put_after_caller(CudaDevice& device) {
  impl_.record(&event_, impl_.getStream(device_), device_.index(), c10::EventFlag::PYTORCH_DEFAULT);
  for (int stream = 0; stream < device.streams(); ++stream) {
    impl_.block(event_, external_stream(device_, device.native_stream(stream)));
  }
  device.waits_for(event_);
}

BlasWarmup::BlasWarmup(c10::Device device, CudaStream stream) : workspace_(Workspace::of(stream)) {
  constexpr std::int64_t kSize = 16;
  const c10::InferenceMode inference;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kHalf}) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    const at::Tensor matrix = at::zeros({kSize, kSize}, options);
    const at::Tensor batch = at::zeros({2, kSize, kSize}, options);
    kinds_.push_back(
        {matrix, at::zeros({kSize}, options), batch, at::zeros_like(matrix), at::zeros_like(batch)});
  }
}

void BlasWarmup::run() {
  // Read before the products: what is given back while they run is taken again before the next op.
  const std::uint64_t returned = workspace_.returned();
  if (!first_ && returned == seen_) return;
  const c10::InferenceMode inference;
  const WorkspaceScope scope(workspace_);
  for (Operands& kind : kinds_) {
    at::mm_out(kind.result, kind.matrix, kind.matrix);
    at::addmm_out(kind.result, kind.bias, kind.matrix, kind.matrix);
    if (!first_) break;
    at::bmm_out(kind.batch_result, kind.batch, kind.batch);
  }
  first_ = false;
  seen_ = returned;
  workspace_.watch(seen_);
}

namespace {

// Where planned memory lies on the device, as long as this lives.
class PlannedRanges {
 public:
  PlannedRanges() = default;
  ~PlannedRanges() {
    for (const void* base : bases_) remove_planned_range(base);
  }
  PlannedRanges(const PlannedRanges&) = delete;
  PlannedRanges& operator=(const PlannedRanges&) = delete;
  void add(const at::Tensor& tensor) {
    bases_.reserve(bases_.size() + 1);
    add_planned_range(tensor.data_ptr(), tensor.nbytes());
    bases_.push_back(tensor.data_ptr());
  }

 private:
  std::vector<const void*> bases_;
};

class CudaSide : public EngineSide {
 public:
  CudaSide(c10::Device where, CudaDevice& device, const std::vector<at::Tensor>& memory)
      : where_(where), device_(device), caller_(where) {
    for (int stream = 0; stream < device.compute_streams(); ++stream) {
      warmups_.emplace_back(where, device.native_stream(stream));
    }
    for (const at::Tensor& tensor : memory) {
      if (!tensor.device().is_cpu()) ranges_.add(tensor);
    }
  }

  void run(const OpTable& table, std::int32_t op, int stream) override {
    const StreamScope scope(where_, device_.native_stream(stream));
    warmups_[static_cast<std::size_t>(stream)].run();
    table.run(op);
  }
  void put_after_caller() override { caller_.put_after_caller(device_); }
  bool may_never_end() const override { return true; }

 private:
  c10::Device where_;
  CudaDevice& device_;
  CallerOrder caller_;
  std::vector<BlasWarmup> warmups_;  // by compute stream; used by the loop thread alone
  PlannedRanges ranges_;
};

class CudaBackend : public Backend {
 public:
  c10::DispatchKey key() const override { return c10::DispatchKey::CUDA; }
  MemoryKind memory() const override { return MemoryKind::kGpu; }

  Started start(c10::Device where, const Settings& settings, const std::vector<double>& /*links*/,
                const std::vector<at::Tensor>& memory) const override {
    if (!where.has_index()) throw std::invalid_argument("a CUDA device needs its index, as in cuda:0");
    CudaDeviceOptions options;
    options.ordinal = where.index();
    options.compute_streams = settings.host.compute_streams;
    options.window = std::max(options.window, settings.engine.lookahead + 2);
    const CudartApi api = CudartApi::load();
    options.streams = CudaStreams::shared(api, options.ordinal);
    auto device = std::make_unique<CudaDevice>(api, options);
    Started started{std::make_unique<CudaSide>(where, *device, memory), {}};
    started.devices.push_back(std::move(device));
    return started;
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

Pinned::Pinned(at::Tensor given) : tensor(std::move(given)) {
  if (!tensor.device().is_cpu()) throw std::invalid_argument("only host memory can be pinned");
  if (tensor.nbytes() == 0) return;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t first = begin / page * page;
  const std::uintptr_t last = (begin + tensor.nbytes() + page - 1) / page * page;
  region = std::make_unique<PinnedRegion>(CudartApi::load(), reinterpret_cast<void*>(first), last - first);
  if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
    device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

Pinned::~Pinned() {
  const c10::OptionalDeviceGuard guard(device);
  region.reset();
}

}  // namespace disco
