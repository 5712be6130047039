// CudaDevice: streams and events of one GPU. Compiles and loads without CUDA: cudart is found at run time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"

namespace disco {

using CudaStream = void*;     // cudaStream_t
using CudaEvent = void*;      // cudaEvent_t
using CudaGraph = void*;      // cudaGraph_t
using CudaGraphNode = void*;  // cudaGraphNode_t
using CudaGraphExec = void*;  // cudaGraphExec_t

// Those of the CUDA runtime's functions by which launches are recorded and repeated. All or some may be
// missing.
struct GraphApi {
  int (*begin_capture)(CudaStream, int mode) = nullptr;    // cudaStreamBeginCapture
  int (*end_capture)(CudaStream, CudaGraph*) = nullptr;    // cudaStreamEndCapture
  int (*is_capturing)(CudaStream, int* status) = nullptr;  // cudaStreamIsCapturing
  int (*instantiate)(CudaGraphExec*, CudaGraph,
                     unsigned long long flags) = nullptr;                 // ...InstantiateWithFlags
  int (*launch)(CudaGraphExec, CudaStream) = nullptr;                     // cudaGraphLaunch
  int (*exec_destroy)(CudaGraphExec) = nullptr;                           // cudaGraphExecDestroy
  int (*destroy)(CudaGraph) = nullptr;                                    // cudaGraphDestroy
  int (*nodes)(CudaGraph, CudaGraphNode*, std::size_t* count) = nullptr;  // cudaGraphGetNodes
  int (*node_type)(CudaGraphNode, int* type) = nullptr;                   // cudaGraphNodeGetType
  int (*memcpy_parameters)(CudaGraphNode, void*) = nullptr;               // cudaGraphMemcpyNodeGetParams
  int (*pointer_attributes)(void*, const void* ptr) = nullptr;            // cudaPointerGetAttributes
  int (*event_record_with_flags)(CudaEvent, CudaStream,
                                 unsigned flags) = nullptr;  // cudaEventRecordWithFlags
  int (*launch_host_function)(CudaStream, void (*call)(void*),
                              void* argument) = nullptr;                // cudaLaunchHostFunc
  int (*memory_info)(std::size_t* free, std::size_t* total) = nullptr;  // cudaMemGetInfo

  bool complete() const;
};

// cudaMemcpyBatchAsync, whose arguments CUDA 13 has changed: one of the two, or none where the runtime has no
// batches.
struct BatchApi {
  int (*of_cuda_12)(void** dst, void** src, std::size_t* bytes, std::size_t count, void* attributes,
                    std::size_t* first, std::size_t attribute_count, std::size_t* failed,
                    CudaStream) = nullptr;
  int (*of_cuda_13)(void* const* dst, const void* const* src, const std::size_t* bytes, std::size_t count,
                    void* attributes, std::size_t* first, std::size_t attribute_count, CudaStream) = nullptr;

  explicit operator bool() const { return of_cuda_12 != nullptr || of_cuda_13 != nullptr; }
};

// The functions of the CUDA runtime that the engine calls, with its C ABI (an error is an int, 0 = success).
struct CudartApi {
  int (*get_device)(int* device) = nullptr;                                   // cudaGetDevice
  int (*set_device)(int device) = nullptr;                                    // cudaSetDevice
  int (*stream_create)(CudaStream*, unsigned flags) = nullptr;                // cudaStreamCreateWithFlags
  int (*stream_destroy)(CudaStream) = nullptr;                                // cudaStreamDestroy
  int (*stream_synchronize)(CudaStream) = nullptr;                            // cudaStreamSynchronize
  int (*stream_wait_event)(CudaStream, CudaEvent, unsigned flags) = nullptr;  // cudaStreamWaitEvent
  int (*event_create)(CudaEvent*, unsigned flags) = nullptr;                  // cudaEventCreateWithFlags
  int (*event_destroy)(CudaEvent) = nullptr;                                  // cudaEventDestroy
  int (*event_record)(CudaEvent, CudaStream) = nullptr;                       // cudaEventRecord
  int (*event_query)(CudaEvent) = nullptr;                                    // cudaEventQuery
  int (*event_elapsed)(float* ms, CudaEvent start, CudaEvent end) = nullptr;  // cudaEventElapsedTime
  int (*memcpy_async)(void* dst, const void* src, std::size_t bytes, int kind,
                      CudaStream) = nullptr;  // cudaMemcpyAsync
  int (*memcpy_peer_async)(void* dst, int dst_device, const void* src, int src_device, std::size_t bytes,
                           CudaStream) = nullptr;                            // cudaMemcpyPeerAsync
  int (*can_access_peer)(int* can, int device, int peer) = nullptr;          // cudaDeviceCanAccessPeer
  int (*enable_peer_access)(int peer, unsigned flags) = nullptr;             // cudaDeviceEnablePeerAccess
  int (*device_attribute)(int* value, int attribute, int device) = nullptr;  // cudaDeviceGetAttribute
  int (*host_register)(void*, std::size_t bytes, unsigned flags) = nullptr;  // cudaHostRegister
  int (*host_unregister)(void*) = nullptr;                                   // cudaHostUnregister
  // cudaGetLastError: returns and forgets this thread's last error.
  int (*get_last_error)() = nullptr;
  const char* (*error_string)(int) = nullptr;  // cudaGetErrorString
  GraphApi graphs;
  BatchApi batches;
  // cuDevicePrimaryCtxGetState, of the driver: whether a device has a context, without making one. May be
  // null.
  int (*primary_context_state)(int device, unsigned* flags, int* active) = nullptr;

  // The runtime already in the process (a CUDA build of torch brings one) or, failing that, the system's.
  // Throws CudaError naming what was looked for and where if there is none or a function is missing.
  static CudartApi load();
};

// A call into the CUDA runtime failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& call, int code, const std::string& text);
  const std::string& call() const { return call_; }  // e.g. "cudaEventRecord"
  int code() const { return code_; }                 // cudaError_t; -1 if the runtime could not be loaded

 private:
  std::string call_;
  int code_;
};

// Host memory registered with CUDA for as long as this lives (one call for a whole arena; copies are then
// asynchronous).
class PinnedRegion {
 public:
  // What devices do with the memory. Registered for writes, the pages of a private mapping of a file become
  // the process's own, each a copy.
  enum class Access { kReadAndWrite, kRead };

  // Throws CudaError; for kRead also where the current device cannot do that.
  PinnedRegion(const CudartApi& api, void* begin, std::size_t bytes, Access access = Access::kReadAndWrite);
  ~PinnedRegion();
  PinnedRegion(const PinnedRegion&) = delete;
  PinnedRegion& operator=(const PinnedRegion&) = delete;

 private:
  CudartApi api_;
  void* begin_;
};

// The streams of one GPU. The engines of a process share them: memory that PyTorch's allocator holds belongs
// to a stream, so streams of each plan's own would multiply it. They stay as long as somebody uses them.
class CudaStreams {
 public:
  // Throws CudaError.
  CudaStreams(const CudartApi& api, int ordinal);
  ~CudaStreams();
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;

  // Those of device `ordinal` that every caller in this process gets; made at the first call, never given
  // back.
  static std::shared_ptr<CudaStreams> shared(const CudartApi& api, int ordinal);

  // Compute stream `index`, made when it is first asked for. Throws CudaError.
  CudaStream compute(int index);
  CudaStream lane(Direction direction) const { return lanes_[static_cast<std::size_t>(direction)]; }
  // Takes what other GPUs have put into page-locked memory for this one; made when it is first asked for.
  // Throws CudaError.
  CudaStream arrivals();
  // Carries no work: launches are recorded on it, by whoever holds the mutex. No stream that does work can be
  // used for that, since other threads put some there at any time. Made when it is first asked for. Throws
  // CudaError.
  CudaStream recording();
  std::mutex& recording_mutex() { return recording_mutex_; }
  // Carries no work, so an event recorded on it happens at once, whatever the others wait for.
  CudaStream clock() const { return clock_; }

 private:
  CudaStream make();
  void destroy() noexcept;

  CudartApi api_;
  int ordinal_;
  std::mutex mutex_;
  std::vector<CudaStream> compute_;
  std::array<CudaStream, 3> lanes_{};  // by Direction
  CudaStream clock_ = nullptr;
  CudaStream arrivals_ = nullptr;
  CudaStream recording_ = nullptr;
  std::mutex recording_mutex_;
};

// Another GPU of the same engine, as one that copies to it sees it.
struct Neighbour {
  int ordinal = 0;
  const void* arena = nullptr;  // what lies in these bytes is of that GPU
  std::size_t bytes = 0;
  bool direct = false;  // a copy needs no host memory on its way
  std::shared_ptr<CudaStreams> streams;
};

// Bytes of a GPU that graphs take, of all engines that share them.
struct GraphMemory {
  std::atomic<std::int64_t> taken{0};
};

class LaunchGraphs;
class PeerCopies;

struct CudaDeviceOptions {
  int ordinal = 0;  // cuda device number
  int compute_streams = 1;
  int window = 64;                       // events per stream, hence the most work in flight on one
  std::shared_ptr<CudaStreams> streams;  // none: streams of its own
  std::vector<Neighbour> neighbours = {};
  bool graphs = false;                  // kernels of a segment are launched as one
  std::string no_graphs = {};           // why not, where they were wanted: what LaunchGraphs::trial says
  std::int64_t graph_bytes = 64 << 20;  // that all of them may take
  std::shared_ptr<GraphMemory> graph_memory = {};  // none: of its own
};

// Ops are launched by OpRunner on the loop thread; run() must launch on launch_stream(stream). The end of
// every copy and of every marked op is an event, from a ring made up front; completed() queries the oldest
// one, and what came before it in its stream has finished too. So a kernel whose successors follow it in its
// stream costs one call, its launch: on a virtual machine with an H200 recording an event took 7 us, as long
// as many a kernel. No callbacks, no allocation in a step. An error that the runtime reports later (a
// kernel's, say) is found by completed() and fails the device; which vertex it was, nobody can tell: the
// message lists the kernels in flight.
class CudaDevice final : public Device {
 public:
  // Bytes. On a virtual machine with an H200 a call for a copy took 5.6 us and one for an event 6.9, in which
  // its link of 52 GB/s carries 650 KB: a copy of this size takes 5 us there, less than its call. All
  // copies of a batch end together: the first may be late by the time of the rest, at most 20 us there, as
  // long as the calls for two copies take.
  static constexpr std::int64_t kSmallCopy = 256 << 10;
  static constexpr std::int64_t kBatchBytes = 1 << 20;

  // Throws CudaError, or std::invalid_argument on options out of range.
  CudaDevice(CudartApi api, CudaDeviceOptions options);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  CudaStream native_stream(int stream) const;
  // For the loop thread: where OpRunner::run launches now. While launches are recorded that is another
  // stream.
  CudaStream launch_stream(int stream) const;
  bool recording() const;
  // The stream that writes here what other GPUs sent through host memory; null where none of them does.
  CudaStream arrivals() const { return arrivals_; }
  // Called before connect(): other devices send through host memory. Throws CudaError.
  void expect_arrivals() { arrivals_ = streams_->arrivals(); }
  // All streams were told to wait for `event`, which the caller recorded on a stream of its own: until it has
  // happened, a step without progress waits for the caller and has not stalled. Any thread.
  void waits_for(CudaEvent event);

  void use_threads() override { shares_loop_ = true; }
  void connect(int index, OpRunner& runner, ProgressListener& listener) override;
  void attach_loop_thread() override;
  int compute_streams() const override { return options_.compute_streams; }
  int queue_room() const override { return options_.window; }
  bool waiting_for_caller() const override;
  Token enqueue_op(int stream, std::int32_t vertex, std::int32_t op) override;
  Token enqueue_copy(int stream, const Copy& copy) override;
  BatchLimits batch_limits() const override { return {kMostCopies, kSmallCopy, kBatchBytes}; }
  Token enqueue_copies(int stream, std::span<const Copy> copies, std::int32_t& blamed) override;
  bool repeats() const override { return graphs_ != nullptr; }
  Repeated repeat(int stream, const Segment& segment) override;
  void keep_graphs(const std::vector<Segment>& segments) override;
  GraphFigures graph_figures() const override;
  void wait(int stream, int other, Token token) override;
  Token completed(int stream) override;
  void mark(int stream) override;
  bool failed() const override;
  DeviceFailure failure() const override;
  void recover() override;
  void trace(Span* spans, std::int32_t vertices) override;
  void finish_trace() override;

 private:
  struct Lane;

  void make_lanes();
  void destroy() noexcept;
  void make_timing_events(std::size_t count);
  void check(const char* call, int code) const;
  void make_current() const;
  void put(int stream, const Copy& copy);
  bool put_batch(int stream, std::span<const Copy> copies);
  void before_work(int stream, std::int32_t vertex, bool first = true);
  Token after_work(int stream, std::int32_t vertex, bool last = true);
  void require_room(int stream, std::size_t tokens) const;
  void fail(std::string message, bool lost, std::vector<std::int32_t> in_flight);
  void fail_all(const char* call, int code);
  std::vector<std::int32_t> first_in_flight() const;
  int record(Lane& lane);
  std::int32_t in_flight_count() const;

  CudartApi api_;
  CudaDeviceOptions options_;
  std::shared_ptr<CudaStreams> streams_;
  std::unique_ptr<PeerCopies> peers_;     // none: no neighbours
  std::unique_ptr<LaunchGraphs> graphs_;  // none: kernels are launched one by one
  CudaStream arrivals_ = nullptr;
  bool shares_loop_ = false;                      // the loop thread launches on other devices too
  std::atomic<CudaEvent> caller_event_{nullptr};  // what waits_for was given
  std::atomic<std::uint64_t> caller_waits_{0};    // how often
  mutable std::uint64_t caller_seen_ = 0;         // of these, how many have happened
  int index_ = 0;
  OpRunner* runner_ = nullptr;
  std::vector<Lane> lanes_;
  bool failed_ = false;
  DeviceFailure failure_;
  Span* spans_ = nullptr;
  std::vector<CudaEvent> timing_;    // while tracing: the base event, then start and end of each vertex
  std::vector<std::int32_t> timed_;  // vertices whose timing events were recorded
  std::int64_t base_ns_ = 0;         // when the base event was recorded
};

}  // namespace disco
