#include "order.h"

#include <algorithm>

#include "journal.h"

namespace emulated {
namespace {

constexpr std::size_t kOpenKept = 20000;

void raise_to(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

std::uint64_t entry(const Clock& clock, int stream) {
  const auto at = static_cast<std::size_t>(stream);
  return at < clock.size() ? clock[at] : 0;
}

const char* verb(bool written) { return written ? " writes" : " reads"; }

}  // namespace

Clock& Order::clock_of(int stream) {
  const auto at = static_cast<std::size_t>(stream);
  if (at >= streams_.size()) streams_.resize(at + 1);
  Clock& clock = streams_[at];
  raise_to(clock, host_);
  if (at >= clock.size()) clock.resize(at + 1);
  return clock;
}

void Order::issue(int stream, const std::string& name, const std::vector<Range>& ranges) {
  const std::lock_guard lock(mutex_);
  Clock& clock = clock_of(stream);
  ++clock[static_cast<std::size_t>(stream)];
  for (const Range& range : ranges) {
    if (range.bytes != 0) check(stream, name, range);
  }
  if (open_.size() > kOpenKept) {
    open_.erase(open_.begin(), open_.begin() + kOpenKept / 2);
    journal().count("accesses no longer watched for races", kOpenKept / 2);
  }
}

void Order::check(int stream, const std::string& name, const Range& range) {
  const auto begin = reinterpret_cast<std::uintptr_t>(range.address);
  const std::uintptr_t end = begin + range.bytes;
  const Clock& clock = streams_[static_cast<std::size_t>(stream)];
  const Access access{begin, end, stream, entry(clock, stream), range.written, name};
  bool told = false, replaced = false;
  for (Access& other : open_) {
    if (other.end <= begin || other.begin >= end) continue;
    if (other.stream == stream) {
      // Whatever comes after the newer of two accesses of one stream comes after the older too.
      if (other.begin == begin && other.end == end && other.written == range.written) {
        other = access;
        replaced = true;
      }
      continue;
    }
    if (told || !(other.written || range.written) || entry(clock, other.stream) >= other.number) continue;
    journal().complain("RACE: " + name + verb(range.written) + " on stream " + std::to_string(stream) +
                       " what " + other.name + verb(other.written) + " on stream " +
                       std::to_string(other.stream) + ", " + std::to_string(range.bytes) + " bytes at " +
                       std::to_string(begin));
    told = true;
  }
  if (!replaced) open_.push_back(access);
}

Clock Order::now(int stream) {
  const std::lock_guard lock(mutex_);
  return clock_of(stream);
}

void Order::follow(int stream, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  raise_to(clock_of(stream), clock);
}

void Order::host_learns(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  raise_to(host_, clock);
  std::erase_if(open_, [&](const Access& access) { return entry(host_, access.stream) >= access.number; });
}

bool Order::in_use(const void* address, std::size_t bytes, bool only_written) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  return std::any_of(open_.begin(), open_.end(), [&](const Access& access) {
    return access.begin < begin + bytes && begin < access.end && (access.written || !only_written);
  });
}

Order& order() {
  static auto* the = new Order;
  return *the;
}

}  // namespace emulated
