// The part of Engine::Loop that books completions and launches vertices. Runs with state_mutex_ held.
#include <exception>
#include <utility>

#include "loop.h"
#include "scope.h"

namespace disco {
bool Engine::Loop::pump() {
  bool moved = false;
  do {
    ended_at_once_ = false;
    moved = (in_flight_ > 0 && poll()) || moved;
    if (phase_ == Phase::kRunning || phase_ == Phase::kLoading) moved = issue() || moved;
    settle();
  } while (ended_at_once_);
  return moved;
}

bool Engine::Loop::poll() {
  bool moved = false;
  for (StreamState& stream : schedule_.streams) {
    if (stream.count > 0) moved = poll_stream(stream) || moved;
  }
  return moved;
}

bool Engine::Loop::poll_stream(StreamState& stream) {
  Device& device = *devices_[stream.device];
  Token done = 0;
  try {
    done = device.completed(stream.stream);
  } catch (const std::exception& error) {
    // The device cannot say any more what has finished: give up what it was doing, so that draining can end.
    stop(Status::kFailed, stream.front().vertex, what_of(error));
    in_flight_ -= stream.count;
    while (stream.count > 0) stream.pop();
    return true;
  }
  if (done < stream.front().token) return false;
  if (device.failed() && phase_ != Phase::kDraining) {
    stop(failure_of(device));
  }
  while (stream.count > 0 && stream.front().token <= done) {
    const StreamState::Entry entry = stream.front();
    stream.pop();
    --in_flight_;
    if (entry.last) {
      for (const std::int32_t v : entry.others) finish(v);
      finish(entry.vertex);
    } else {
      ++completions_;
    }
  }
  return true;
}

void Engine::Loop::finish(std::int32_t v) {
  state_[v] = State::kDone;
  ++completions_;
  if (phase_ == Phase::kLoading) {
    --loads_left_;
    return;
  }
  if (phase_ != Phase::kRunning) return;
  --left_;
  outs_left_ -= program_.out(v) ? 1 : 0;
  const std::int16_t resource = schedule_.resource_of[v];
  const bool kernel = program_.kind[v] == Kind::kKernel;
  for (const std::int32_t s : schedule_.followers_of(v)) {
    if (--waiting_[s] == 0) {
      if (state_[s] < State::kIssued) make_ready(s);  // look-ahead may have been faster
    } else if (schedule_.lookahead && !(kernel && schedule_.resource_of[s] == resource) &&
               --unissued_[s] == 0) {
      make_candidate(s);
    }
  }
}

void Engine::Loop::make_ready(std::int32_t v) {
  state_[v] = State::kReady;
  if (!sequential()) schedule_.resources[schedule_.resource_of[v]].ready.push(v);
}

void Engine::Loop::make_candidate(std::int32_t v) {
  Resource& resource = schedule_.resources[schedule_.resource_of[v]];
  if (resource.copy) return;
  state_[v] = State::kCandidate;
  if (!sequential()) resource.candidates.push(v);
}

bool Engine::Loop::issue() {
  if (phase_ == Phase::kLoading) return issue_loads();
  bool moved = false;
  for (Resource& resource : schedule_.resources) {
    if (phase_ != Phase::kRunning) break;
    if (resource.copy) {
      moved = issue_copies(resource) || moved;
    } else if (!devices_[resource.device]->runs_inline()) {
      moved = issue_kernels(resource) || moved;
    }
  }
  return moved;
}

bool Engine::Loop::issue_loads() {
  bool moved = false;
  while (loads_issued_ < loads_.size() && phase_ == Phase::kLoading) {
    const std::int32_t v = loads_[loads_issued_];
    int stream = 0;
    for (const Resource& resource : schedule_.resources) {
      const int h2d = devices_[resource.device]->lane(Direction::kHostToDevice);
      if (resource.device == program_.device[v] && schedule_.streams[resource.first_stream].stream == h2d) {
        stream = resource.first_stream;
      }
    }
    if (schedule_.streams[stream].count == static_cast<int>(schedule_.streams[stream].ring.size())) break;
    ++loads_issued_;
    moved = launch(v, stream) || moved;
  }
  if (loads_left_ == 0 && phase_ == Phase::kLoading) {
    start_running();
    issue();
    moved = true;
  }
  return moved;
}

// A stream with nothing to do takes the first ready kernel. The window behind a busy stream is filled in
// priority order from ready kernels and candidates alike: taking every ready kernel first would let a far
// later one overtake. No more than `window` at a time for each stream, so that copies and other devices do
// not wait while a window in time is filled; pump() comes back for the rest.
bool Engine::Loop::issue_kernels(Resource& resource) {
  bool moved = false;
  for (int left = resource.window * resource.stream_count; left > 0 && phase_ == Phase::kRunning; --left) {
    int stream = resource.first_stream;
    for (int s = stream + 1; s < resource.first_stream + resource.stream_count; ++s) {
      if (schedule_.streams[s].count < schedule_.streams[stream].count) stream = s;
    }
    const StreamState& emptiest = schedule_.streams[stream];
    if (!resource.has_room(emptiest)) break;
    const std::int32_t ready = next_ready(resource);
    const std::int32_t candidate =
        schedule_.lookahead && (emptiest.count > 0 || ready < 0) ? next_candidate(resource) : -1;
    const int behind = candidate < 0 ? -1 : stream_for_candidate(resource, candidate);
    const bool fits = ready >= 0 && may_queue(resource, emptiest, ready);
    const bool toss = options_.dispatch == Dispatch::kRandom && random_.below(2) == 0;
    if (fits && (behind < 0 || (ready < candidate) != toss)) {
      moved = launch_kernel(resource, resource.ready, ready, stream) || moved;
    } else if (behind >= 0) {
      moved = launch_kernel(resource, resource.candidates, candidate, behind) || moved;
    } else {
      break;
    }
  }
  return moved;
}

// Beyond the look-ahead a stream takes only the first kernel in serial order that was not launched: a later
// one would be in front of it for as long as the window in time is.
bool Engine::Loop::may_queue(Resource& resource, const StreamState& stream, std::int32_t v) {
  if (!resource.has_room(stream)) return false;
  return stream.count < resource.window || options_.dispatch == Dispatch::kRandom || is_next(resource, v);
}

// Whether no kernel ahead of `v`, which was not launched, is still to be launched.
bool Engine::Loop::is_next(Resource& resource, std::int32_t v) {
  while (state_[resource.order[resource.next]] >= State::kIssued) ++resource.next;
  return resource.order[resource.next] == v;
}

std::int32_t Engine::Loop::next_ready(Resource& resource) {
  if (!sequential()) return resource.ready.empty() ? -1 : resource.ready.top();
  std::int32_t v = -1;
  if (options_.dispatch == Dispatch::kSynchronous) {
    if (in_flight_ > 0 || serial_next_ == schedule_.serial.size()) return -1;
    v = schedule_.serial[serial_next_];
    if (&schedule_.resources[schedule_.resource_of[v]] != &resource) return -1;
  } else {
    if (resource.next == resource.order.size()) return -1;
    v = resource.order[resource.next];
  }
  return state_[v] == State::kReady || partly_launched(v) ? v : -1;
}

std::int32_t Engine::Loop::next_candidate(Resource& resource) {
  if (sequential()) {
    if (resource.next == resource.order.size()) return -1;
    const std::int32_t v = resource.order[resource.next];
    return state_[v] == State::kCandidate ? v : -1;
  }
  while (!resource.candidates.empty()) {
    const std::int32_t v = resource.candidates.top();
    if (state_[v] == State::kCandidate) return v;
    resource.candidates.pop();  // became ready meanwhile
  }
  return -1;
}

void Engine::Loop::take(Resource& resource, ReadyQueue& queue) {
  if (options_.dispatch == Dispatch::kSynchronous) {
    ++serial_next_;
  } else if (options_.dispatch == Dispatch::kFixed) {
    ++resource.next;
  } else {
    queue.pop();
  }
}

// A stream that holds one of v's unfinished predecessors and has room; -1 if there is none. On any other
// stream v would only be in the way of kernels that become ready before it.
int Engine::Loop::stream_for_candidate(Resource& resource, std::int32_t v) {
  if (resource.stream_count == 1) {
    return may_queue(resource, schedule_.streams[resource.first_stream], v) ? resource.first_stream : -1;
  }
  for (const std::int32_t p : schedule_.predecessors_of(v)) {
    if (state_[p] == State::kIssued && may_queue(resource, schedule_.streams[stream_of_[p]], v))
      return stream_of_[p];
  }
  return -1;
}

// Launches v, the first of `queue`, behind the kernels it waits for: those of its own stream by order, those
// of other streams by a wait; and the rest of its segment, if it is the first of one.
bool Engine::Loop::launch_kernel(Resource& resource, ReadyQueue& queue, std::int32_t v, int stream) {
  const StreamState& own = schedule_.streams[stream];
  const bool overtakes = !is_next(resource, v);
  take(resource, queue);
  if (schedule_.segment_of[v] >= 0) {
    return launch_segment(resource, schedule_.segments[schedule_.segment_of[v]], stream, overtakes);
  }
  try {
    for (const std::int32_t p : schedule_.predecessors_of(v)) {
      if (state_[p] != State::kIssued || stream_of_[p] == stream) continue;
      devices_[own.device]->wait(own.stream, schedule_.streams[stream_of_[p]].stream, token_of_[p]);
    }
  } catch (const std::exception& error) {
    refuse(*devices_[own.device], v, what_of(error));
    return false;
  }
  return launch_alone(resource, v, stream, overtakes);
}

// Its end is marked where an edge leaves the stream, so that the successor need not wait for what is queued
// behind v; after each half of the window in time, so that it is filled up while the other half runs; and
// where v overtakes another kernel, for which the window is the look-ahead alone.
bool Engine::Loop::launch_alone(const Resource& resource, std::int32_t v, int stream, bool overtakes) {
  StreamState& own = schedule_.streams[stream];
  ++step_.launches;
  if (!launch(v, stream)) return false;
  if (!schedule_.leaves[v] && !overtakes && 2 * own.unmarked_ns < resource.horizon_ns) return true;
  own.unmarked_ns = 0;
  try {
    devices_[own.device]->mark(own.stream);
  } catch (const std::exception& error) {
    refuse(*devices_[own.device], v, what_of(error));
  }
  return true;
}

// A kernel, or the next `bytes` of a copy.
bool Engine::Loop::launch(std::int32_t v, int index, std::int64_t bytes) {
  StreamState& stream = schedule_.streams[index];
  Device& device = *devices_[stream.device];
  const bool kernel = program_.kind[v] == Kind::kKernel;
  const Copy copy = kernel ? Copy{} : next_piece(v, bytes);
  if (handed_over_[v] == 0) note_issued(v, index);
  handed_over_[v] += bytes;
  try {
    token_of_[v] = kernel ? device.enqueue_op(stream.stream, v, program_.op[v])
                          : device.enqueue_copy(stream.stream, copy);
  } catch (const std::exception& error) {
    refuse(device, v, what_of(error));
    return false;
  }
  const std::int64_t due = kernel ? kNever : device.expected_end(stream.stream);
  stream.push({v, token_of_[v], due, schedule_.expected_ns[v], copy.last()});
  ++in_flight_;
  count_bytes(v, bytes);
  if (!kernel && device.notifies()) book_if_done(stream);
  if (!kernel || !schedule_.lookahead) return true;
  tell_of_launch(v);
  return true;
}

void Engine::Loop::note_issued(std::int32_t v, int index) {
  state_[v] = State::kIssued;
  stream_of_[v] = static_cast<std::int16_t>(index);
  step_.changes += program_.changes(v) ? 1 : 0;
  ++step_.vertices;
  if (traced_) issued_ns_[v] = now_ns();
}

// Kernels that wait for `v`, which was launched, may be queued behind it.
void Engine::Loop::tell_of_launch(std::int32_t v) {
  for (const std::int32_t s : schedule_.followers_of(v)) {
    if (schedule_.resource_of[s] == schedule_.resource_of[v] && --unissued_[s] == 0) make_candidate(s);
  }
}

void Engine::Loop::stop(DeviceFailure failure) {
  if (phase_ == Phase::kDraining || phase_ == Phase::kIdle) return;
  Unfinished unfinished;
  unfinished.in_flight_count = failure.in_flight_count;
  unfinished.in_flight = std::move(failure.in_flight);
  stop(Status::kFailed, failure.vertex, std::move(failure.message), std::move(unfinished));
  const Lock lock(caller_mutex_);
  error_.lost = failure.lost;
  error_.later = failure.later;
}

// A launch was refused. A device that has failed meanwhile says so at whatever is asked of it next: then it
// is not this vertex that is to blame.
void Engine::Loop::refuse(Device& device, std::int32_t v, std::string message) {
  for (const StreamState& stream : schedule_.streams) {
    if (devices_[stream.device].get() != &device || stream.count == 0) continue;
    try {
      // Kernels without a mark are looked at when they are asked for twice.
      device.completed(stream.stream);
      device.completed(stream.stream);
    } catch (const std::exception&) {
      continue;  // the message at hand will do
    }
  }
  if (device.failed()) {
    stop(failure_of(device));
  } else {
    stop(Status::kFailed, v, std::move(message));
  }
}

bool Engine::Loop::run_inline(Lock& lock) {
  for (Resource& resource : schedule_.resources) {
    if (resource.copy || !devices_[resource.device]->runs_inline()) continue;
    const std::int32_t v = next_ready(resource);
    if (v < 0) continue;
    take(resource, resource.ready);
    run_inline_vertex(resource, v, lock);
    return true;
  }
  return false;
}

void Engine::Loop::run_inline_vertex(Resource& resource, std::int32_t v, Lock& lock) {
  Device& device = *devices_[resource.device];
  const bool others_run = in_flight_ > 0;
  state_[v] = State::kIssued;
  stream_of_[v] = static_cast<std::int16_t>(resource.first_stream);
  ++in_flight_;
  ++step_.vertices;
  ++step_.launches;
  step_.changes += program_.changes(v) ? 1 : 0;
  if (others_run) {
    lock.unlock();
    while (pending_.exchange(false)) {
      lock.lock();
      pump();
      lock.unlock();
    }
  }
  const std::int64_t start = timed_ ? now_ns() : 0;
  std::string refused;
  try {
    device.enqueue_op(schedule_.streams[resource.first_stream].stream, v, program_.op[v]);
  } catch (const std::exception& error) {
    refused = what_of(error);
  }
  const std::int64_t end = timed_ ? now_ns() : 0;
  if (others_run) lock.lock();
  step_.op_ns += end - start;
  if (traced_) issued_ns_[v] = start;
  --in_flight_;
  if (!refused.empty()) {
    stop(Status::kFailed, v, std::move(refused));
  } else if (device.failed() && phase_ != Phase::kDraining) {
    stop(failure_of(device));
  }
  finish(v);
}

}  // namespace disco
