// A step simulated in time with a counter of bytes, as a library without PyTorch; disco_accel/plan/timed/
// swap_schedule.py says what it does and why. tests/support/oracles/naive_swaps.py gives the same schedule,
// to the last bit of its seconds: sums and maxima alone, in the same order.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "swap_step.h"

namespace {

using disco_plan::Answer;
using disco_plan::Costs;
using disco_plan::Int;
using disco_plan::Question;
using disco_plan::Step;

constexpr Int kNever = Int{1} << 60;
constexpr Int kNone = -2;
constexpr double kAlways = std::numeric_limits<double>::infinity();

enum Event : Int { kRun, kReload, kEvict, kOffload, kRelease };
enum Kind : Int { kKernel, kFromHost, kToHost, kBetween };

struct Infeasible {
  Int position;
};

// Minus the next use, and a buffer.
using Idle = std::pair<Int, Int>;

struct Device {
  Int number, capacity;
  const Int* pinned;
  std::vector<Int> unpromised;
  std::vector<std::pair<Int, Int>> uses;
  std::vector<Int> deferred;
  std::size_t next_use = 0;
  Int short_at = 0, position = -1, running = -1;
  double link_free = 0.0, compute_free = 0.0, d2h_free = 0.0, p2p_free = 0.0;
  // The byte counter.
  Int bytes = 0, at = 0;
  std::priority_queue<Idle, std::vector<Idle>, std::greater<>> idle;
};

class Scheduler {
 public:
  Scheduler(const Step& step, const Costs& costs, const Question& question, Answer& answer)
      : step_(step),
        costs_(costs),
        question_(question),
        answer_(answer),
        resident_(step.buffers),
        permanent_(step.buffers),
        held_until_(step.buffers, -1),
        uses_done_(step.buffers),
        on_host_at_(step.buffers),
        arrival_(step.buffers),
        uses_(step.buffers),
        reserved_(step.buffers),
        evictable_at_(step.positions + 1),
        ready_(step.vertices) {
    for (const Int i : question.permanent) permanent_[i] = resident_[i] = 1;
    for (Int i = 0; i < step.buffers; ++i) {
      on_host_at_[i] = step.starts_on_host[i] ? 0.0 : kAlways;
      if (!permanent_[i]) uses_[i].assign(step.uses[i].begin(), step.uses[i].end());
      if (!step.starts_on_host[i]) evictable_at_[step.evictable_from[i]].push_back(i);
    }
    for (const Int i : question.at_end) uses_[i].push_back(step.positions);
    for (Int number = 0; number < step.devices; ++number) add_device(number);
    for (const Int i : question.at_start) {
      resident_[i] = 1;
      device_of(i).bytes += step.block[i];
      release(i);
    }
    reserve();
  }

  void run() {
    const Int end = step_.positions;
    for (Int position = 0; position < end; ++position) {
      if (position == question_.boundary) note_boundary();
      execute(position);
    }
    for (Device& device : devices_) {
      release_reads(device);
      advance(device, end);
      device.compute_free = make_room(device, end, 0, device.compute_free);
      provide_now(device);
    }
    for (const Device& device : devices_) answer_.seconds = std::max(answer_.seconds, device.d2h_free);
  }

 private:
  void add_device(Int number) {
    Device& device = devices_.emplace_back();
    const Int row = number * (step_.positions + 1);
    device.number = number;
    device.capacity = question_.capacity[number];
    device.pinned = question_.pinned + row;
    device.unpromised.assign(question_.unpromised + row, question_.unpromised + row + step_.positions + 1);
    std::vector<Int> rank(step_.buffers);
    for (Int order = 0; order < question_.at_end.count; ++order) rank[question_.at_end.items[order]] = order;
    for (Int i = 0; i < step_.buffers; ++i) {
      if (step_.home[i] == number) {
        for (const Int use : uses_[i]) device.uses.emplace_back(use, i);
      }
    }
    std::sort(device.uses.begin(), device.uses.end(), [&](const auto& a, const auto& b) {
      if (a.first != b.first) return a.first < b.first;
      const bool ranked = a.first == step_.positions && rank[a.second] != rank[b.second];
      return ranked ? rank[a.second] < rank[b.second] : a.second < b.second;
    });
  }

  void reserve() {
    std::vector<std::uint8_t> at_start(step_.buffers);
    for (const Int i : question_.at_start) at_start[i] = 1;
    for (Int number = 0; number < question_.kept.count; ++number) {
      const Int i = question_.kept.items[2 * number], last = question_.kept.items[2 * number + 1];
      const auto use = std::upper_bound(uses_[i].begin(), uses_[i].end(), last);
      if (use == uses_[i].end() || (last == -1 && !at_start[i])) continue;
      auto& unpromised = device_of(i).unpromised;
      const auto begin = unpromised.begin() + last + 1, end = unpromised.begin() + *use + 1;
      if (*std::min_element(begin, end) < step_.block[i]) continue;
      for (auto at = begin; at != end; ++at) *at -= step_.block[i];
      reserved_[i].emplace_back(last, *use);
    }
  }

  Device& device_of(Int buffer) { return devices_[step_.home[buffer]]; }

  Int next_use(Int buffer) const {
    const auto& uses = uses_[buffer];
    return uses_done_[buffer] < uses.size() ? uses[uses_done_[buffer]] : kNever;
  }

  void note(Event event, Int subject) {
    if (answer_.events < answer_.room) {
      answer_.event[2 * answer_.events] = event;
      answer_.event[2 * answer_.events + 1] = subject;
    }
    ++answer_.events;
    if (event == kReload) {
      last_loaded_ = subject;
    } else if (event != kEvict) {
      last_loaded_ = kNone;
    }
  }

  void note_boundary() {
    std::vector<Int> there;
    for (Int i = 0; i < step_.buffers; ++i) {
      if (step_.may_be_resident[i] && !permanent_[i] && resident_[i]) there.push_back(i);
    }
    std::stable_sort(there.begin(), there.end(), [&](Int a, Int b) { return next_use(a) < next_use(b); });
    std::copy(there.begin(), there.end(), answer_.boundary);
    answer_.at_boundary = std::ssize(there);
  }

  void execute(Int position) {
    Device& device = devices_[step_.device[position]];
    double begin = 0.0;
    for (const Int source : step_.waits[position]) begin = std::max(begin, ready_[source]);
    for (const Int number : step_.touched[position]) {
      Device& each = devices_[number];
      release_reads(each);
      advance(each, position);
      begin = std::max(begin, make_room(each, position, 0, begin));
      load_deferred(each);
      provide_now(each);
    }
    for (const Int buffer : step_.reads[position]) begin = std::max(begin, arrival_[buffer]);
    for (const Int buffer : step_.read_before[position]) begin = std::max(begin, arrival_[buffer]);
    const Int kind = step_.kind[position];
    double& free = lane(kind, device, devices_[*step_.touched[position].begin()]);
    begin = std::max(begin, free);
    for (const Int buffer : step_.made[position]) begin = produce(device, buffer, begin);
    if (kind == kKernel) prefetch(device, begin);
    note(kRun, position);
    const double end = begin + costs_.seconds[position];
    ready_[step_.vertex[position]] = end;
    answer_.seconds = std::max(answer_.seconds, end);
    for (const Int number : step_.touched[position]) devices_[number].running = position;
    free = end;
    for (const Int buffer : step_.written[position]) on_host_at_[buffer] = end;
    for (const Int buffer : step_.made[position]) offload(buffer, end);
    for (const Int buffer : step_.changed[position]) {
      if (!permanent_[buffer] || !question_.repeats) offload(buffer, end);
    }
    prefetch(device, device.compute_free);
  }

  // When what a vertex of this kind occupies is free.
  static double& lane(Int kind, Device& device, Device& sender) {
    if (kind == kKernel) return device.compute_free;
    if (kind == kFromHost) return device.link_free;
    return kind == kToHost ? sender.d2h_free : sender.p2p_free;
  }

  // Take the bytes of what a vertex, or the caller, writes; return when it may.
  double produce(Device& device, Int buffer, double begin) {
    begin = allocate(device, buffer, begin);
    resident_[buffer] = 1;
    held_until_[buffer] = std::max(held_until_[buffer], step_.evictable_from[buffer] - 1);
    return begin;
  }

  void offload(Int buffer, double ready) {
    Device& device = device_of(buffer);
    device.d2h_free = std::max(device.d2h_free, ready) + costs_.offload[buffer];
    on_host_at_[buffer] = device.d2h_free;
    note(kOffload, buffer);
  }

  void release_reads(Device& device) {
    const Int last = device.running;
    if (last < 0) return;
    note(kRelease, device.number);
    for (const Int i : step_.reads[last]) {
      if (step_.home[i] != device.number || permanent_[i] || last < step_.evictable_from[i]) continue;
      while (next_use(i) <= last) ++uses_done_[i];
      if (held_until_[i] <= last && !stays(i)) release_or_evict(i);
    }
    device.running = -1;
  }

  bool stays(Int buffer) {
    for (const auto& [last, use] : reserved_[buffer]) {
      if (last == held_until_[buffer]) {
        held_until_[buffer] = use;
        return true;
      }
    }
    return false;
  }

  void release_or_evict(Int buffer) {
    const bool done = next_use(buffer) == kNever && !step_.may_be_resident[buffer];
    if (done && (step_.starts_on_host[buffer] || !step_.survives[buffer])) {
      evict(buffer);
    } else {
      release(buffer);
    }
  }

  void release(Int buffer) { device_of(buffer).idle.emplace(-next_use(buffer), buffer); }

  void evict(Int buffer) {
    resident_[buffer] = 0;
    device_of(buffer).bytes -= step_.block[buffer];
    note(kEvict, buffer);
  }

  void advance(Device& device, Int position) {
    for (Int reached = device.position + 1; reached <= position; ++reached) {
      for (const Int buffer : evictable_at_[reached]) {
        const bool idle = step_.home[buffer] == device.number && held_until_[buffer] < reached;
        if (idle && !stays(buffer)) release_or_evict(buffer);
      }
    }
    device.position = position;
  }

  void load_deferred(Device& device) {
    bool any = false;
    for (const Int buffer : device.deferred) {
      if (step_.evictable_from[buffer] > device.position) continue;
      any = true;
      const double begin = std::max({device.link_free, on_host_at_[buffer], device.compute_free});
      reload(device, buffer, allocate(device, buffer, begin));
    }
    if (any) std::erase_if(device.deferred, [&](Int buffer) { return resident_[buffer]; });
  }

  void provide_now(Device& device) {
    while (device.next_use < device.uses.size() && device.uses[device.next_use].first <= device.position) {
      if (!want(device, kAlways)) throw Infeasible{device.position};
    }
  }

  void prefetch(Device& device, double until) {
    while (device.next_use < device.uses.size() && want(device, until)) {
    }
    device.link_free = std::max(device.link_free, until);
  }

  bool want(Device& device, double until) {
    const auto [use, i] = device.uses[device.next_use];
    const Int block = step_.block[i], held = held_until_[i];
    if (held >= use || use < device.position || (resident_[i] && stays(i))) {
      ++device.next_use;
      return true;
    }
    const bool too_early = device.position < step_.evictable_from[i];
    const Int begin = std::max({device.position, step_.evictable_from[i], held + 1});
    std::vector<Int>& unpromised = device.unpromised;
    if (begin <= device.short_at && device.short_at <= use && unpromised[device.short_at] < block)
      return false;
    const auto from = unpromised.begin() + begin, to = unpromised.begin() + use + 1;
    const auto fewest = std::min_element(from, to);
    if (*fewest < block) {
      device.short_at = fewest - unpromised.begin();
      return false;
    }
    if (!resident_[i] && too_early && step_.starts_on_host[i] && held < 0) device.deferred.push_back(i);
    if (!resident_[i] && !too_early) {
      if (device.link_free >= until) return false;
      reload(device, i, allocate(device, i, std::max(device.link_free, on_host_at_[i])));
    }
    for (auto at = from; at != to; ++at) *at -= block;
    held_until_[i] = use;
    ++device.next_use;
    return true;
  }

  void reload(Device& device, Int buffer, double begin) {
    double seconds = costs_.load[buffer];
    // One copy brings it with the one that was loaded last, behind which it lies in its value.
    const bool continues = step_.begin[buffer] && last_loaded_ == buffer - 1;
    if (begin <= device.link_free && continues) seconds -= costs_.load_latency;
    device.link_free = begin + seconds;
    arrival_[buffer] = device.link_free;
    answer_.seconds = std::max(answer_.seconds, device.link_free);
    resident_[buffer] = 1;
    answer_.reloaded += step_.size[buffer];
    note(kReload, buffer);
  }

  double allocate(Device& device, Int buffer, double begin) {
    begin = make_room(device, device.at, step_.block[buffer], begin);
    device.bytes += step_.block[buffer];
    return begin;
  }

  double make_room(Device& device, Int position, Int block, double begin) {
    device.at = position;
    Int missing = device.pinned[position] + device.bytes + block - device.capacity;
    std::vector<Idle> still_offloading;
    while (missing > 0) {
      Int buffer;
      if (!device.idle.empty()) {
        const Idle entry = device.idle.top();
        device.idle.pop();
        buffer = entry.second;
        if (!resident_[buffer] || held_until_[buffer] >= position || -entry.first != next_use(buffer))
          continue;
        if (on_host_at_[buffer] > begin) {
          still_offloading.push_back(entry);
          continue;
        }
      } else if (!still_offloading.empty()) {
        const auto first = std::min_element(
            still_offloading.begin(), still_offloading.end(), [&](const Idle& a, const Idle& b) {
              return std::pair(on_host_at_[a.second], a) < std::pair(on_host_at_[b.second], b);
            });
        buffer = first->second;
        still_offloading.erase(first);
        begin = std::max(begin, on_host_at_[buffer]);
      } else {
        throw Infeasible{position};
      }
      missing -= step_.block[buffer];
      evict(buffer);
    }
    for (const Idle& entry : still_offloading) device.idle.push(entry);
    return begin;
  }

  const Step& step_;
  const Costs& costs_;
  const Question& question_;
  Answer& answer_;
  std::vector<std::uint8_t> resident_, permanent_;
  std::vector<Int> held_until_;
  std::vector<std::size_t> uses_done_;
  std::vector<double> on_host_at_, arrival_;
  std::vector<std::vector<Int>> uses_;
  // Of each buffer: positions behind which it stays, each with the next use, up to which its bytes are
  // reserved.
  std::vector<std::vector<std::pair<Int, Int>>> reserved_;
  std::vector<std::vector<Int>> evictable_at_;
  std::vector<double> ready_;
  std::vector<Device> devices_;
  // The last of the events, evictions aside, if it is a reload.
  Int last_loaded_ = kNone;
};

}  // namespace

extern "C" {

void disco_swaps(const Step* step, const Costs* costs, const Question* question, Answer* answer) {
  answer->infeasible = -1;
  answer->seconds = 0.0;
  answer->reloaded = answer->events = answer->at_boundary = 0;
  try {
    Scheduler(*step, *costs, *question, *answer).run();
  } catch (const Infeasible& infeasible) {
    answer->infeasible = infeasible.position;
  }
}
}
