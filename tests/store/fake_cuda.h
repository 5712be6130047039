// A CUDA of two devices for tests, whose memory is numbers in a file that processes share: the layout of that
// file.
#pragma once
#include <cstdint>

namespace fake {

constexpr int kDevices = 2;

struct Device {
  std::int64_t total;
  std::int64_t used;   // by all programs, and by the test itself
  std::int64_t fails;  // allocations that found no room
};

struct Machine {
  Device devices[kDevices];
};

}  // namespace fake
