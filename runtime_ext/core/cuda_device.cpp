#include "cuda_device.h"

#include <dlfcn.h>

#include <array>
#include <utility>

namespace disco {
namespace {

// Values of the CUDA runtime's ABI; the tests compare them with its headers where those are installed.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr std::array<int, 3> kMemcpyKind = {1, 2,
                                            4};  // by Direction: host to device, device to host, default

// The text of a failed call. Makes the runtime forget it: PyTorch asks for the thread's last error after
// every kernel that it launches, and would blame the kernel.
std::string error_text(const CudartApi& api, const char* call, int code) {
  if (api.get_last_error != nullptr) api.get_last_error();
  const char* text = api.error_string != nullptr ? api.error_string(code) : nullptr;
  return std::string(call) + " failed with error " + std::to_string(code) + ": " +
         (text != nullptr ? text : "?");
}

template <typename Function>
void resolve(void* library, Function*& function, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr)
    throw CudaError(name, -1, std::string(name) + " is missing from the CUDA runtime library");
  function = reinterpret_cast<Function*>(symbol);
}

void* find_runtime() {
  if (dlsym(RTLD_DEFAULT, "cudaEventQuery") != nullptr) return RTLD_DEFAULT;
  for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL); library != nullptr) return library;
  }
  throw CudaError(
      "dlopen", -1,
      "no CUDA runtime: tried the running process, libcudart.so.13, libcudart.so.12 and libcudart.so");
}

// Makes `device` current for the calling thread while it lives.
class CurrentDevice {
 public:
  CurrentDevice(const CudartApi& api, int device) : api_(api) {
    if (const int code = api_.get_device(&previous_); code != kSuccess) {
      throw CudaError("cudaGetDevice", code, error_text(api_, "cudaGetDevice", code));
    }
    if (const int code = api_.set_device(device); code != kSuccess) {
      throw CudaError("cudaSetDevice", code, error_text(api_, "cudaSetDevice", code));
    }
  }
  ~CurrentDevice() { api_.set_device(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const CudartApi& api_;
  int previous_ = 0;
};

}  // namespace

struct CudaDevice::Lane {
  CudaStream stream = nullptr;
  std::vector<CudaEvent> events;       // of token t: events[(t - 1) % size]
  std::vector<std::int32_t> vertices;  // likewise
  Token enqueued = 0;
  Token finished = 0;

  std::size_t slot(Token token) const { return static_cast<std::size_t>((token - 1) % events.size()); }
};

CudaError::CudaError(const std::string& call, int code, const std::string& text)
    : std::runtime_error(text), call_(call), code_(code) {}

CudartApi CudartApi::load() {
  void* library = find_runtime();
  CudartApi api;
  resolve(library, api.get_device, "cudaGetDevice");
  resolve(library, api.set_device, "cudaSetDevice");
  resolve(library, api.stream_create, "cudaStreamCreateWithFlags");
  resolve(library, api.stream_destroy, "cudaStreamDestroy");
  resolve(library, api.stream_synchronize, "cudaStreamSynchronize");
  resolve(library, api.stream_wait_event, "cudaStreamWaitEvent");
  resolve(library, api.event_create, "cudaEventCreateWithFlags");
  resolve(library, api.event_destroy, "cudaEventDestroy");
  resolve(library, api.event_record, "cudaEventRecord");
  resolve(library, api.event_query, "cudaEventQuery");
  resolve(library, api.event_elapsed, "cudaEventElapsedTime");
  resolve(library, api.memcpy_async, "cudaMemcpyAsync");
  resolve(library, api.host_register, "cudaHostRegister");
  resolve(library, api.host_unregister, "cudaHostUnregister");
  resolve(library, api.get_last_error, "cudaGetLastError");
  resolve(library, api.error_string, "cudaGetErrorString");
  return api;
}

PinnedRegion::PinnedRegion(const CudartApi& api, void* begin, std::size_t bytes) : api_(api), begin_(begin) {
  if (const int code = api_.host_register(begin, bytes, kHostRegisterPortable); code != kSuccess) {
    throw CudaError("cudaHostRegister", code,
                    error_text(api_, "cudaHostRegister", code) + " (" + std::to_string(bytes) + " bytes)");
  }
}

PinnedRegion::~PinnedRegion() { api_.host_unregister(begin_); }

CudaDevice::CudaDevice(CudartApi api, CudaDeviceOptions options) : api_(api), options_(options) {
  if (options_.compute_streams < 1)
    throw std::invalid_argument("cuda device: compute_streams must be at least 1");
  if (options_.window < 1) throw std::invalid_argument("cuda device: window must be at least 1");
  const CurrentDevice current(api_, options_.ordinal);
  try {
    make_streams();
  } catch (...) {
    destroy();
    throw;
  }
}

CudaDevice::~CudaDevice() { destroy(); }

void CudaDevice::make_streams() {
  lanes_.resize(static_cast<std::size_t>(streams()));
  for (Lane& lane : lanes_) {
    check("cudaStreamCreateWithFlags", api_.stream_create(&lane.stream, kStreamNonBlocking));
    lane.events.assign(static_cast<std::size_t>(options_.window), nullptr);
    lane.vertices.assign(lane.events.size(), -1);
    for (CudaEvent& event : lane.events) {
      check("cudaEventCreateWithFlags", api_.event_create(&event, kEventDisableTiming));
    }
  }
}

// What cannot be given back is lost with the process; there is nobody left to tell.
void CudaDevice::destroy() noexcept {
  for (CudaEvent event : timing_) api_.event_destroy(event);
  for (Lane& lane : lanes_) {
    for (CudaEvent event : lane.events) {
      if (event != nullptr) api_.event_destroy(event);
    }
    if (lane.stream != nullptr) api_.stream_destroy(lane.stream);
  }
  timing_.clear();
  lanes_.clear();
}

CudaStream CudaDevice::native_stream(int stream) const { return lanes_[stream].stream; }

std::string CudaDevice::describe(const char* call, int code) const { return error_text(api_, call, code); }

void CudaDevice::check(const char* call, int code) const {
  if (code != kSuccess) throw CudaError(call, code, describe(call, code));
}

void CudaDevice::connect(int index, OpRunner& runner, ProgressListener&) {
  index_ = index;
  runner_ = &runner;
}

void CudaDevice::attach_loop_thread() { check("cudaSetDevice", api_.set_device(options_.ordinal)); }

void CudaDevice::before_work(int stream, std::int32_t vertex) {
  const Lane& lane = lanes_[stream];
  if (lane.enqueued - lane.finished >= lane.events.size()) {
    throw std::logic_error("cuda device: more than " + std::to_string(lane.events.size()) +
                           " vertices in flight on stream " + std::to_string(stream));
  }
  if (spans_ != nullptr) check("cudaEventRecord", api_.event_record(timing_[1 + 2 * vertex], lane.stream));
}

Token CudaDevice::after_work(int stream, std::int32_t vertex) {
  Lane& lane = lanes_[stream];
  if (spans_ != nullptr) {
    check("cudaEventRecord", api_.event_record(timing_[2 + 2 * vertex], lane.stream));
    timed_.push_back(vertex);
  }
  const Token token = lane.enqueued + 1;
  check("cudaEventRecord", api_.event_record(lane.events[lane.slot(token)], lane.stream));
  lane.vertices[lane.slot(token)] = vertex;
  lane.enqueued = token;
  return token;
}

Token CudaDevice::enqueue_op(int stream, std::int32_t vertex, std::int32_t op) {
  before_work(stream, vertex);
  runner_->run(op, index_, stream);
  return after_work(stream, vertex);
}

Token CudaDevice::enqueue_copy(int stream, std::int32_t vertex, void* dst, const void* src,
                               std::int64_t bytes) {
  before_work(stream, vertex);
  if (bytes > 0) {
    const int kind = kMemcpyKind[static_cast<std::size_t>(stream - compute_streams())];
    check("cudaMemcpyAsync",
          api_.memcpy_async(dst, src, static_cast<std::size_t>(bytes), kind, lanes_[stream].stream));
  }
  return after_work(stream, vertex);
}

void CudaDevice::wait(int stream, int other, Token token) {
  const Lane& source = lanes_[other];
  if (source.finished >= token) return;
  check("cudaStreamWaitEvent",
        api_.stream_wait_event(lanes_[stream].stream, source.events[source.slot(token)], 0));
}

Token CudaDevice::completed(int stream) {
  Lane& lane = lanes_[stream];
  while (lane.finished < lane.enqueued) {
    const std::size_t slot = lane.slot(lane.finished + 1);
    const int code = api_.event_query(lane.events[slot]);
    if (code == kNotReady) {
      api_.get_last_error();  // "not yet" counts as an error there
      break;
    }
    if (code != kSuccess) {
      fail(lane.vertices[slot], describe("cudaEventQuery", code));
      lane.finished = lane.enqueued;  // nothing more can be learnt about them
      break;
    }
    ++lane.finished;
  }
  return lane.finished;
}

bool CudaDevice::failed() const { return failed_; }

DeviceFailure CudaDevice::failure() const { return failure_; }

void CudaDevice::fail(std::int32_t vertex, std::string message) {
  if (failed_) return;
  failed_ = true;
  failure_ = {vertex, std::move(message)};
}

// A launch that threw half-way may have left work that no event follows: wait for the streams themselves.
void CudaDevice::recover() {
  failed_ = false;
  failure_ = {};
  for (const Lane& lane : lanes_) {
    if (const int code = api_.stream_synchronize(lane.stream); code != kSuccess) {
      fail(-1,
           describe("cudaStreamSynchronize", code));  // a sticky error: the next step fails too and says so
    }
  }
}

void CudaDevice::make_timing_events(std::size_t count) {
  timing_.reserve(count);
  timed_.reserve(count);
  while (timing_.size() < count) {
    CudaEvent event = nullptr;
    check("cudaEventCreateWithFlags", api_.event_create(&event, 0));
    timing_.push_back(event);
  }
}

void CudaDevice::trace(Span* spans, std::int32_t vertices) {
  spans_ = nullptr;
  timed_.clear();
  if (spans == nullptr) return;
  make_timing_events(1 + 2 * static_cast<std::size_t>(vertices));
  check("cudaEventRecord", api_.event_record(timing_[0], lanes_[0].stream));
  base_ns_ = now_ns();
  spans_ = spans;
}

void CudaDevice::finish_trace() {
  constexpr double kNsPerMs = 1e6;
  for (const std::int32_t vertex : timed_) {
    float start = 0;
    float end = 0;
    if (api_.event_elapsed(&start, timing_[0], timing_[1 + 2 * vertex]) != kSuccess ||
        api_.event_elapsed(&end, timing_[0], timing_[2 + 2 * vertex]) != kSuccess) {
      api_.get_last_error();
      continue;
    }
    spans_[vertex].start = base_ns_ + static_cast<std::int64_t>(start * kNsPerMs);
    spans_[vertex].end = base_ns_ + static_cast<std::int64_t>(end * kNsPerMs);
  }
}

}  // namespace disco
