#include "cuda_device.h"

#include <algorithm>
#include <array>
#include <utility>

#include "copy_batch.h"
#include "current_device.h"
#include "launch_graphs.h"
#include "peer_copies.h"

namespace disco {
namespace {

constexpr std::array<int, 3> kMemcpyKind = {1, 2,
                                            4};  // by Direction: host to device, device to host, default

// Codes after which the runtime refuses every further call of the process: a fault of a kernel, memory that
// cannot be trusted, a device that is gone.
bool ends_the_context(int code) {
  constexpr std::array<int, 14> kCodes = {46,  214, 220, 222, 700, 702, 709,
                                          710, 714, 715, 716, 717, 718, 719};
  return std::find(kCodes.begin(), kCodes.end(), code) != kCodes.end();
}

constexpr std::size_t kNamed = 8;  // vertices that a failure lists

constexpr std::int64_t kExactNs = 50'000;  // exact enough for the start of a trace
constexpr int kAttempts = 8;

}  // namespace

struct CudaDevice::Lane {
  CudaStream stream = nullptr;
  std::vector<CudaEvent> events;                      // to be recorded behind token t: events[(t - 1) % size]
  std::vector<CudaEvent> recorded;                    // likewise, what was: that one, a graph's, or null
  std::vector<std::int32_t> vertices;                 // likewise
  std::vector<std::span<const std::int32_t>> others;  // likewise, what was launched as one with it
  std::vector<std::int32_t> batches;                  // of a copy lane: room for what `others` has of copies
  Token enqueued = 0;
  Token finished = 0;
  Token asked = 0;  // what was enqueued when completed() was last called

  std::size_t slot(Token token) const { return static_cast<std::size_t>((token - 1) % events.size()); }
  // The first token at or behind `token` with an event of its own, which tells of `token` too; 0: none has.
  Token covered_by(Token token) const {
    while (token <= enqueued && recorded[slot(token)] == nullptr) ++token;
    return token <= enqueued ? token : 0;
  }
};

CudaDevice::CudaDevice(CudartApi api, CudaDeviceOptions options) : api_(api), options_(options) {
  if (options_.compute_streams < 1)
    throw std::invalid_argument("cuda device: compute_streams must be at least 1");
  if (options_.window < 1) throw std::invalid_argument("cuda device: window must be at least 1");
  streams_ = options_.streams;
  if (streams_ == nullptr) streams_ = std::make_shared<CudaStreams>(api_, options_.ordinal);
  const CurrentDevice current(api_, options_.ordinal);
  try {
    make_lanes();
    if (options_.graphs)
      graphs_ = std::make_unique<LaunchGraphs>(api_, streams_, options_.graph_bytes, options_.graph_memory);
    if (!options_.neighbours.empty())
      peers_ = std::make_unique<PeerCopies>(api_, options_.ordinal, options_.neighbours);
  } catch (...) {
    destroy();
    throw;
  }
}

CudaDevice::~CudaDevice() { destroy(); }

void CudaDevice::make_lanes() {
  lanes_.resize(static_cast<std::size_t>(streams()));
  for (int stream = 0; stream < streams(); ++stream) {
    Lane& lane = lanes_[static_cast<std::size_t>(stream)];
    const int direction = stream - compute_streams();
    lane.stream =
        direction < 0 ? streams_->compute(stream) : streams_->lane(static_cast<Direction>(direction));
    const std::size_t more = direction < 0 && options_.graphs ? kMostKernels : 0;
    lane.events.assign(static_cast<std::size_t>(options_.window) + more, nullptr);
    lane.recorded.assign(lane.events.size(), nullptr);
    lane.others.assign(lane.events.size(), {});
    lane.vertices.assign(lane.events.size(), -1);
    if (direction >= 0) lane.batches.assign(lane.events.size() * kMostCopies, -1);
    for (CudaEvent& event : lane.events) {
      check("cudaEventCreateWithFlags", api_.event_create(&event, kEventDisableTiming));
    }
  }
}

// What cannot be given back is lost with the process; there is nobody left to tell.
void CudaDevice::destroy() noexcept {
  peers_.reset();
  graphs_.reset();
  for (CudaEvent event : timing_) api_.event_destroy(event);
  for (Lane& lane : lanes_) {
    for (CudaEvent event : lane.events) {
      if (event != nullptr) api_.event_destroy(event);
    }
  }
  timing_.clear();
  lanes_.clear();
}

CudaStream CudaDevice::native_stream(int stream) const { return lanes_[stream].stream; }

bool CudaDevice::recording() const { return graphs_ != nullptr && graphs_->recording() != nullptr; }

CudaStream CudaDevice::launch_stream(int stream) const {
  return recording() ? graphs_->recording() : native_stream(stream);
}

void CudaDevice::waits_for(CudaEvent event) {
  caller_event_.store(event);
  caller_waits_.fetch_add(1);
}

bool CudaDevice::waiting_for_caller() const {
  const std::uint64_t waits = caller_waits_.load();
  if (waits == caller_seen_) return false;
  const int code = api_.event_query(caller_event_.load());
  if (code != kSuccess) api_.get_last_error();  // "not yet" counts as an error there
  if (code == kNotReady) return true;
  // A record that the caller makes meanwhile has a number of its own and is asked about again.
  caller_seen_ = waits;
  return false;
}

void CudaDevice::check(const char* call, int code) const { check_cuda(api_, call, code); }

void CudaDevice::connect(int index, OpRunner& runner, ProgressListener&) {
  index_ = index;
  runner_ = &runner;
}

void CudaDevice::attach_loop_thread() { check("cudaSetDevice", api_.set_device(options_.ordinal)); }

// Kernels are launched, and events made, on the current device alone.
void CudaDevice::make_current() const {
  if (!shares_loop_) return;
  int current = 0;
  check("cudaGetDevice", api_.get_device(&current));
  if (current != options_.ordinal) check("cudaSetDevice", api_.set_device(options_.ordinal));
}

void CudaDevice::require_room(int stream, std::size_t tokens) const {
  const Lane& lane = lanes_[stream];
  if (lane.enqueued - lane.finished + tokens > lane.events.size()) {
    throw std::logic_error("cuda device: more than " + std::to_string(lane.events.size()) +
                           " vertices in flight on stream " + std::to_string(stream));
  }
}

// `first`, `last`: of the vertex's pieces.
void CudaDevice::before_work(int stream, std::int32_t vertex, bool first) {
  const Lane& lane = lanes_[stream];
  require_room(stream, 1);
  if (spans_ != nullptr && first)
    check("cudaEventRecord", api_.event_record(timing_[1 + 2 * vertex], lane.stream));
}

Token CudaDevice::after_work(int stream, std::int32_t vertex, bool last) {
  Lane& lane = lanes_[stream];
  if (spans_ != nullptr && last) {
    check("cudaEventRecord", api_.event_record(timing_[2 + 2 * vertex], lane.stream));
    timed_.push_back(vertex);
  }
  const Token token = ++lane.enqueued;
  lane.recorded[lane.slot(token)] = nullptr;
  lane.vertices[lane.slot(token)] = vertex;
  lane.others[lane.slot(token)] = {};
  return token;
}

// An event behind all that is enqueued. Nothing is in flight, or one is there: nothing is done.
int CudaDevice::record(Lane& lane) {
  if (lane.enqueued == lane.finished) return kSuccess;
  const std::size_t slot = lane.slot(lane.enqueued);
  if (lane.recorded[slot] != nullptr) return kSuccess;
  const int code = api_.event_record(lane.events[slot], lane.stream);
  if (code == kSuccess) lane.recorded[slot] = lane.events[slot];
  return code;
}

void CudaDevice::mark(int stream) { check("cudaEventRecord", record(lanes_[stream])); }

Token CudaDevice::enqueue_op(int stream, std::int32_t vertex, std::int32_t op) {
  make_current();
  before_work(stream, vertex);
  runner_->run(op, index_, stream);
  return after_work(stream, vertex);
}

Token CudaDevice::enqueue_copy(int stream, const Copy& copy) {
  before_work(stream, copy.vertex, copy.first());
  put(stream, copy);
  const Token token = after_work(stream, copy.vertex, copy.last());
  mark(stream);
  return token;
}

void CudaDevice::put(int stream, const Copy& copy) {
  const auto bytes = static_cast<std::size_t>(copy.bytes);
  const bool to_peer = peers_ != nullptr && stream == lane(Direction::kPeer);
  if (const Neighbour* to = to_peer ? peers_->holder(copy.dst, copy.bytes) : nullptr; to != nullptr) {
    peers_->enqueue(*to, lanes_[stream].stream, copy.dst, copy.src, bytes);
  } else if (bytes > 0) {
    const int kind = kMemcpyKind[static_cast<std::size_t>(stream - compute_streams())];
    check("cudaMemcpyAsync", api_.memcpy_async(copy.dst, copy.src, bytes, kind, lanes_[stream].stream));
  }
}

// One event tells of all of them.
Token CudaDevice::enqueue_copies(int stream, std::span<const Copy> copies, std::int32_t& blamed) {
  require_room(stream, 1);
  if (!put_batch(stream, copies)) {
    for (const Copy& copy : copies) {
      blamed = copy.vertex;
      put(stream, copy);
    }
  }
  const Token token = after_work(stream, copies.back().vertex);
  Lane& lane = lanes_[stream];
  const std::size_t slot = lane.slot(token);
  const std::span<std::int32_t> others =
      std::span(lane.batches).subspan(slot * kMostCopies, copies.size() - 1);
  for (std::size_t i = 0; i < others.size(); ++i) others[i] = copies[i].vertex;
  lane.others[slot] = others;
  mark(stream);
  return token;
}

// False where the runtime takes no batches, or refuses this one. Made one by one then, a copy that the
// runtime had begun is made twice, from the same bytes.
bool CudaDevice::put_batch(int stream, std::span<const Copy> copies) {
  if (stream == lane(Direction::kPeer) || !api_.batches) return false;
  make_current();
  if (copy_batch(api_, copies, lanes_[stream].stream) == kSuccess) return true;
  api_.get_last_error();
  api_.batches = {};
  return false;
}

// Traced kernels are launched one by one, between events of their own.
Repeated CudaDevice::repeat(int stream, const Segment& segment) {
  Repeated repeated;
  if (graphs_ == nullptr || spans_ != nullptr) return repeated;
  make_current();
  LaunchGraph* const graph = graphs_->find(segment, *runner_, index_, stream, repeated.barred);
  if (graph == nullptr) return repeated;
  Lane& lane = lanes_[stream];
  require_room(stream, segment.ends.size());
  graphs_->launch(*graph, lane.stream);
  repeated.first = lane.enqueued + 1;
  std::size_t begin = 0;
  for (std::size_t part = 0; part < segment.ends.size(); ++part) {
    const auto last = static_cast<std::size_t>(segment.ends[part]) - 1;
    const std::size_t slot = lane.slot(++lane.enqueued);
    lane.recorded[slot] = graph->events[part];
    lane.vertices[slot] = segment.vertices[last];
    lane.others[slot] = std::span(segment.vertices).subspan(begin, last - begin);
    begin = last + 1;
  }
  return repeated;
}

void CudaDevice::keep_graphs(const std::vector<Segment>& segments) {
  if (graphs_ == nullptr) return;
  make_current();
  graphs_->keep(segments);
}

GraphFigures CudaDevice::graph_figures() const {
  return graphs_ == nullptr ? GraphFigures{.refused = options_.no_graphs} : graphs_->figures();
}

void CudaDevice::wait(int stream, int other, Token token) {
  const Lane& source = lanes_[other];
  if (source.finished >= token) return;
  if (source.covered_by(token) == 0) mark(other);
  check("cudaStreamWaitEvent",
        api_.stream_wait_event(lanes_[stream].stream, source.recorded[source.slot(source.covered_by(token))],
                               0));
}

// While the loop thread launches, marks are to come. When it has come back without anything new, nobody may
// have a reason to mark what is in flight: then the device does.
Token CudaDevice::completed(int stream) {
  Lane& lane = lanes_[stream];
  const bool idle = std::exchange(lane.asked, lane.enqueued) == lane.enqueued;
  while (lane.finished < lane.enqueued) {
    const Token next = lane.covered_by(lane.finished + 1);
    if (next == 0 && !idle) break;
    const char* const call = next == 0 ? "cudaEventRecord" : "cudaEventQuery";
    const int code = next == 0 ? record(lane) : api_.event_query(lane.recorded[lane.slot(next)]);
    if (code == kNotReady) {
      api_.get_last_error();  // "not yet" counts as an error there
      break;
    }
    if (code != kSuccess) {
      fail_all(call, code);
      lane.finished = lane.enqueued;  // nothing more can be learnt about them
      break;
    }
    if (next != 0) lane.finished = next;
  }
  return lane.finished;
}

bool CudaDevice::failed() const { return failed_; }

DeviceFailure CudaDevice::failure() const { return failure_; }

std::int32_t CudaDevice::in_flight_count() const {
  Token count = 0;
  for (const Lane& lane : lanes_) {
    for (Token token = lane.finished + 1; token <= lane.enqueued; ++token)
      count += 1 + lane.others[lane.slot(token)].size();
  }
  return static_cast<std::int32_t>(count);
}

void CudaDevice::fail(std::string message, bool lost, std::vector<std::int32_t> in_flight) {
  if (failed_) return;
  failed_ = true;
  const std::int32_t oldest = in_flight.empty() ? -1 : in_flight.front();
  failure_ = {oldest, std::move(message), lost, /*later=*/true, std::move(in_flight), in_flight_count()};
}

// The runtime tells of a fault at the next call, whatever that asks for: what was in flight may be to blame,
// kernels sooner than copies.
void CudaDevice::fail_all(const char* call, int code) {
  fail(cuda_error_text(api_, call, code), ends_the_context(code), first_in_flight());
}

std::vector<std::int32_t> CudaDevice::first_in_flight() const {
  std::vector<std::int32_t> in_flight;
  const auto add = [&](std::int32_t vertex) {
    if (in_flight.size() < kNamed) in_flight.push_back(vertex);
  };
  for (const Lane& lane : lanes_) {
    for (Token token = lane.finished + 1; token <= lane.enqueued; ++token) {
      for (const std::int32_t other : lane.others[lane.slot(token)]) add(other);
      add(lane.vertices[lane.slot(token)]);
    }
  }
  return in_flight;
}

// A launch that threw half-way may have left work that no event follows: wait for the streams themselves.
void CudaDevice::recover() {
  failed_ = false;
  failure_ = {};
  const auto drain = [this](CudaStream stream) {
    if (const int code = api_.stream_synchronize(stream); code != kSuccess) {
      // One that stays makes the next step fail too, and say so.
      fail(cuda_error_text(api_, "cudaStreamSynchronize", code), ends_the_context(code), {});
    }
  };
  // Work whose mark was refused is known to nobody else.
  for (Lane& lane : lanes_) lane.finished = lane.enqueued;
  for (const Lane& lane : lanes_) drain(lane.stream);
  if (arrivals_ != nullptr) drain(arrivals_);
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
  make_current();
  make_timing_events(1 + 2 * static_cast<std::size_t>(vertices));
  // On a stream that waits for nothing: on the others the event would come after the caller's work. When it
  // came is known as well as this thread was let run; another try costs microseconds.
  std::int64_t before_ns = 0;
  std::int64_t width_ns = kExactNs + 1;
  for (int attempt = 0; attempt < kAttempts && width_ns > kExactNs; ++attempt) {
    before_ns = now_ns();
    check("cudaEventRecord", api_.event_record(timing_[0], streams_->clock()));
    check("cudaStreamSynchronize", api_.stream_synchronize(streams_->clock()));
    width_ns = now_ns() - before_ns;
  }
  base_ns_ = before_ns + width_ns / 2;
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
