// Which pieces of work come before which, by vector clocks: one entry for each stream, one clock for the
// host, all of whose threads count as one. Two accesses to the same bytes, at least one a write, that nothing
// orders are a race.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "emulated.h"

namespace emulated {

using Clock = std::vector<std::uint64_t>;  // by stream: how many of its pieces of work come before

class Order {
 public:
  // Books the next piece of work of `stream` and complains about races with what is booked.
  void issue(int stream, const std::string& name, const std::vector<Range>& ranges);
  // What comes before anything that would follow on `stream` now.
  Clock now(int stream);
  // All that is issued to `stream` from now on comes after `clock`.
  void follow(int stream, const Clock& clock);
  // Whether queued work that the host does not know to be done uses, or only writes, some of these bytes.
  bool in_use(const void* begin, std::size_t bytes, bool only_written);
  // The host has seen that all before `clock` is done: what it issues from now on comes after that.
  void host_learns(const Clock& clock);

 private:
  struct Access {
    std::uintptr_t begin, end;
    int stream;
    std::uint64_t number;
    bool written;
    std::string name;
  };
  Clock& clock_of(int stream);
  void check(int stream, const std::string& name, const Range& range);

  std::mutex mutex_;
  Clock host_;
  std::vector<Clock> streams_;
  std::vector<Access> open_;  // what the host does not know to be done
};

Order& order();

}  // namespace emulated
