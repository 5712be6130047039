// LaunchGraphs: the segments of one GPU as CUDA graphs, each of which is launched by one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "cuda_device.h"

namespace disco {

// A segment as it was recorded. Its nodes follow each other; behind each part one records an event, at each
// launch anew.
struct LaunchGraph {
  CudaGraphExec exec = nullptr;
  std::vector<CudaEvent> events;          // by part
  std::vector<std::uint64_t> settings;    // OpRunner::settings when it was recorded
  std::vector<std::uint64_t> words;       // OpRunner::depends_on of its kernels, likewise
  std::vector<std::size_t> words_behind;  // by kernel: where its words end
  std::int64_t bytes = 0;                 // of the device's memory, as far as that was seen
  bool exceeds = false;                   // with it graphs take more than they may
};

// A launch of a graph must do what the launches of its kernels would, and wait for nothing by itself. So what
// its kernels depend on is compared before each launch. Where it differs the graph is recorded anew, or its
// kernels are launched one by one; a kernel whose memory moves again is left out from the next step on.
//
// All waits lie in front of a graph: a node that waits for an event takes a record that was never made as
// done. Used by the loop thread alone, with its device current.
class LaunchGraphs {
 public:
  // Why graphs cannot be used on the current device, or "". Tried with a graph of two nodes, launched twice:
  // an event that it records must not count as done before the second launch has got there.
  static std::string trial(const CudartApi& api);

  // Kernels are recorded on `streams`' stream for that. When the graphs of all that have `memory` take
  // `most_bytes` of the device no more are made; one by which they exceed that is given back before its next
  // launch.
  LaunchGraphs(const CudartApi& api, std::shared_ptr<CudaStreams> streams, std::int64_t most_bytes,
               std::shared_ptr<GraphMemory> memory);
  ~LaunchGraphs();
  LaunchGraphs(const LaunchGraphs&) = delete;
  LaunchGraphs& operator=(const LaunchGraphs&) = delete;

  // The graph of `segment`, whose kernels `runner` launches as device `device`; null if they must be launched
  // one by one. Then `barred` may have vertices that can be in no segment.
  LaunchGraph* find(const Segment& segment, OpRunner& runner, int device, int stream,
                    std::vector<std::int32_t>& barred);
  // Throws CudaError.
  void launch(LaunchGraph& graph, CudaStream stream);
  // Forgets the graphs of all others.
  void keep(const std::vector<Segment>& segments);
  // The stream on which launches are recorded at the moment; null: none are.
  CudaStream recording() const { return recording_; }
  GraphFigures figures() const;

 private:
  struct Known {
    std::vector<std::int32_t> vertices;
    std::unique_ptr<LaunchGraph> graph;  // none: to be recorded at the next launch
  };
  class Capture;

  std::vector<std::int32_t> changed(const Segment& segment, const LaunchGraph& graph, OpRunner& runner);
  std::unique_ptr<LaunchGraph> record(const Segment& segment, OpRunner& runner, int device, int stream,
                                      std::vector<std::int32_t>& barred);
  void warm_up(OpRunner& runner, int device, int stream);
  std::int32_t run_all(const Segment& segment, OpRunner& runner, int device, int stream,
                       const Capture& capture, LaunchGraph& graph);
  void instantiate(LaunchGraph& graph, CudaGraph recorded);
  bool has_room();
  void note_refusal(const std::string& why);
  void drop(LaunchGraph& graph) noexcept;
  std::int64_t free_bytes() const;

  CudartApi api_;
  std::shared_ptr<CudaStreams> streams_;
  CudaStream recording_ = nullptr;
  bool off_ = false;                      // no more are made
  std::map<std::int32_t, Known> known_;   // by first vertex
  std::unordered_set<std::int32_t> ran_;  // vertices that were launched in a segment before
  std::map<std::int32_t, int> moved_;     // by vertex: how often what it depends on has changed
  std::vector<std::uint64_t> words_;
  std::string refused_;
  std::int64_t most_bytes_;
  std::shared_ptr<GraphMemory> memory_;
  std::int64_t bytes_ = 0;         // of memory_'s, those of these graphs
  std::int64_t free_before_ = -1;  // free bytes before the graph was made that is launched next; -1: none was
};

}  // namespace disco
