#include "cuda_side.h"

#include <ATen/Context.h>
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
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../core/current_device.h"
#include "../core/launch_graphs.h"
#include "backend.h"
#include "ops.h"
#include "peer_paths.h"
#include "planned_alloc.h"

namespace disco {

c10::Stream external_stream(c10::Device device, CudaStream native) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(native));
}

StreamScope::StreamScope(c10::Device device, CudaStream native)
    : impl_(c10::DeviceType::CUDA), before_(impl_.exchangeStream(external_stream(device, native))) {}

StreamScope::~StreamScope() { impl_.exchangeStream(before_); }

CallerOrder::CallerOrder(c10::Device where, CudaDevice& device, std::vector<c10::Stream> writers)
    : impl_(c10::DeviceType::CUDA), where_(where), device_(device), streams_(std::move(writers)) {
  for (int stream = 0; stream < device.streams(); ++stream) {
    streams_.push_back(external_stream(where, device.native_stream(stream)));
  }
  if (device.arrivals() != nullptr) streams_.push_back(external_stream(where, device.arrivals()));
}

CallerOrder::~CallerOrder() {
  if (event_ != nullptr) impl_.destroyEvent(event_, where_.index());
}

void CallerOrder::put_after_caller() {
  impl_.record(&event_, impl_.getStream(where_), where_.index(), c10::EventFlag::PYTORCH_DEFAULT);
  for (const c10::Stream& stream : streams_) impl_.block(event_, stream);
  device_.waits_for(event_);
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
  if (!first_ && returned == seen_) {
    workspace_.watch(seen_);  // the thread's op before may have been another stream's
    return;
  }
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

// Workspaces that recorded launches use, as long as this lives.
class KeptWorkspaces {
 public:
  KeptWorkspaces() = default;
  ~KeptWorkspaces() {
    for (Workspace* workspace : kept_) workspace->keep(false);
  }
  KeptWorkspaces(const KeptWorkspaces&) = delete;
  KeptWorkspaces& operator=(const KeptWorkspaces&) = delete;
  void add(CudaStream stream) {
    Workspace& workspace = Workspace::of(stream);
    if (std::find(kept_.begin(), kept_.end(), &workspace) != kept_.end()) return;
    kept_.push_back(&workspace);
    workspace.keep(true);
  }

 private:
  std::vector<Workspace*> kept_;
};

// Why engines launch no graphs on a GPU, or ""; tried once in a process.
std::string graphs_refused(const CudartApi& api, int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::string> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(ordinal); found != known.end()) return found->second;
  // Set to find the kernel that is at fault, which a graph would hide.
  if (const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING"); blocking != nullptr && *blocking == '1')
    return "CUDA_LAUNCH_BLOCKING is set";
  const CurrentDevice current(api, ordinal);
  return known.emplace(ordinal, LaunchGraphs::trial(api)).first->second;
}

// What the graphs of engines take that share an arena, and so a budget.
std::shared_ptr<GraphMemory> graph_memory_of(int ordinal, const at::Tensor& arena) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::weak_ptr<GraphMemory>> known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<GraphMemory>& entry = known[{ordinal, arena.const_data_ptr()}];
  std::shared_ptr<GraphMemory> memory = entry.lock();
  if (memory == nullptr) entry = memory = std::make_shared<GraphMemory>();
  return memory;
}

// One GPU of an engine.
struct Gpu {
  c10::Device where;
  CudaDevice& device;
  std::unique_ptr<CallerOrder> caller;
  std::vector<BlasWarmup> warmups;   // by compute stream; used by the loop thread alone
  std::vector<BlasWarmup> recorded;  // likewise, for launches that are recorded
};

// PyTorch's settings by which ops choose their kernels. Steps that begin under others have plans of their
// own; this is for those that change in the middle of one.
void kernel_settings(std::vector<std::uint64_t>& words) {
  at::Context& context = at::globalContext();
  const auto add = [&](auto value) { words.push_back(static_cast<std::uint64_t>(value)); };
  constexpr std::uint64_t kContradictory = 2;
  try {
    add(context.allowTF32CuBLAS());
  } catch (const c10::Error&) {
    add(kContradictory);
  }
  add(context.allowFP16ReductionCuBLAS());
  add(context.allowBF16ReductionCuBLAS());
  add(context.allowFP16AccumulationCuBLAS());
  add(context.blasPreferredBackend());
  add(context.deterministicAlgorithms());
  add(context.userEnabledCuDNN());
  add(context.benchmarkCuDNN());
  add(context.deterministicCuDNN());
  add(context.userEnabledFlashSDP());
  add(context.userEnabledMemEfficientSDP());
  add(context.userEnabledMathSDP());
}

class CudaSide : public EngineSide {
 public:
  CudaSide(const std::vector<StartedOn>& given, const std::vector<std::unique_ptr<Device>>& devices) {
    for (std::size_t i = 0; i < given.size(); ++i) {
      auto& device = static_cast<CudaDevice&>(*devices[i]);
      Gpu& gpu = gpus_.emplace_back(Gpu{given[i].device, device, nullptr, {}, {}});
      for (int stream = 0; stream < device.compute_streams(); ++stream) {
        gpu.warmups.emplace_back(gpu.where, device.native_stream(stream));
        if (device.repeats()) gpu.recorded.emplace_back(gpu.where, device.native_stream(stream));
      }
      ranges_.add(given[i].arena);
    }
    for (Gpu& gpu : gpus_) {
      std::vector<c10::Stream> writers;
      for (const Gpu& other : gpus_) {
        if (&other == &gpu) continue;
        const int lane = other.device.lane(Direction::kPeer);
        writers.push_back(external_stream(other.where, other.device.native_stream(lane)));
      }
      gpu.caller = std::make_unique<CallerOrder>(gpu.where, gpu.device, std::move(writers));
    }
  }

  void run(const OpTable& table, std::int32_t op, int number, int stream) override {
    Gpu& gpu = gpus_[static_cast<std::size_t>(number)];
    const StreamScope scope(gpu.where, gpu.device.launch_stream(stream));
    if (!gpu.device.recording()) gpu.warmups[static_cast<std::size_t>(stream)].run();
    table.run(op);
  }
  // The thread's products on the stream that records take the same workspace as on the one where the graph
  // runs.
  void before_recording(int number, int stream) override {
    Gpu& gpu = gpus_[static_cast<std::size_t>(number)];
    const StreamScope scope(gpu.where, gpu.device.launch_stream(stream));
    gpu.recorded[static_cast<std::size_t>(stream)].run();
    workspaces_.add(gpu.device.native_stream(stream));
  }
  void settings(std::vector<std::uint64_t>& words) override { kernel_settings(words); }
  void put_after_caller() override {
    for (const Gpu& gpu : gpus_) gpu.caller->put_after_caller();
  }
  bool may_never_end() const override { return true; }

 private:
  std::vector<Gpu> gpus_;
  PlannedRanges ranges_;
  KeptWorkspaces workspaces_;
};

class CudaBackend : public Backend {
 public:
  c10::DispatchKey key() const override { return c10::DispatchKey::CUDA; }
  MemoryKind memory() const override { return MemoryKind::kGpu; }

  Started start(const std::vector<StartedOn>& devices, const Settings& settings,
                const std::vector<double>& /*links*/) const override {
    for (const StartedOn& each : devices) {
      if (!each.device.has_index())
        throw std::invalid_argument("a CUDA device needs its index, as in cuda:0");
    }
    const CudartApi api = CudartApi::load();
    std::vector<std::unique_ptr<Device>> started;
    std::vector<bool> relayed(devices.size());
    for (const StartedOn& each : devices) {
      CudaDeviceOptions options;
      options.ordinal = each.device.index();
      options.compute_streams = settings.host.compute_streams;
      options.window = std::max(options.window, settings.engine.lookahead + 2);
      options.streams = CudaStreams::shared(api, options.ordinal);
      if (settings.engine.graphs) options.no_graphs = graphs_refused(api, options.ordinal);
      options.graphs = settings.engine.graphs && options.no_graphs.empty();
      options.graph_bytes = settings.graph_bytes;
      options.graph_memory = graph_memory_of(options.ordinal, each.arena);
      for (std::size_t i = 0; i < devices.size(); ++i) {
        const c10::Device other = devices[i].device;
        if (other == each.device) continue;
        const at::Tensor& arena = devices[i].arena;
        const bool direct = peer_path(each.device, other) == PeerPath::kDirect;
        relayed[i] = relayed[i] || !direct;
        options.neighbours.push_back({other.index(), arena.const_data_ptr(), arena.nbytes(), direct,
                                      CudaStreams::shared(api, other.index())});
      }
      started.push_back(std::make_unique<CudaDevice>(api, std::move(options)));
    }
    for (std::size_t i = 0; i < started.size(); ++i) {
      if (relayed[i]) static_cast<CudaDevice&>(*started[i]).expect_arrivals();
    }
    auto side = std::make_unique<CudaSide>(devices, started);
    return {std::move(side), std::move(started)};
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

Pinned::Pinned(at::Tensor given, bool read_only) : tensor(std::move(given)) {
  if (!tensor.device().is_cpu()) throw std::invalid_argument("only host memory can be pinned");
  if (tensor.nbytes() == 0) return;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t first = begin / page * page;
  const std::uintptr_t last = (begin + tensor.nbytes() + page - 1) / page * page;
  using Access = PinnedRegion::Access;
  region = std::make_unique<PinnedRegion>(CudartApi::load(), reinterpret_cast<void*>(first), last - first,
                                          read_only ? Access::kRead : Access::kReadAndWrite);
  if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
    device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

Pinned::~Pinned() {
  const c10::OptionalDeviceGuard guard(device);
  region.reset();
}

}  // namespace disco
