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

  static constexpr int kInvalidHandle = 400;
  static constexpr int kAlreadyEnabled = 704;
  static constexpr int kNotReady = 600;
  static constexpr int kLaunchFailure = 719;

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
    return api;
  }

  // What a kernel launch does.
  void launch(CudaStream stream, std::function<void()> kernel) {
    queues_.at(stream).push_back({std::move(kernel)});
  }

  // While this is on, nothing of `stream` is done.
  void hold(CudaStream stream) { held_.store(stream); }

  int objects() const { return static_cast<int>(queues_.size() + events_.size()); }

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
  int peer_copies = 0;

 private:
  struct Event {
    std::uint64_t recorded = 0;
    std::uint64_t reached = 0;
    std::uint64_t time = 0;
  };
  struct Command {
    std::function<void()> action;
    const Event* event = nullptr;  // wait until it has reached `generation`
    std::uint64_t generation = 0;
  };

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
    Event* event = events_.at(handle).get();
    const std::uint64_t generation = ++event->recorded;
    queues_.at(stream).push_back({[this, event, generation] {
      event->reached = generation;
      event->time = ++clock_;
    }});
    return 0;
  }
  int wait_event(CudaStream stream, CudaEvent handle) {
    if (const int code = call("cudaStreamWaitEvent"); code != 0) return code;
    const Event* event = events_.at(handle).get();
    queues_.at(stream).push_back({{}, event, event->recorded});
    return 0;
  }
  int query(CudaEvent handle) {
    for (auto& [stream, queue] : queues_) {
      while (!queue.empty() && stream != held_.load() && random_.below(3) != 0 && step(queue)) {
      }
    }
    if (const int code = call("cudaEventQuery"); code != 0) return code;
    const Event& event = *events_.at(handle);
    return event.reached == event.recorded ? 0 : (last_error = kNotReady);
  }
  int synchronize(CudaStream stream) {
    while (!queues_.at(stream).empty()) {
      for (auto& [handle, queue] : queues_) {
        if (!queue.empty() && handle != held_.load()) step(queue);
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
    queues_.at(stream).push_back({[=] { std::memcpy(dst, src, bytes); }});
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
  static bool step(std::deque<Command>& queue) {
    const Command& command = queue.front();
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
};

}  // namespace disco::testing
