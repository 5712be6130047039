// CUDA's functions about streams and events.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "calls.h"
#include "journal.h"
#include "order.h"
#include "streams.h"

using namespace emulated;

namespace {

using Time = std::chrono::steady_clock;

// What records and waits share with the event: it may be destroyed before they are done.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, reached = 0;  // the last record issued, the last one that its stream got to
  Clock clock;                              // what comes before the last record
  Time::time_point time;
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  int device;
  bool timed;
};

std::mutex events_mutex;
std::unordered_map<const void*, Event*>& events() {
  static auto* the = new std::unordered_map<const void*, Event*>;
  return *the;
}

std::shared_ptr<EventState> state_of(cudaEvent_t handle, const Event** event = nullptr) {
  const std::lock_guard lock(events_mutex);
  const auto at = events().find(handle);
  if (at == events().end()) {
    journal().complain("an event is used that does not exist");
    return nullptr;
  }
  if (event != nullptr) *event = at->second;
  return at->second->state;
}

cudaError_t put(cudaStream_t handle, Work work) {
  need_context();
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  stream->put(std::move(work));
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  need_context();
  RETURN_IF_FAULTED();
  // PyTorch and the engine make none: a stream that waits for the legacy stream by itself is not emulated.
  if ((flags & cudaStreamNonBlocking) == 0) journal().complain("a blocking stream is not emulated");
  *stream = reinterpret_cast<cudaStream_t>(streams().create(current_device()));
  journal().count("cudaStreamCreate");
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!streams().destroy(stream)) {
    journal().complain("a stream is destroyed that does not exist");
    return answer(cudaErrorInvalidResourceHandle);
  }
  journal().count("cudaStreamDestroy");
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (!stream->idle()) return answer(cudaErrorNotReady);
  stream->synchronize();
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  need_context();
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  stream->synchronize();
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* argument) {
  return put(stream, {"host function", [=] { call(argument); }});
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* argument, unsigned) {
  return put(stream, {"callback", [=] { call(stream, cudaSuccess, argument); }});
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  need_context();
  RETURN_IF_FAULTED();
  auto* made = new Event{.device = current_device(), .timed = (flags & cudaEventDisableTiming) == 0};
  const std::lock_guard lock(events_mutex);
  events()[made] = made;
  *event = reinterpret_cast<cudaEvent_t>(made);
  journal().count("cudaEventCreate");
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  if (state_of(handle) == nullptr) return answer(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(events_mutex);
  const auto at = events().find(handle);
  delete at->second;
  events().erase(at);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  const Event* event = nullptr;
  const auto state = state_of(handle, &event);
  Stream* stream = streams().find(on);
  if (state == nullptr || stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (event->device != stream->device) {
    journal().complain("an event of device " + std::to_string(event->device) + " is recorded on device " +
                       std::to_string(stream->device));
    return answer(cudaErrorInvalidResourceHandle);
  }
  const std::lock_guard lock(state->mutex);
  const std::uint64_t number = ++state->recorded;
  state->clock = order().now(stream->number);
  const auto reach = [state, number] {
    const std::lock_guard inner(state->mutex);
    state->reached = std::max(state->reached, number);
    state->time = Time::now();
    state->changed.notify_all();
  };
  stream->put({"record", reach, true});
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  const auto state = state_of(handle);
  Stream* stream = streams().find(on);
  if (state == nullptr || stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  std::unique_lock lock(state->mutex);
  const std::uint64_t number = state->recorded;
  if (number == 0) return cudaSuccess;
  order().follow(stream->number, state->clock);
  lock.unlock();
  const auto wait = [state, number] {
    std::unique_lock inner(state->mutex);
    state->changed.wait(inner, [&] { return state->reached >= number; });
  };
  stream->put({"wait", wait, true});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  RETURN_IF_FAULTED();
  const auto state = state_of(handle);
  if (state == nullptr) return answer(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(state->mutex);
  if (state->reached < state->recorded) return answer(cudaErrorNotReady);
  order().host_learns(state->clock);
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  RETURN_IF_FAULTED();
  const auto state = state_of(handle);
  if (state == nullptr) return answer(cudaErrorInvalidResourceHandle);
  std::unique_lock lock(state->mutex);
  const std::uint64_t number = state->recorded;
  const Clock clock = state->clock;
  state->changed.wait(lock, [&] { return state->reached >= number; });
  order().host_learns(clock);
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  RETURN_IF_FAULTED();
  const Event *first = nullptr, *second = nullptr;
  const auto start = state_of(from, &first), end = state_of(to, &second);
  if (start == nullptr || end == nullptr || !first->timed || !second->timed)
    return answer(cudaErrorInvalidResourceHandle);
  const auto look = [](EventState& state, Time::time_point* time) {
    const std::lock_guard lock(state.mutex);
    *time = state.time;
    if (state.recorded == 0) return cudaErrorInvalidResourceHandle;
    return state.reached < state.recorded ? cudaErrorNotReady : cudaSuccess;
  };
  Time::time_point began, ended;
  for (const cudaError_t error : {look(*start, &began), look(*end, &ended)}) {
    if (error != cudaSuccess) return answer(error);
  }
  *milliseconds = std::chrono::duration<float, std::milli>(ended - began).count();
  return cudaSuccess;
}
}
