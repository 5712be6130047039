// Planned allocation on CUDA: a decorator in front of PyTorch's CUDA caching allocator. A shared object of
// its own, because it needs CUDA's headers and c10_cuda while the engine needs neither. Never includes
// ATen/cuda.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../torch/planned_alloc.h"
#include "../torch/workspace.h"

namespace disco {
namespace {

using namespace c10::cuda::CUDACachingAllocator;  // NOLINT: the decorator spells every type of this interface
using c10::DeviceIndex;
using c10::MempoolId_t;

CUDAAllocator* base = nullptr;

constexpr MemoryKind kGpu = MemoryKind::kGpu;

// A type that no caller has: stands for one that this PyTorch's interface lacks.
struct Absent {};

// The parameter of attachOomRejectionObserver, which came after PyTorch 2.11.
template <typename Method>
struct FirstParameter;
template <typename Class, typename Parameter>
struct FirstParameter<void (Class::*)(Parameter)> {
  using type = Parameter;
};
template <typename Allocator, typename = void>
struct RejectionObserver {
  using type = Absent;
};
template <typename Allocator>
struct RejectionObserver<Allocator, std::void_t<decltype(&Allocator::attachOomRejectionObserver)>> {
  using type = typename FirstParameter<decltype(&Allocator::attachOomRejectionObserver)>::type;
};

void free_block(void* ptr) {
  if (ptr == nullptr || in_planned_range(ptr)) return;
  note_freed(ptr);
  base->raw_delete(ptr);
}

// Serves scheduled allocations, forwards everything else. A forwarded block keeps its own deleter, by which
// PyTorch knows its blocks (record_stream, CUDA graphs), except while a call is being recorded.
class CudaDecorator final : public CUDAAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return base->allocate(0);
    if (planning(kGpu)) {
      // Between an op's start and its product; of a block that the op allocates itself it differs in size.
      Workspace* const cleared = Workspace::cleared(nbytes);
      if (cleared != nullptr && may_be_planned(nbytes))
        throw ScheduleMismatch(
            "somebody has cleared PyTorch's cuBLAS workspaces while the step ran, and this op has a "
            "block of a workspace's size: clear them between steps");
      if (cleared != nullptr) return take(*cleared, nbytes);
    }
    if (void* ptr = planned_address(kGpu, nbytes)) {
      const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      return {ptr, ptr, &free_block, guard.getDevice()};
    }
    if (Workspace* workspace = WorkspaceScope::current()) return take(*workspace, nbytes);
    c10::DataPtr block = base->allocate(nbytes);
    note_forwarded(kGpu, block.get(), nbytes);
    if (!recording(kGpu)) return block;
    const c10::Device device = block.device();
    void* ptr = block.release_context();
    return {ptr, ptr, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return base->raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    base->copy_data(dest, src, count);
  }

  void* raw_alloc(size_t nbytes) override {
    if (void* ptr = planned_address(kGpu, nbytes)) return ptr;
    void* ptr = base->raw_alloc(nbytes);
    note_forwarded(kGpu, ptr, nbytes);
    return ptr;
  }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    if (void* ptr = planned_address(kGpu, nbytes)) return ptr;
    void* ptr = base->raw_alloc_with_stream(nbytes, stream);
    note_forwarded(kGpu, ptr, nbytes);
    return ptr;
  }
  void raw_delete(void* ptr) override { free_block(ptr); }

  // A planned block belongs to no stream: the plan's edges order its use.
  void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override {
    if (!in_planned_range(ptr.get())) base->recordStream(ptr, stream);
  }

  bool initialized() override { return base->initialized(); }
  void emptyCache(MempoolId_t pool) override { base->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return base->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { base->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { base->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return base->getMemoryInfo(device); }
  void init(int devices) override { base->init(devices); }
  double getMemoryFraction(DeviceIndex device) override { return base->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    base->setMemoryFraction(fraction, device);
  }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return base->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { base->enable(value); }
  bool isEnabled() const override { return base->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { base->cacheInfo(device, largest); }
  void* getBaseAllocation(void* ptr, size_t* size) override { return base->getBaseAllocation(ptr, size); }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override { return base->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    base->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    base->endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { base->releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return base->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    base->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    base->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { base->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& live) override {
    return base->checkPoolLiveAllocations(device, pool, live);
  }
  ShareableHandle shareIpcHandle(void* ptr) override { return base->shareIpcHandle(ptr); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return base->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return base->isHistoryEnabled(); }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skip) override {
    base->recordHistory(enabled, recorder, max_entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override {
    base->recordAnnotation(notes);
  }
  void pushCompileContext(std::string& notes) override { base->pushCompileContext(notes); }
  void popCompileContext() override { base->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { base->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return base->getUserMetadata(); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    base->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    base->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override { base->enablePeerAccess(from, to); }
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device, size_t count,
                          cudaStream_t stream, bool peer) override {
    return base->memcpyAsync(dst, dst_device, src, src_device, count, stream, peer);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return base->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    return base->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return base->name(); }

  // Younger than PyTorch 2.11, hence no `override`: each overrides where the interface has it.
  void markCaptureBegin(DeviceIndex device) {
    on_base([&](auto& to) -> decltype(to.markCaptureBegin(device)) { to.markCaptureBegin(device); });
  }
  void markCaptureEnd(DeviceIndex device) {
    on_base([&](auto& to) -> decltype(to.markCaptureEnd(device)) { to.markCaptureEnd(device); });
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) {
    std::shared_ptr<c10::GatheredContext> context;
    on_base([&](auto& to) -> std::void_t<decltype(to.getContextForPointer(ptr))> {
      context = to.getContextForPointer(ptr);
    });
    return context;
  }
  void attachOomRejectionObserver(RejectionObserver<CUDAAllocator>::type observer) {
    on_base([&](auto& to) -> decltype(to.attachOomRejectionObserver(std::move(observer))) {
      to.attachOomRejectionObserver(std::move(observer));
    });
  }
  c10::DataPtr allocateWithAddress(size_t nbytes, void* address) {
    c10::DataPtr block;
    on_base([&](auto& to) -> std::void_t<decltype(to.allocateWithAddress(nbytes, address))> {
      block = to.allocateWithAddress(nbytes, address);
    });
    return block;
  }

 private:
  static c10::DataPtr take(Workspace& workspace, std::size_t nbytes) {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    return workspace.take(nbytes, guard.getDevice(), [](std::size_t n) { return base->allocate(n); });
  }
  template <typename Call>
  static void on_base(Call call) {
    if constexpr (std::is_invocable_v<Call, CUDAAllocator&>) call(*base);
  }
};

// Once per process; blocks allocated before keep their own deleter.
void install() {
  static const bool installed = [] {
    base = allocator.load();
    if (base == nullptr) throw std::runtime_error("PyTorch has no CUDA allocator: initialise CUDA first");
    static auto* decorator = new CudaDecorator();
    allocator.store(decorator);
    return true;
  }();
  (void)installed;
}

}  // namespace

TORCH_LIBRARY(disco_accel_cuda, m) { m.def("install", &install); }

}  // namespace disco
