// Program: a MemGraph lowered to flat arrays, ready for the engine. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace disco {

// What a vertex does when it runs. The values are those of VertexKind in disco_accel/graph/taskgraph.py.
enum class Kind : std::uint8_t { kInput = 0, kKernel = 1, kCopy = 2 };

// The lane of a copy, by the pair of spaces that it goes between. A device whose arena lies in host memory
// counts as the host.
enum class Direction : std::uint8_t { kHostToDevice = 0, kDeviceToHost = 1, kPeer = 2 };

// Bits of Program::flags.
enum Flag : std::uint8_t {
  kLate = 1,     // input that arrives during the step, at Engine::deliver()
  kOut = 2,      // Engine::wait_out() returns when all of these have finished
  kChanges = 4,  // kernel or copy to the host that changes a state: counted in StepCounters::changes
};

// One vertex as handed to ProgramBuilder::add; fields that a kind does not use keep their defaults.
struct VertexDesc {
  Kind kind = Kind::kKernel;
  std::int32_t device = 0;    // index into the engine's devices; a copy runs on a lane of this device: the
                              // one that it writes to from the host, else the one that it reads
  std::int32_t op = -1;       // kernel: index handed to OpRunner::run
  void* dst = nullptr;        // copy: first byte written. Input: see Program
  const void* src = nullptr;  // copy: first byte read
  std::int64_t bytes = 0;     // copy: length
  std::uint8_t flags = 0;     // Flag bits
  Direction direction = Direction::kHostToDevice;  // copy
  std::int64_t ns = 0;                             // kernel: how long it takes, as far as the plan knows
};

// A stretch of memory.
struct Range {
  const void* base = nullptr;
  std::int64_t bytes = 0;
};

// Stretches of memory that are looked up by address.
class Ranges {
 public:
  // Whether stretches that lie one behind the other count as one.
  enum class Adjacent : std::uint8_t { kJoined, kApart };

  explicit Ranges(std::vector<Range> ranges, Adjacent adjacent = Adjacent::kJoined);
  // Whether all of [ptr, ptr + bytes) lies in them. True of no bytes at all, wherever they are; no sum is
  // formed that could overflow.
  bool hold(const void* ptr, std::int64_t bytes) const;

 private:
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans_;  // base and size, disjoint and ascending
};

// All memory that a run registers, and so all that its copies may touch.
struct Memory {
  std::vector<Range> arenas;  // of each device
  Range host;                 // copies to the host write there, copies from it read there
  std::vector<Range> clean;   // on the host: copies and residents are read there, nothing is written
  // On the host, the home of each value that lives over steps and changes: copies and residents are read
  // there, copies that change a state are written there, each within one home.
  std::vector<Range> states;

  // Empty if no home shares a byte with any other range, else one line.
  std::string check_states() const;
};

// Flat arrays, one entry per vertex in serial order: a vertex's index is its priority (smaller runs first).
//
// An input is in place when a step begins. One that has `bytes` > 0 is a *resident*: its bytes are copied
// from `src` (host) to `dst` (arena) by the engine before the first step, and again before the next step
// after Engine::invalidate(), after a failure and after an abort; nothing else of that step starts before
// these copies end.
struct Program {
  std::vector<Kind> kind;
  std::vector<std::int32_t> device;
  std::vector<std::int32_t> op;
  std::vector<void*> dst;
  std::vector<const void*> src;
  std::vector<std::int64_t> bytes;
  std::vector<std::int64_t> ns;
  std::vector<std::uint8_t> flags;
  std::vector<Direction> direction;
  // Edges in compressed rows: the successors of v are successors[successor_begin[v] .. successor_begin[v +
  // 1]).
  std::vector<std::int32_t> successor_begin;
  std::vector<std::int32_t> successors;
  std::vector<std::int32_t> in_degree;  // number of edges into v, repeats counted

  std::int32_t size() const { return static_cast<std::int32_t>(kind.size()); }
  bool late(std::int32_t v) const { return (flags[v] & kLate) != 0; }
  bool out(std::int32_t v) const { return (flags[v] & kOut) != 0; }
  bool copies(std::int32_t v) const { return kind[v] == Kind::kCopy; }
  bool changes(std::int32_t v) const { return (flags[v] & kChanges) != 0; }
  bool goes(std::int32_t v, Direction way) const { return copies(v) && direction[v] == way; }
  std::span<const std::int32_t> successors_of(std::int32_t v) const {
    return {successors.data() + successor_begin[v], successors.data() + successor_begin[v + 1]};
  }

  // Empty if the program can be run on `devices` devices, else one line that names the first vertex at fault.
  // Checks: array lengths; every edge inside range, forward in serial order (hence acyclic) and not into an
  // input; devices in range; kernels have op >= 0; copies have pointers if bytes > 0; only inputs are late
  // and none of them is resident; only kernels and copies to the host change states; no out vertex waits,
  // however indirectly, for a late one (wait_out would never return).
  std::string validate(int devices) const;
  // The same for memory: every byte that a copy or a resident reads or writes lies where it may. A copy from
  // the host reads the host's arena, clean memory, a home or an arena and writes its device's arena; one to
  // the host goes from its device's arena to the host's, to an arena or, if it changes a state, to a home;
  // one between devices from an arena to an arena. A resident reads clean memory or a home. No home shares
  // memory with anything else.
  std::string validate_memory(const Memory& memory) const;
};

// Vertices in serial order plus edges in any order, turned into a Program. Duplicate edges are dropped.
class ProgramBuilder {
 public:
  void reserve(std::size_t vertices, std::size_t edges);
  std::int32_t add(const VertexDesc& vertex);  // returns its index
  void edge(std::int32_t from, std::int32_t to) { edges_.emplace_back(from, to); }
  // Throws std::invalid_argument if an edge names a vertex that was not added.
  Program build() &&;

 private:
  Program program_;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges_;
};

}  // namespace disco
