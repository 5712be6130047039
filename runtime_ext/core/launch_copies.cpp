// The part of Engine::Loop that launches copies. Runs with state_mutex_ held.
#include <array>
#include <exception>
#include <span>

#include "loop.h"
#include "scope.h"

namespace disco {

bool Engine::Loop::issue_copies(Resource& resource) {
  bool moved = false;
  const StreamState& stream = schedule_.streams[resource.first_stream];
  // No more than a window at a time, so that kernels of other devices do not wait for many small copies that
  // end at once; pump() comes back for the rest.
  for (int i = 0; i < resource.window && stream.count < resource.window && phase_ == Phase::kRunning; ++i) {
    const std::int32_t v = next_ready(resource);
    if (v < 0) break;
    moved = (may_join(resource, v, 0) ? launch_batch(resource, v) : launch_next_piece(resource, v)) || moved;
  }
  return moved;
}

// Of a copy that is not cut, all of it. One with pieces to come stays ready: whatever is first behind this
// one goes on.
bool Engine::Loop::launch_next_piece(Resource& resource, std::int32_t v) {
  const std::int64_t left = program_.bytes[v] - handed_over_[v];
  // The last one may be longer by half, so that none is short.
  const bool last = resource.piece == 0 || left <= resource.piece + resource.piece / 2;
  if (last) take(resource, resource.ready);
  return launch(v, resource.first_stream, last ? left : resource.piece);
}

// Traced copies go one by one, each with times of its own.
bool Engine::Loop::may_join(const Resource& resource, std::int32_t v, std::int64_t bytes) const {
  const BatchLimits& most = resource.batch;
  return most.copies > 1 && !traced_ && handed_over_[v] == 0 && program_.bytes[v] <= most.each &&
         bytes + program_.bytes[v] <= most.all;
}

// `v` and what is ready behind it, as far as all may go in one call. Nothing waits for others to become
// ready.
bool Engine::Loop::launch_batch(Resource& resource, std::int32_t v) {
  StreamState& stream = schedule_.streams[resource.first_stream];
  Device& device = *devices_[stream.device];
  const std::span<std::int32_t> vertices = stream.next_batch();
  std::array<Copy, kMostCopies> copies;
  std::size_t count = 0;
  std::int64_t bytes = 0;
  const auto most = static_cast<std::size_t>(resource.batch.copies);
  for (; v >= 0 && count < most && may_join(resource, v, bytes); v = next_ready(resource)) {
    take(resource, resource.ready);
    vertices[count] = v;
    copies[count++] = next_piece(v, program_.bytes[v]);
    bytes += program_.bytes[v];
    note_issued(v, resource.first_stream);
    handed_over_[v] = program_.bytes[v];
  }
  Token token = 0;
  std::int32_t blamed = vertices.front();
  try {
    token = count == 1 ? device.enqueue_copy(stream.stream, copies.front())
                       : device.enqueue_copies(stream.stream, {copies.data(), count}, blamed);
  } catch (const std::exception& error) {
    refuse(device, blamed, what_of(error));
    return false;
  }
  for (const std::int32_t each : vertices.first(count)) {
    token_of_[each] = token;
    count_bytes(each, program_.bytes[each]);
  }
  stream.push(
      {vertices[count - 1], token, device.expected_end(stream.stream), 0, true, vertices.first(count - 1)});
  ++in_flight_;
  if (device.notifies()) book_if_done(stream);
  return true;
}

Copy Engine::Loop::next_piece(std::int32_t v, std::int64_t bytes) const {
  const std::int64_t before = handed_over_[v];
  // A copy of nothing may have no address.
  auto* dst = before == 0 ? program_.dst[v] : static_cast<std::byte*>(program_.dst[v]) + before;
  auto* src = before == 0 ? program_.src[v] : static_cast<const std::byte*>(program_.src[v]) + before;
  return {v, dst, src, bytes, before, program_.bytes[v] - before - bytes};
}

void Engine::Loop::count_bytes(std::int32_t v, std::int64_t bytes) {
  if (program_.goes(v, Direction::kDeviceToHost)) step_.offload_bytes += bytes;
  if (program_.goes(v, Direction::kPeer)) step_.transfer_bytes += bytes;
  if (program_.goes(v, Direction::kHostToDevice) || program_.kind[v] == Kind::kInput) {
    step_.reload_bytes += bytes;
  }
}

// Of a copy that ended at its launch the device does not tell.
void Engine::Loop::book_if_done(StreamState& stream) {
  ended_at_once_ = poll_stream(stream) || ended_at_once_;
}

}  // namespace disco
