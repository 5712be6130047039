// CUDA graphs: what was put on a captured stream, put on another one by each launch.
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "calls.h"
#include "device_memory.h"
#include "journal.h"
#include "streams.h"

using namespace emulated;

namespace {

using Nodes = std::vector<Node>;

std::mutex mutex;
std::unordered_map<const void*, Nodes*>& graphs() {
  static auto* the = new std::unordered_map<const void*, Nodes*>;
  return *the;
}
std::unordered_map<const void*, Nodes*>& instances() {
  static auto* the = new std::unordered_map<const void*, Nodes*>;
  return *the;
}

Nodes* find(std::unordered_map<const void*, Nodes*>& among, const void* handle) {
  const std::lock_guard lock(mutex);
  const auto at = among.find(handle);
  if (at != among.end()) return at->second;
  journal().complain("a graph is used that does not exist");
  return nullptr;
}

void* add(std::unordered_map<const void*, Nodes*>& to, Nodes nodes) {
  auto* made = new Nodes(std::move(nodes));
  const std::lock_guard lock(mutex);
  to[made] = made;
  return made;
}

cudaError_t destroy(std::unordered_map<const void*, Nodes*>& among, const void* handle) {
  Nodes* const nodes = find(among, handle);
  if (nodes == nullptr) return answer(cudaErrorInvalidValue);
  const std::lock_guard lock(mutex);
  among.erase(handle);
  delete nodes;
  return cudaSuccess;
}

// What is queued runs with the addresses that were captured, whatever has become of them.
void check_memory(const Node& node) {
  for (const Range& range : node.ranges) {
    if (range.bytes == 0 || !device_memory().owns(range.address)) continue;
    if (!device_memory().in_block(range.address, range.bytes))
      journal().complain(node.work.name + " of a graph uses memory that was given back");
  }
}

}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  need_context();
  RETURN_IF_FAULTED();
  if (mode != cudaStreamCaptureModeThreadLocal)
    journal().complain("of the modes of a capture that of one thread alone is emulated");
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (handle == nullptr || !stream->begin_capture()) return answer(cudaErrorIllegalState);
  journal().count("cudaStreamBeginCapture");
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  const auto capture = stream->end_capture();
  RETURN_IF_FAULTED();
  if (capture == nullptr) return answer(cudaErrorIllegalState);
  if (capture->broken) return answer(cudaErrorStreamCaptureInvalidated);
  *graph = static_cast<cudaGraph_t>(add(graphs(), std::move(capture->nodes)));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Stream* stream = streams().find(handle);
  *status = stream == nullptr ? cudaStreamCaptureStatusNone : stream->captured();
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, std::size_t*) {
  if (id != nullptr) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  RETURN_IF_FAULTED();
  const Nodes* const nodes = find(graphs(), graph);
  if (nodes == nullptr) return answer(cudaErrorInvalidValue);
  *exec = static_cast<cudaGraphExec_t>(add(instances(), *nodes));
  journal().count("cudaGraphInstantiate");
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  need_context();
  RETURN_IF_FAULTED();
  const Nodes* const nodes = find(instances(), exec);
  Stream* stream = streams().find(handle);
  if (nodes == nullptr || stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (stream->device != current_device())
    journal().complain("a graph is launched on a stream of a device that is not current");
  journal().count("cudaGraphLaunch");
  for (const Node& node : *nodes) {
    check_memory(node);
    if (node.event != nullptr) {
      record(node.event, stream);
    } else {
      stream->put(node.work, node.ranges);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return destroy(instances(), exec); }

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy(graphs(), graph); }

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* found, std::size_t* count) {
  Nodes* const nodes = find(graphs(), graph);
  if (nodes == nullptr) return answer(cudaErrorInvalidValue);
  for (std::size_t i = 0; found != nullptr && i < *count && i < nodes->size(); ++i)
    found[i] = reinterpret_cast<cudaGraphNode_t>(&(*nodes)[i]);
  *count = nodes->size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<const Node*>(node)->work.type;
  return cudaSuccess;
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, cudaMemcpy3DParms* found) {
  std::memset(found, 0, sizeof *found);
  const std::vector<Range>& ranges = reinterpret_cast<const Node*>(node)->ranges;
  found->srcPtr.ptr = const_cast<void*>(ranges.at(0).address);
  found->dstPtr.ptr = const_cast<void*>(ranges.at(1).address);
  return cudaSuccess;
}
}
