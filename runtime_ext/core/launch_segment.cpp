// The part of Engine::Loop that launches segments. Runs with state_mutex_ held.
#include <algorithm>
#include <exception>
#include <span>

#include "loop.h"
#include "scope.h"

namespace disco {

// Between steps, without the kernels that were barred.
void Engine::Loop::cut_segments() {
  schedule_.cut_segments(program_);
  for (auto& device : devices_) device->keep_graphs(schedule_.segments);
  barred_ = false;
}

// As one if the device can. Else one by one: all that any of them waits for is done, or ahead in the stream.
bool Engine::Loop::launch_segment(const Resource& resource, const Segment& segment, int stream,
                                  bool overtakes) {
  StreamState& own = schedule_.streams[stream];
  Device& device = *devices_[own.device];
  Repeated repeated;
  try {
    repeated = device.repeat(own.stream, segment);
  } catch (const std::exception& error) {
    refuse(device, segment.vertices.front(), what_of(error));
    return false;
  }
  for (const std::int32_t v : repeated.barred) schedule_.bar(v);
  barred_ = barred_ || !repeated.barred.empty();
  if (repeated.first == 0) {
    return std::all_of(segment.vertices.begin(), segment.vertices.end(),
                       [&](std::int32_t v) { return launch_alone(resource, v, stream, overtakes); });
  }
  ++step_.launches;
  std::size_t begin = 0;
  for (std::size_t part = 0; part < segment.ends.size(); ++part) {
    const auto end = static_cast<std::size_t>(segment.ends[part]);
    const std::span<const std::int32_t> kernels(segment.vertices.data() + begin, end - begin);
    std::int64_t ns = 0;
    for (const std::int32_t v : kernels) {
      state_[v] = State::kIssued;
      stream_of_[v] = static_cast<std::int16_t>(stream);
      token_of_[v] = repeated.first + part;
      step_.changes += program_.changes(v) ? 1 : 0;
      ++step_.vertices;
      ns += schedule_.expected_ns[v];
      tell_of_launch(v);
    }
    own.push({kernels.back(), repeated.first + part, kNever, ns, true, kernels.first(kernels.size() - 1)});
    ++in_flight_;
    begin = end;
  }
  own.unmarked_ns = 0;
  return true;
}

}  // namespace disco
