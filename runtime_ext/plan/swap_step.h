// A step, what it costs, and what is asked of it, as disco_accel/plan/timed/swap_schedule.py hands them
// over.

#pragma once

#include <cstdint>

namespace disco_plan {

using Int = std::int64_t;

struct Row {
  const Int* first;
  const Int* last;

  const Int* begin() const { return first; }
  const Int* end() const { return last; }
};

// Lists one behind the other, list i from `first[i]` on.
struct Lists {
  const Int* first;
  const Int* items;

  Row operator[](Int i) const { return {items + first[i], items + first[i + 1]}; }
};

struct Array {
  Int count;
  const Int* items;

  const Int* begin() const { return items; }
  const Int* end() const { return items + count; }
};

// swap_schedule.py says what these are. Devices are numbered from 0 on; of `pinned` and `unpromised`
// each has a row of one more than there are positions.
struct Step {
  Int positions, vertices, devices, buffers;
  const Int *vertex, *device, *kind;
  Lists waits, touched, reads, read_before, made, changed, written;
  const Int *home, *block, *size, *evictable_from, *begin, *starts_on_host, *may_be_resident, *survives;
  Lists uses;
};

struct Costs {
  const double *seconds, *load, *offload;
  double load_latency;
};

struct Question {
  const Int *capacity, *pinned, *unpromised;
  Array at_start, at_end, permanent, kept;
  Int boundary;
  Int repeats;
};

// `infeasible`: the position at which memory is too small, or -1. The caller gives memory for `room` events,
// two numbers each, and for the buffers at the boundary.
struct Answer {
  Int infeasible;
  double seconds;
  Int reloaded, room, events, at_boundary;
  Int *event, *boundary;
};

}  // namespace disco_plan
