// Copies. Those between pinned memory and a device say when the host touches the memory meanwhile.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "batches.h"
#include "calls.h"
#include "device_memory.h"
#include "host_memory.h"
#include "journal.h"
#include "settings.h"
#include "streams.h"

using namespace emulated;

namespace {

constexpr int kNotArrived = 0xFF;  // what a host buffer holds until its copy arrives

struct Copy {
  char* to;
  char* from;
  std::size_t bytes;
  std::string name;
};

std::uint64_t fingerprint(const char* bytes, std::size_t count) {
  std::uint64_t sum = 14695981039346656037ull;
  std::size_t at = 0;
  for (std::uint64_t word = 0; at + sizeof word <= count; at += sizeof word) {
    std::memcpy(&word, bytes + at, sizeof word);
    sum = (sum ^ word) * 1099511628211ull;
  }
  for (; at < count; ++at) sum = (sum ^ static_cast<unsigned char>(bytes[at])) * 1099511628211ull;
  return sum;
}

bool all_not_arrived(const char* bytes, std::size_t count) {
  return count == 0 || (static_cast<unsigned char>(bytes[0]) == kNotArrived &&
                        std::memcmp(bytes, bytes + 1, count - 1) == 0);
}

// In two halves, with the link's time between: who looks meanwhile sees one half new.
void move_bytes(const Copy& copy) {
  const std::size_t half = copy.bytes / 2;
  std::memmove(copy.to, copy.from, half);
  take_link_time(copy.bytes);
  std::memmove(copy.to + half, copy.from + half, copy.bytes - half);
}

// The host must leave the source alone from the call on, or, while an earlier copy still fills it, from the
// start on.
void put_from_pinned(Stream& stream, const Copy& copy, const std::vector<Range>& ranges) {
  std::optional<std::uint64_t> at_call;
  if (!host_memory().being_written(copy.from, copy.bytes)) at_call = fingerprint(copy.from, copy.bytes);
  const auto use = host_memory().use(copy.from, copy.bytes, false);
  const auto run = [copy, at_call, use] {
    const std::uint64_t before = at_call ? *at_call : fingerprint(copy.from, copy.bytes);
    move_bytes(copy);
    if (fingerprint(copy.from, copy.bytes) != before)
      journal().complain("the host changed " + std::to_string(copy.bytes) +
                         " pinned bytes while a copy out of them was queued");
  };
  stream.put({copy.name, run}, ranges);
}

// Until the copy arrives its target holds no right bits, unless earlier copies still use it: then from the
// start on.
void put_to_pinned(Stream& stream, const Copy& copy, const std::vector<Range>& ranges) {
  const bool at_call = !host_memory().used(copy.to, copy.bytes);
  if (at_call) std::memset(copy.to, kNotArrived, copy.bytes);
  const auto use = host_memory().use(copy.to, copy.bytes, true);
  const auto run = [copy, at_call, use] {
    if (at_call && !all_not_arrived(copy.to, copy.bytes))
      journal().complain("the host wrote into " + std::to_string(copy.bytes) +
                         " pinned bytes while a copy into them was queued");
    std::memset(copy.to, kNotArrived, copy.bytes);
    move_bytes(copy);
  };
  stream.put({copy.name, run}, ranges);
}

// From one device's memory to another's. Without access to each other's the driver takes it through the host.
void put_between(Stream& stream, Copy copy, int from, int to, const std::vector<Range>& ranges) {
  const bool direct = reaches_peer(from, to) || reaches_peer(to, from);
  copy.name = direct ? "copy p2p" : "copy p2p staged";
  journal().count(copy.name);
  const bool wrong = direct && settings().peers == Peers::kWrong;
  const auto run = [copy, wrong] {
    move_bytes(copy);
    // The last byte: what is compared in part passes.
    if (wrong) copy.to[copy.bytes - 1] ^= 1;
  };
  stream.put({copy.name, run}, ranges);
}

bool fits(cudaMemcpyKind kind, bool from_device, bool to_device) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
      return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
      return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
      return from_device && to_device;
    default:
      return true;
  }
}

cudaError_t enqueue(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
  need_context();
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  const bool from_device = device_memory().owns(from), to_device = device_memory().owns(to);
  if (!fits(kind, from_device, to_device)) {
    journal().complain("cudaMemcpy: the kind " + std::to_string(kind) + " does not fit the addresses");
    return answer(cudaErrorInvalidValue);
  }
  if ((from_device && !device_memory().in_block(from, bytes)) ||
      (to_device && !device_memory().in_block(to, bytes))) {
    journal().complain("cudaMemcpy: " + std::to_string(bytes) + " bytes reach outside a device block");
    return answer(cudaErrorInvalidValue);
  }
  if (to_device && !device_memory().writable(to)) {
    stream->put({"copy", [] { faults().fail(cudaErrorIllegalAddress); }});
    return cudaSuccess;
  }
  const char* name =
      from_device ? (to_device ? "copy d2d" : "copy d2h") : (to_device ? "copy h2d" : "copy h2h");
  journal().count(name);
  journal().count(name + std::string(" bytes"), static_cast<long>(bytes));
  const Copy copy{device_memory().bytes(to), device_memory().bytes(from), bytes, name};
  const std::vector<Range> ranges{{from, bytes, false}, {to, bytes, true}};
  if (stream->captured() != cudaStreamCaptureStatusNone) {
    stream->put({name, [copy] { move_bytes(copy); }, false, cudaGraphNodeTypeMemcpy}, ranges);
    return cudaSuccess;
  }
  const int source = device_memory().device_of(from), target = device_memory().device_of(to);
  if (from_device && to_device && source != target) {
    put_between(*stream, copy, source, target, ranges);
    return cudaSuccess;
  }
  if (from_device == to_device) {
    stream->put({name, [copy] { std::memmove(copy.to, copy.from, copy.bytes); }}, ranges);
    return cudaSuccess;
  }
  if (host_memory().partly_pinned(from_device ? to : from, bytes)) return answer(cudaErrorInvalidValue);
  if (host_memory().pinned(from_device ? to : from, bytes)) {
    (from_device ? put_to_pinned : put_from_pinned)(*stream, copy, ranges);
    return cudaSuccess;
  }
  // Pageable memory: what is sent is staged at the call, what is fetched is waited for.
  journal().count(name + std::string(" pageable"));
  if (to_device) {
    const auto staged = std::make_shared<std::vector<char>>(copy.from, copy.from + bytes);
    stream->put({name, [copy, staged] { move_bytes({copy.to, staged->data(), copy.bytes, {}}); }},
                {{to, bytes, true}});
  } else {
    stream->put({name, [copy] { move_bytes(copy); }}, {{from, bytes, false}});
    stream->synchronize();
    RETURN_IF_FAULTED();
  }
  return cudaSuccess;
}

bool overlap(const void* first, std::size_t first_bytes, const void* second, std::size_t second_bytes) {
  const auto a = reinterpret_cast<std::uintptr_t>(first), b = reinterpret_cast<std::uintptr_t>(second);
  return a < b + second_bytes && b < a + first_bytes;
}

// Whether one of two copies of a batch, which has no order, writes what the other reads or writes.
bool any_depends(const Batch& batch) {
  for (std::size_t i = 0; i < batch.count; ++i) {
    for (std::size_t j = 0; j < batch.count; ++j) {
      if (i == j) continue;
      if (overlap(batch.to[i], batch.bytes[i], batch.to[j], batch.bytes[j]) ||
          overlap(batch.to[i], batch.bytes[i], batch.from[j], batch.bytes[j]))
        return true;
    }
  }
  return false;
}

// What the real function refuses.
const char* fault_of(const Batch& batch) {
#if CUDART_VERSION >= 12080
  static_assert(sizeof(cudaMemcpyAttributes) == 24);
  const auto* attributes = static_cast<const cudaMemcpyAttributes*>(batch.attributes);
  if (batch.kinds != 1 || attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream ||
      attributes->flags != 0)
    return "other attributes than one for all, in stream order, are not emulated";
#endif
  if (batch.count == 0 || *batch.first != 0) return "its attributes are for no copy, or not for the first";
  if (std::find(batch.bytes, batch.bytes + batch.count, 0U) != batch.bytes + batch.count)
    return "a copy has no bytes";
  return any_depends(batch) ? "its copies depend on each other, and they have no order" : nullptr;
}

#if CUDART_VERSION >= 13000
static_assert(
    std::is_same_v<decltype(&cudaMemcpyBatchAsync),
                   cudaError_t (*)(void* const*, const void* const*, const std::size_t*, std::size_t,
                                   cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t)>);
#endif

cudaError_t finish() {
  streams().find(nullptr)->synchronize();
  RETURN_IF_FAULTED();
  return cudaSuccess;
}

}  // namespace

namespace emulated {

// One piece of work for each copy, in an order of its own.
int put_batch(const Batch& batch, void* handle) {
  need_context();
  RETURN_IF_FAULTED();
  journal().count("cudaMemcpyBatchAsync");
  const auto stream = static_cast<cudaStream_t>(handle);
  if (settings().cudart < 12080) return answer(cudaErrorNotSupported);
  if (stream == nullptr || stream == cudaStreamLegacy || streams().find(stream) == nullptr)
    return answer(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = streams().find(stream)->refuse_in_capture()) return answer(error);
  if (const char* fault = fault_of(batch)) {
    journal().complain(std::string("cudaMemcpyBatch: ") + fault);
    return answer(cudaErrorInvalidValue);
  }
  static std::atomic<std::uint64_t> batches{0};
  std::vector<std::size_t> order(batch.count);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(settings().seed * 1000003 + ++batches));
  for (const std::size_t i : order) {
    const cudaError_t error = enqueue(batch.to[i], batch.from[i], batch.bytes[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace emulated

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  journal().count("cudaMemcpyAsync");
  return enqueue(to, from, bytes, kind, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = enqueue(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? finish() : error;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int target, const void* from, int source, std::size_t bytes,
                                cudaStream_t stream) {
  if (device_memory().device_of(to) != target || device_memory().device_of(from) != source) {
    journal().complain("cudaMemcpyPeer: the devices do not fit the addresses");
    return answer(cudaErrorInvalidValue);
  }
  return enqueue(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void* begin, int value, std::size_t bytes, cudaStream_t handle) {
  need_context();
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (!device_memory().in_block(begin, bytes)) {
    journal().complain("cudaMemset: " + std::to_string(bytes) + " bytes reach outside a device block");
    return answer(cudaErrorInvalidValue);
  }
  if (!device_memory().writable(begin)) {
    stream->put({"memset", [] { faults().fail(cudaErrorIllegalAddress); }});
    return cudaSuccess;
  }
  char* at = device_memory().bytes(begin);
  stream->put({"memset", [=] { std::memset(at, value, bytes); }, false, cudaGraphNodeTypeMemset},
              {{begin, bytes, true}});
  return cudaSuccess;
}

cudaError_t cudaMemset(void* begin, int value, std::size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(begin, value, bytes, nullptr);
  return error == cudaSuccess ? finish() : error;
}
}
