// A CUDA runtime without a GPU: streams are queues that a seeded generator advances at each query, one
// thread, no clock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_device.h"
#include "core/schedule.h"

namespace disco::testing {

// Only one lives at a time: the table's functions have no argument to carry it.
class FakeCudart {
 public:
  // What a copy straight from one device to another does.
  enum class Peers { kNone, kRefused, kWrong, kRight };

  static constexpr int kInvalidValue = 1;
  static constexpr int kInvalidHandle = 400;
  static constexpr int kAlreadyEnabled = 704;
  static constexpr int kNotReady = 600;
  static constexpr int kLaunchFailure = 719;
  static constexpr int kCaptureUnsupported = 900;
  static constexpr int kCaptureInvalidated = 901;

  explicit FakeCudart(std::uint64_t seed) {
    random_.seed(seed);
    current_ = this;
  }
  ~FakeCudart() { current_ = nullptr; }
  FakeCudart(const FakeCudart&) = delete;
  FakeCudart& operator=(const FakeCudart&) = delete;

  static CudartApi api() {
    CudartApi api;
    api.get_device = [](int* device) {
      *device = current_->device;
      return current_->call("cudaGetDevice");
    };
    api.set_device = [](int device) {
      const int code = current_->call("cudaSetDevice");
      if (code == 0) {
        current_->device = device;
        current_->contexts.insert(device);  // as from CUDA 12 on
      }
      return code;
    };
    api.primary_context_state = [](int device, unsigned*, int* active) {
      *active = current_->contexts.count(device) > 0 ? 1 : 0;
      return current_->driver_code;
    };
    api.stream_create = [](CudaStream* stream, unsigned) { return current_->create_stream(stream); };
    api.stream_destroy = [](CudaStream stream) { return current_->destroy_stream(stream); };
    api.stream_synchronize = [](CudaStream stream) { return current_->synchronize(stream); };
    api.stream_wait_event = [](CudaStream stream, CudaEvent event, unsigned) {
      return current_->wait_event(stream, event);
    };
    api.event_create = [](CudaEvent* event, unsigned) { return current_->create_event(event); };
    api.event_destroy = [](CudaEvent event) { return current_->destroy_event(event); };
    api.event_record = [](CudaEvent event, CudaStream stream) { return current_->record(event, stream); };
    api.event_query = [](CudaEvent event) { return current_->query(event); };
    api.event_elapsed = [](float* ms, CudaEvent start, CudaEvent end) {
      return current_->elapsed(ms, start, end);
    };
    api.memcpy_async = [](void* dst, const void* src, std::size_t bytes, int kind, CudaStream stream) {
      return current_->copy(dst, src, bytes, kind, stream);
    };
    api.memcpy_peer_async = [](void* dst, int to, const void* src, int from, std::size_t bytes,
                               CudaStream stream) {
      return current_->copy_to_peer(dst, to, src, from, bytes, stream);
    };
    api.can_access_peer = [](int* can, int device, int peer) {
      *can = current_->peers != Peers::kNone && device != peer ? 1 : 0;
      return current_->call("cudaDeviceCanAccessPeer");
    };
    api.enable_peer_access = [](int peer, unsigned) { return current_->enable_peer(peer); };
    api.device_attribute = [](int* value, int attribute, int) {
      *value = attribute == 113 && current_->registers_read_only ? 1 : 0;
      return current_->call("cudaDeviceGetAttribute");
    };
    api.host_register = [](void*, std::size_t, unsigned flags) {
      current_->register_flags = flags;
      return current_->call("cudaHostRegister");
    };
    api.host_unregister = [](void*) { return current_->call("cudaHostUnregister"); };
    api.get_last_error = [] { return std::exchange(current_->last_error, 0); };
    api.error_string = [](int code) { return code == kLaunchFailure ? "launch failure" : "invalid handle"; };
    api.graphs = graph_api();
    if (current_->batches == 12) {
      api.batches.of_cuda_12 = [](void** dst, void** src, std::size_t* bytes, std::size_t count,
                                  void* attributes, std::size_t* first, std::size_t kinds, std::size_t*,
                                  CudaStream stream) {
        return current_->copy_batch(dst, src, bytes, count, attributes, first, kinds, stream);
      };
    }
    if (current_->batches == 13) {
      api.batches.of_cuda_13 = [](void* const* dst, const void* const* src, const std::size_t* bytes,
                                  std::size_t count, void* attributes, std::size_t* first, std::size_t kinds,
                                  CudaStream stream) {
        return current_->copy_batch(dst, src, bytes, count, attributes, first, kinds, stream);
      };
    }
    return api;
  }

  static GraphApi graph_api() {
    GraphApi api;
    api.begin_capture = [](CudaStream stream, int) { return current_->begin_capture(stream); };
    api.end_capture = [](CudaStream, CudaGraph* graph) { return current_->end_capture(graph); };
    api.is_capturing = [](CudaStream stream, int* status) {
      *status = stream != current_->capturing_ ? 0 : current_->capture_broken_ ? 2 : 1;
      return current_->call("cudaStreamIsCapturing");
    };
    api.instantiate = [](CudaGraphExec* exec, CudaGraph graph, unsigned long long) {
      return current_->instantiate(exec, graph);
    };
    api.launch = [](CudaGraphExec exec, CudaStream stream) { return current_->launch_graph(exec, stream); };
    api.exec_destroy = [](CudaGraphExec exec) {
      return current_->execs_.erase(exec) == 1 ? 0 : kInvalidHandle;
    };
    api.destroy = [](CudaGraph graph) { return current_->graphs_.erase(graph) == 1 ? 0 : kInvalidHandle; };
    api.nodes = [](CudaGraph graph, CudaGraphNode* nodes, std::size_t* count) {
      std::vector<Node>& all = current_->graphs_.at(graph);
      for (std::size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = &all.at(i);
      *count = all.size();
      return current_->call("cudaGraphGetNodes");
    };
    api.node_type = [](CudaGraphNode node, int* type) {
      *type = static_cast<Node*>(node)->type;
      return 0;
    };
    api.memcpy_parameters = [](CudaGraphNode node, void* found) {
      const auto& [source, target] = static_cast<Node*>(node)->ends;
      auto* words = static_cast<const void**>(found);
      words[4] = source;  // behind an array and a position
      words[12] = target;
      return 0;
    };
    api.pointer_attributes = [](void* found, const void* ptr) {
      *static_cast<int*>(found) = current_->host_memory.count(ptr) > 0 ? 1 : 2;
      return 0;
    };
    api.event_record_with_flags = [](CudaEvent event, CudaStream stream, unsigned flags) {
      return flags == 0 ? current_->record(event, stream) : current_->record_in_graph(event, stream);
    };
    api.launch_host_function = [](CudaStream stream, void (*function)(void*), void* argument) {
      if (const int code = current_->call("cudaLaunchHostFunc"); code != 0) return code;
      current_->put(stream, {3, [=] { function(argument); }});
      return 0;
    };
    api.memory_info = [](std::size_t* free, std::size_t* total) {
      *total = std::size_t{1} << 40;
      *free = *total - current_->execs_.size() * current_->graph_bytes;
      return current_->call("cudaMemGetInfo");
    };
    return api;
  }

  // What a kernel launch does.
  void launch(CudaStream stream, std::function<void()> kernel, int tag = -1) {
    put(stream, {0, std::move(kernel), nullptr, {}, tag});
  }

  // While this is on, nothing of `stream` is done.
  void hold(CudaStream stream) { held_.store(stream); }
  // Kernels that were launched with this tag do not start.
  std::atomic<int> held_tag{-1};

  int objects() const {
    return static_cast<int>(queues_.size() + events_.size() + graphs_.size() + execs_.size());
  }

  int calls = 0;
  std::map<std::string, int> named;  // calls of each name
  int fail_at = -1;                  // number of the call that fails
  int fail_code = kInvalidHandle;
  bool sticky = false;      // whether all later calls fail too, as after a kernel's fault
  std::string failed_call;  // its name
  int last_error = 0;       // as cudaGetLastError sees it
  int device = 7;
  std::set<int> contexts;  // devices that have one
  int driver_code = 0;     // what the driver's functions answer
  Peers peers = Peers::kRight;
  bool registers_read_only = true;         // an attribute of the device
  unsigned register_flags = 0;             // of the last registration
  std::set<std::pair<int, int>> reaching;  // devices, each with one whose memory it may use
  int created = 0;
  std::vector<int> copy_kinds;
  int batches = 0;  // the version of CUDA whose batches of copies api() has; 0: none
  std::vector<std::size_t> batch_sizes;
  int peer_copies = 0;
  std::size_t graph_bytes = 4096;     // of the device's memory, each
  bool events_reset = true;           // an event of a graph does not count as done once the graph is launched
  std::set<const void*> host_memory;  // all other addresses are the device's

 private:
  struct Node {
    int type = 0;  // cudaGraphNodeType
    std::function<void()> action;
    CudaEvent event = nullptr;
    std::pair<const void*, const void*> ends = {};  // of a copy
    int tag = -1;
  };
  struct Event {
    std::uint64_t recorded = 0;
    std::uint64_t reached = 0;
    std::uint64_t time = 0;
  };
  struct Command {
    std::function<void()> action;
    const Event* event = nullptr;  // wait until it has reached `generation`
    std::uint64_t generation = 0;
    bool blocks = false;  // runs only while somebody waits for its stream
    int tag = -1;
  };

  void put(CudaStream stream, Node node) {
    if (stream == capturing_) {
      captured_.push_back(std::move(node));
    } else {
      run(stream, node);
    }
  }
  void run(CudaStream stream, const Node& node) {
    queues_.at(stream).push_back({node.action, nullptr, 0, node.type == 3, node.tag});
  }
  int begin_capture(CudaStream stream) {
    if (const int code = call("cudaStreamBeginCapture"); code != 0) return code;
    capturing_ = stream;
    capture_broken_ = false;
    captured_.clear();
    return 0;
  }
  int end_capture(CudaGraph* graph) {
    const bool broken = std::exchange(capturing_, nullptr) == nullptr || capture_broken_;
    if (const int code = call("cudaStreamEndCapture"); code != 0) return code;
    if (broken) return last_error = kCaptureInvalidated;
    *graph = reinterpret_cast<CudaGraph>(++next_handle_);
    graphs_[*graph] = std::move(captured_);
    return 0;
  }
  int refuse_in_capture() {
    capture_broken_ = true;
    return last_error = kCaptureUnsupported;
  }
  int instantiate(CudaGraphExec* exec, CudaGraph graph) {
    if (const int code = call("cudaGraphInstantiateWithFlags"); code != 0) return code;
    *exec = reinterpret_cast<CudaGraphExec>(++next_handle_);
    execs_[*exec] = graphs_.at(graph);
    return 0;
  }
  int launch_graph(CudaGraphExec exec, CudaStream stream) {
    if (const int code = call("cudaGraphLaunch"); code != 0) return code;
    for (const Node& node : execs_.at(exec)) {
      if (node.event == nullptr) {
        run(stream, node);
      } else {
        put_record(events_.at(node.event).get(), stream, events_reset);
      }
    }
    return 0;
  }
  int record_in_graph(CudaEvent event, CudaStream stream) {
    if (const int code = call("cudaEventRecordWithFlags"); code != 0) return code;
    if (stream != capturing_) return last_error = kInvalidHandle;
    put(stream, {7, {}, event});
    return 0;
  }

  int call(const char* name) {
    const int number = calls++;
    ++named[name];
    if (fail_at < 0 || number < fail_at || (number > fail_at && !sticky)) return 0;
    if (number == fail_at) failed_call = name;
    return last_error = fail_code;
  }
  int create_stream(CudaStream* stream) {
    if (const int code = call("cudaStreamCreateWithFlags"); code != 0) return code;
    *stream = reinterpret_cast<CudaStream>(++next_handle_);
    queues_[*stream];
    ++created;
    return 0;
  }
  int destroy_stream(CudaStream stream) { return queues_.erase(stream) == 1 ? 0 : kInvalidHandle; }
  int create_event(CudaEvent* event) {
    if (const int code = call("cudaEventCreateWithFlags"); code != 0) return code;
    *event = reinterpret_cast<CudaEvent>(++next_handle_);
    events_[*event] = std::make_unique<Event>();
    ++created;
    return 0;
  }
  int destroy_event(CudaEvent event) { return events_.erase(event) == 1 ? 0 : kInvalidHandle; }
  int record(CudaEvent handle, CudaStream stream) {
    if (const int code = call("cudaEventRecord"); code != 0) return code;
    if (stream == capturing_) return refuse_in_capture();
    put_record(events_.at(handle).get(), stream, true);
    return 0;
  }
  void put_record(Event* event, CudaStream stream, bool resets) {
    const std::uint64_t generation = resets ? ++event->recorded : event->recorded;
    queues_.at(stream).push_back({[this, event, generation] {
      event->reached = generation;
      event->time = ++clock_;
    }});
  }
  int wait_event(CudaStream stream, CudaEvent handle) {
    if (const int code = call("cudaStreamWaitEvent"); code != 0) return code;
    if (stream == capturing_) return refuse_in_capture();
    const Event* event = events_.at(handle).get();
    queues_.at(stream).push_back({{}, event, event->recorded});
    return 0;
  }
  int query(CudaEvent handle) {
    for (auto& [stream, queue] : queues_) {
      while (!queue.empty() && stream != held_.load() && random_.below(3) != 0 && step(queue, false)) {
      }
    }
    if (const int code = call("cudaEventQuery"); code != 0) return code;
    const Event& event = *events_.at(handle);
    return event.reached == event.recorded ? 0 : (last_error = kNotReady);
  }
  int synchronize(CudaStream stream) {
    if (stream == capturing_) return refuse_in_capture();
    const bool lost = sticky && fail_at >= 0 && calls > fail_at;
    while (!queues_.at(stream).empty() && !lost) {
      for (auto& [handle, queue] : queues_) {
        if (!queue.empty() && handle != held_.load()) step(queue, true);
      }
    }
    return call("cudaStreamSynchronize");
  }
  int elapsed(float* ms, CudaEvent start, CudaEvent end) {
    if (const int code = call("cudaEventElapsedTime"); code != 0) return code;
    *ms = static_cast<float>(events_.at(end)->time - events_.at(start)->time);
    return 0;
  }
  int copy(void* dst, const void* src, std::size_t bytes, int kind, CudaStream stream) {
    if (const int code = call("cudaMemcpyAsync"); code != 0) return code;
    copy_kinds.push_back(kind);
    put(stream, {1, [=] { std::memcpy(dst, src, bytes); }, nullptr, {src, dst}});
    return 0;
  }
  // The last copy first: a batch has no order.
  int copy_batch(void* const* dst, const void* const* src, const std::size_t* bytes, std::size_t count,
                 const void* attributes, const std::size_t* first, std::size_t kinds, CudaStream stream) {
    if (const int code = call("cudaMemcpyBatchAsync"); code != 0) return code;
    const bool in_stream_order = *static_cast<const int*>(attributes) == 1;
    if (count == 0 || kinds != 1 || *first != 0 || !in_stream_order || stream == nullptr)
      return last_error = kInvalidValue;
    batch_sizes.push_back(count);
    for (std::size_t i = count; i-- > 0;) {
      if (bytes[i] == 0) return last_error = kInvalidValue;
      put(stream, {1, [to = dst[i], from = src[i], size = bytes[i]] { std::memcpy(to, from, size); }});
    }
    return 0;
  }
  int enable_peer(int peer) {
    if (const int code = call("cudaDeviceEnablePeerAccess"); code != 0) return code;
    return reaching.emplace(device, peer).second ? 0 : (last_error = kAlreadyEnabled);
  }
  int copy_to_peer(void* dst, int to, const void* src, int from, std::size_t bytes, CudaStream stream) {
    if (const int code = call("cudaMemcpyPeerAsync"); code != 0) return code;
    if (reaching.count({from, to}) == 0 || peers == Peers::kRefused) return last_error = kInvalidHandle;
    ++peer_copies;
    const bool wrong = peers == Peers::kWrong;
    queues_.at(stream).push_back({[=] {
      std::memcpy(dst, src, bytes);
      if (wrong) static_cast<unsigned char*>(dst)[bytes - 1] ^= 1;
    }});
    return 0;
  }
  bool step(std::deque<Command>& queue, bool may_block) {
    const Command& command = queue.front();
    if ((command.blocks && !may_block) || (command.tag >= 0 && command.tag == held_tag)) return false;
    if (command.event != nullptr && command.event->reached < command.generation) return false;
    if (command.action) command.action();
    queue.pop_front();
    return true;
  }

  static inline FakeCudart* current_ = nullptr;
  Random random_;
  std::uintptr_t next_handle_ = 0x1000;
  std::uint64_t clock_ = 0;
  std::atomic<CudaStream> held_{nullptr};
  std::map<CudaStream, std::deque<Command>> queues_;
  std::map<CudaEvent, std::unique_ptr<Event>> events_;
  CudaStream capturing_ = nullptr;
  bool capture_broken_ = false;
  std::vector<Node> captured_;
  std::map<CudaGraph, std::vector<Node>> graphs_;
  std::map<CudaGraphExec, std::vector<Node>> execs_;
};

}  // namespace disco::testing
