// CUDA's functions about streams and events.
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "calls.h"
#include "journal.h"
#include "order.h"
#include "streams.h"

using namespace emulated;

namespace {

using Time = std::chrono::steady_clock;

// One record of an event. Each has its own, which waits share with the event: who waits for a record is not
// released by a later one that another stream gets to first, and the event may be destroyed before either.
struct Record {
  explicit Record(Clock before) : clock(std::move(before)) {}

  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;  // by its stream
  const Clock clock;     // what comes before it
  Time::time_point time;
};

struct Event {
  int device;
  bool timed;
  std::shared_ptr<Record> last;  // none: never recorded
};

std::mutex events_mutex;
std::unordered_map<const void*, Event*>& events() {
  static auto* the = new std::unordered_map<const void*, Event*>;
  return *the;
}

// A copy of the event as it is now; nothing, and a complaint, where there is none.
std::optional<Event> find(cudaEvent_t handle) {
  const std::lock_guard lock(events_mutex);
  const auto at = events().find(handle);
  if (at == events().end()) {
    journal().complain("an event is used that does not exist");
    return std::nullopt;
  }
  return *at->second;
}

void set_last(cudaEvent_t handle, std::shared_ptr<Record> record) {
  const std::lock_guard lock(events_mutex);
  if (const auto at = events().find(handle); at != events().end()) at->second->last = std::move(record);
}

}  // namespace

namespace emulated {

// A record of the event at this point of the stream, which a wait or a query asks about from now on.
void record(cudaEvent_t handle, Stream* stream) {
  const auto record = std::make_shared<Record>(order().now(stream->number));
  set_last(handle, record);
  const auto reach = [record] {
    const std::lock_guard lock(record->mutex);
    record->reached = true;
    record->time = Time::now();
    record->changed.notify_all();
  };
  stream->put({"record", reach, true});
}

}  // namespace emulated

namespace {

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
  if (const cudaError_t error = stream->refuse_in_capture()) return answer(error);
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
  if (const cudaError_t error = stream->refuse_in_capture()) return answer(error);
  stream->synchronize();
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* argument) {
  return put(stream, {"host function", [=] { call(argument); }, false, cudaGraphNodeTypeHost});
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
  if (!find(handle)) return answer(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(events_mutex);
  const auto at = events().find(handle);
  delete at->second;
  events().erase(at);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  need_context();
  RETURN_IF_FAULTED();
  const auto event = find(handle);
  Stream* stream = streams().find(on);
  if (!event || stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (event->device != stream->device) {
    journal().complain("an event of device " + std::to_string(event->device) + " is recorded on device " +
                       std::to_string(stream->device));
    return answer(cudaErrorInvalidResourceHandle);
  }
  if (stream->captured() != cudaStreamCaptureStatusNone) {
    if (flags != cudaEventRecordExternal) return answer(stream->refuse_in_capture());
    stream->note({{"record", {}, true, cudaGraphNodeTypeEventRecord}, {}, handle});
    return cudaSuccess;
  }
  journal().count("cudaEventRecord");
  record(handle, stream);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned) {
  need_context();
  RETURN_IF_FAULTED();
  const auto event = find(handle);
  Stream* stream = streams().find(on);
  if (!event || stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = stream->refuse_in_capture()) return answer(error);
  journal().count("cudaStreamWaitEvent");
  const std::shared_ptr<Record> record = event->last;
  if (record == nullptr) return cudaSuccess;
  order().follow(stream->number, record->clock);
  const auto wait = [record] {
    std::unique_lock lock(record->mutex);
    record->changed.wait(lock, [&] { return record->reached; });
  };
  stream->put({"wait", wait, true});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  RETURN_IF_FAULTED();
  journal().count("cudaEventQuery");
  const auto event = find(handle);
  if (!event) return answer(cudaErrorInvalidResourceHandle);
  if (event->last != nullptr) {
    const std::lock_guard lock(event->last->mutex);
    if (!event->last->reached) return answer(cudaErrorNotReady);
    order().host_learns(event->last->clock);
  }
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  RETURN_IF_FAULTED();
  const auto event = find(handle);
  if (!event) return answer(cudaErrorInvalidResourceHandle);
  if (const std::shared_ptr<Record> record = event->last; record != nullptr) {
    std::unique_lock lock(record->mutex);
    record->changed.wait(lock, [&] { return record->reached; });
    order().host_learns(record->clock);
  }
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  RETURN_IF_FAULTED();
  const auto first = find(from), second = find(to);
  if (!first || !second || !first->timed || !second->timed) return answer(cudaErrorInvalidResourceHandle);
  const auto look = [](const std::shared_ptr<Record>& record, Time::time_point* time) {
    if (record == nullptr) return cudaErrorInvalidResourceHandle;
    const std::lock_guard lock(record->mutex);
    *time = record->time;
    return record->reached ? cudaSuccess : cudaErrorNotReady;
  };
  Time::time_point began, ended;
  for (const cudaError_t error : {look(first->last, &began), look(second->last, &ended)}) {
    if (error != cudaSuccess) return answer(error);
  }
  *milliseconds = std::chrono::duration<float, std::milli>(ended - began).count();
  return cudaSuccess;
}
}
