// The engine's options as Python gives them, and the numbers that stand for the same thing on both sides.
#pragma once

#include <ATen/core/Dict.h>

#include <cstdint>
#include <string>

#include "../core/engine.h"
#include "../core/host_device.h"

namespace disco {

// Columns of the int64 tables that cross the border.
constexpr std::int64_t kVertexColumns = 9;  // kind, device, lane, op, dst, src, bytes, ns, flags
constexpr std::int64_t kEdgeColumns = 2;    // from, to
// Storage that is external, a transfer that reads or writes it, whether it writes.
constexpr std::int64_t kCopiedColumns = 3;
constexpr std::int64_t kEventColumns = 8;  // vertex, device, stream, issue, start, end, bytes, ready

struct Settings {
  EngineOptions engine;
  HostDeviceOptions host;
  std::int64_t graph_bytes = 0;  // of each GPU, for engines with the same arena
  int compute_threads = 1;
  int host_threads = 1;  // of a device in host memory beside the run's own
};

// Throws std::out_of_range for an option that is not given.
Settings read_settings(const c10::Dict<std::string, double>& values);

// All numbers that disco_accel/native/engine_numbers.py has too, by the names it gives them. Loading compares
// them.
c10::Dict<std::string, std::int64_t> engine_numbers();

}  // namespace disco
