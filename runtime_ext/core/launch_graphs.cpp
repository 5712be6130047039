#include "launch_graphs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "current_device.h"
#include "scope.h"

namespace disco {
namespace {

// Values of the CUDA runtime's ABI.
constexpr int kThreadLocal = 1;          // cudaStreamCaptureModeThreadLocal
constexpr int kActive = 1;               // cudaStreamCaptureStatusActive
constexpr unsigned kRecordExternal = 1;  // cudaEventRecordExternal
constexpr int kDeviceMemory = 2;         // cudaMemoryTypeDevice
enum NodeType : int {
  kKernelNode = 0,
  kMemcpyNode = 1,
  kMemsetNode = 2,
  kEmptyNode = 5,
  kEventRecordNode = 7
};

// cudaMemcpy3DParms.
struct MemcpyParameters {
  struct Pitched {
    void* ptr;
    std::size_t pitch, width, height;
  };
  void* source_array;
  std::size_t source_at[3];
  Pitched source;
  void* target_array;
  std::size_t target_at[3];
  Pitched target;
  std::size_t extent[3];
  int kind;
};

// cudaPointerAttributes, and room for what newer versions have behind it.
struct PointerAttributes {
  int type;
  int device;
  void* pointers[2];
  char more[256];
};

constexpr int kMostMoves = 2;  // of what a kernel depends on

bool on_device(const CudartApi& api, const void* ptr) {
  PointerAttributes found{};
  return api.graphs.pointer_attributes(&found, ptr) == 0 && found.type == kDeviceMemory;
}

// What a node reads or writes of host memory may be another op's when the graph is launched.
bool is_of_device(const CudartApi& api, CudaGraphNode node) {
  int type = -1;
  if (api.graphs.node_type(node, &type) != 0) return false;
  if (type != kMemcpyNode)
    return type == kKernelNode || type == kMemsetNode || type == kEmptyNode || type == kEventRecordNode;
  MemcpyParameters copy{};
  return api.graphs.memcpy_parameters(node, &copy) == 0 && copy.source.ptr != nullptr &&
         copy.target.ptr != nullptr && on_device(api, copy.source.ptr) && on_device(api, copy.target.ptr);
}

bool all_of_device(const CudartApi& api, CudaGraph graph) {
  std::size_t count = 0;
  check_cuda(api, "cudaGraphGetNodes", api.graphs.nodes(graph, nullptr, &count));
  std::vector<CudaGraphNode> nodes(count);
  if (count > 0) check_cuda(api, "cudaGraphGetNodes", api.graphs.nodes(graph, nodes.data(), &count));
  return std::all_of(nodes.begin(), nodes.end(), [&](CudaGraphNode node) { return is_of_device(api, node); });
}

}  // namespace

// What is put on a stream is recorded while this lives, by this thread alone.
class LaunchGraphs::Capture {
 public:
  // Throws CudaError.
  Capture(const CudartApi& api, CudaStream stream) : api_(api), stream_(stream) {
    check_cuda(api_, "cudaStreamBeginCapture", api_.graphs.begin_capture(stream_, kThreadLocal));
  }
  // Of one that went wrong the runtime gives none.
  ~Capture() {
    CudaGraph graph = nullptr;
    if (open_ && api_.graphs.end_capture(stream_, &graph) != 0) api_.get_last_error();
    if (graph != nullptr) api_.graphs.destroy(graph);
    if (graph_ != nullptr) api_.graphs.destroy(graph_);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Throws CudaError once something was put there that cannot be recorded.
  void require_active() const {
    int status = 0;
    check_cuda(api_, "cudaStreamIsCapturing", api_.graphs.is_capturing(stream_, &status));
    if (status != kActive) throw std::runtime_error("the runtime cannot record it");
  }
  // Throws CudaError.
  CudaGraph end() {
    open_ = false;
    check_cuda(api_, "cudaStreamEndCapture", api_.graphs.end_capture(stream_, &graph_));
    return graph_;
  }

 private:
  const CudartApi& api_;
  CudaStream stream_;
  CudaGraph graph_ = nullptr;
  bool open_ = true;
};

bool GraphApi::complete() const {
  return begin_capture && end_capture && is_capturing && instantiate && launch && exec_destroy && destroy &&
         nodes && node_type && memcpy_parameters && pointer_attributes && event_record_with_flags &&
         launch_host_function && memory_info;
}

std::string LaunchGraphs::trial(const CudartApi& api) {
  if (!api.graphs.complete()) return "the CUDA runtime lacks functions for graphs";
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
  CudaGraphExec exec = nullptr;
  std::atomic<bool> open{false};
  const Finally given_back([&] {
    open = true;
    if (stream != nullptr) api.stream_synchronize(stream);
    if (exec != nullptr) api.graphs.exec_destroy(exec);
    if (event != nullptr) api.event_destroy(event);
    if (stream != nullptr) api.stream_destroy(stream);
  });
  const auto wait = [](void* gate) {
    while (!static_cast<std::atomic<bool>*>(gate)->load()) std::this_thread::yield();
  };
  try {
    check_cuda(api, "cudaStreamCreateWithFlags", api.stream_create(&stream, kStreamNonBlocking));
    check_cuda(api, "cudaEventCreateWithFlags", api.event_create(&event, kEventDisableTiming));
    Capture capture(api, stream);
    check_cuda(api, "cudaLaunchHostFunc", api.graphs.launch_host_function(stream, wait, &open));
    check_cuda(api, "cudaEventRecordWithFlags",
               api.graphs.event_record_with_flags(event, stream, kRecordExternal));
    check_cuda(api, "cudaGraphInstantiateWithFlags", api.graphs.instantiate(&exec, capture.end(), 0));
    for (int launch = 0; launch < 2; ++launch) {
      open = false;
      check_cuda(api, "cudaGraphLaunch", api.graphs.launch(exec, stream));
      const int early = api.event_query(event);
      if (early != 0) api.get_last_error();
      open = true;
      check_cuda(api, "cudaStreamSynchronize", api.stream_synchronize(stream));
      if (early != kNotReady) return "an event of a graph counts as done before the graph gets there";
      check_cuda(api, "cudaEventQuery", api.event_query(event));
    }
  } catch (const std::exception& error) {
    return what_of(error);
  }
  return {};
}

LaunchGraphs::LaunchGraphs(const CudartApi& api, std::shared_ptr<CudaStreams> streams,
                           std::int64_t most_bytes, std::shared_ptr<GraphMemory> memory)
    : api_(api),
      streams_(std::move(streams)),
      most_bytes_(most_bytes),
      memory_(memory != nullptr ? std::move(memory) : std::make_shared<GraphMemory>()) {}

LaunchGraphs::~LaunchGraphs() {
  for (auto& [first, known] : known_) {
    if (known.graph != nullptr) drop(*known.graph);
  }
}

// What cannot be given back is lost with the process.
void LaunchGraphs::drop(LaunchGraph& graph) noexcept {
  if (graph.exec != nullptr) api_.graphs.exec_destroy(graph.exec);
  for (CudaEvent event : graph.events) {
    if (event != nullptr) api_.event_destroy(event);
  }
  bytes_ -= graph.bytes;
  memory_->taken -= graph.bytes;
}

void LaunchGraphs::keep(const std::vector<Segment>& segments) {
  std::erase_if(known_, [&](auto& entry) {
    const bool kept = std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
      return segment.vertices == entry.second.vertices;
    });
    if (!kept && entry.second.graph != nullptr) drop(*entry.second.graph);
    return !kept;
  });
}

GraphFigures LaunchGraphs::figures() const {
  GraphFigures figures;
  for (const auto& [first, known] : known_) {
    if (known.graph == nullptr) continue;
    ++figures.graphs;
    figures.kernels += static_cast<std::int64_t>(known.vertices.size());
  }
  figures.bytes = bytes_;
  figures.refused = refused_;
  return figures;
}

void LaunchGraphs::note_refusal(const std::string& why) {
  if (refused_.empty()) refused_ = why;
}

// Vertices that depend on something else than when the graph was recorded.
std::vector<std::int32_t> LaunchGraphs::changed(const Segment& segment, const LaunchGraph& graph,
                                                OpRunner& runner) {
  std::vector<std::int32_t> changed;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < segment.ops.size(); ++i) {
    words_.clear();
    runner.depends_on(segment.ops[i], words_);
    const auto before = graph.words.begin() + static_cast<std::ptrdiff_t>(begin);
    if (words_.size() != graph.words_behind[i] - begin || !std::equal(words_.begin(), words_.end(), before))
      changed.push_back(segment.vertices[i]);
    begin = graph.words_behind[i];
  }
  return changed;
}

LaunchGraph* LaunchGraphs::find(const Segment& segment, OpRunner& runner, int device, int stream,
                                std::vector<std::int32_t>& barred) {
  const auto [entry, is_new] = known_.try_emplace(segment.vertices.front());
  Known& known = entry->second;
  if (is_new) known.vertices = segment.vertices;
  // The first launches load modules and choose kernels, which nobody can record.
  bool all_ran = true;
  for (const std::int32_t v : segment.vertices) all_ran = !ran_.insert(v).second && all_ran;
  if (!all_ran) return nullptr;
  if (known.graph != nullptr && known.graph->exceeds) {
    drop(*known.graph);
    known.graph.reset();
  }
  if (known.graph != nullptr) {
    words_.clear();
    runner.settings(words_);
    if (words_ != known.graph->settings) return nullptr;
    const std::vector<std::int32_t> moved = changed(segment, *known.graph, runner);
    if (moved.empty()) return known.graph.get();
    for (const std::int32_t v : moved) {
      if (++moved_[v] >= kMostMoves) barred.push_back(v);
    }
    if (!barred.empty()) return nullptr;
    drop(*known.graph);
    known.graph.reset();
  }
  if (off_ || !has_room()) {
    barred = segment.vertices;
    return nullptr;
  }
  known.graph = record(segment, runner, device, stream, barred);
  return known.graph.get();
}

std::unique_ptr<LaunchGraph> LaunchGraphs::record(const Segment& segment, OpRunner& runner, int device,
                                                  int stream, std::vector<std::int32_t>& barred) {
  auto graph = std::make_unique<LaunchGraph>();
  try {
    const std::lock_guard lock(streams_->recording_mutex());
    recording_ = streams_->recording();
    const Finally over([this] { recording_ = nullptr; });
    warm_up(runner, device, stream);
    runner.settings(graph->settings);
    Capture capture(api_, recording_);
    const std::int32_t refused = run_all(segment, runner, device, stream, capture, *graph);
    if (refused >= 0) {
      barred.push_back(refused);
    } else if (CudaGraph const recorded = capture.end(); all_of_device(api_, recorded)) {
      instantiate(*graph, recorded);
    } else {
      note_refusal("a kernel copies from or to the host");
      barred = segment.vertices;
    }
  } catch (const std::exception& error) {
    note_refusal(what_of(error));
    off_ = true;
    barred = segment.vertices;
  }
  if (barred.empty()) return graph;
  drop(*graph);
  return nullptr;
}

// Kernels that miss what this makes cannot be recorded, others can.
void LaunchGraphs::warm_up(OpRunner& runner, int device, int stream) {
  try {
    const Capture thrown_away(api_, recording_);
    runner.before_recording(device, stream);
  } catch (const std::exception& error) {
    note_refusal(what_of(error));
    api_.get_last_error();
  }
}

// The vertex that cannot be recorded; -1 if all can.
std::int32_t LaunchGraphs::run_all(const Segment& segment, OpRunner& runner, int device, int stream,
                                   const Capture& capture, LaunchGraph& graph) {
  for (std::size_t i = 0; i < segment.ops.size(); ++i) {
    runner.depends_on(segment.ops[i], graph.words);
    graph.words_behind.push_back(graph.words.size());
    try {
      runner.run(segment.ops[i], device, stream);
      capture.require_active();
    } catch (const std::exception& error) {
      note_refusal(what_of(error));
      api_.get_last_error();
      return segment.vertices[i];
    }
    if (segment.ends[graph.events.size()] != static_cast<std::int32_t>(i) + 1) continue;
    graph.events.push_back(nullptr);
    check_cuda(api_, "cudaEventCreateWithFlags",
               api_.event_create(&graph.events.back(), kEventDisableTiming));
    check_cuda(api_, "cudaEventRecordWithFlags",
               api_.graphs.event_record_with_flags(graph.events.back(), recording_, kRecordExternal));
  }
  return -1;
}

std::int64_t LaunchGraphs::free_bytes() const {
  std::size_t free = 0, total = 0;
  check_cuda(api_, "cudaMemGetInfo", api_.graphs.memory_info(&free, &total));
  return static_cast<std::int64_t>(free);
}

void LaunchGraphs::instantiate(LaunchGraph& graph, CudaGraph recorded) {
  free_before_ = free_bytes();
  check_cuda(api_, "cudaGraphInstantiateWithFlags", api_.graphs.instantiate(&graph.exec, recorded, 0));
}

void LaunchGraphs::launch(LaunchGraph& graph, CudaStream stream) {
  check_cuda(api_, "cudaGraphLaunch", api_.graphs.launch(graph.exec, stream));
  const std::int64_t before = std::exchange(free_before_, -1);
  if (before < 0) return;
  // Others may take and give memory meanwhile.
  graph.bytes = std::max<std::int64_t>(0, before - free_bytes());
  bytes_ += graph.bytes;
  const std::int64_t taken = memory_->taken += graph.bytes;
  if (taken <= most_bytes_) return;
  graph.exceeds = off_ = true;
  note_refusal("graphs would take " + std::to_string(taken) + " bytes, of " + std::to_string(most_bytes_));
}

bool LaunchGraphs::has_room() {
  const std::int64_t taken = memory_->taken;
  if (taken < most_bytes_) return true;
  note_refusal("graphs take " + std::to_string(taken) + " bytes already, of " + std::to_string(most_bytes_));
  return false;
}

}  // namespace disco
