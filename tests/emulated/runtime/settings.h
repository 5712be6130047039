// What the environment says about the emulated devices; read once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulated {

// What becomes of a copy from a device straight to another: there is no such copy, other bytes arrive, or it
// is right.
enum class Peers { kNone, kWrong, kRight };

struct Settings {
  int devices;               // EMULATED_DEVICES
  std::size_t device_bytes;  // EMULATED_GIB
  double jitter_us;          // EMULATED_JITTER_US: each piece of work starts late by up to so much
  std::uint64_t seed;        // EMULATED_SEED
  double link_gb_s;          // EMULATED_LINK_GB_S, each direction; 0: as fast as memory
  Peers peers;               // EMULATED_PEERS: none, wrong; unset: right
  int cudart;                // EMULATED_CUDART: what cudaRuntimeGetVersion says; unset: 13000
  bool log;                  // EMULATED_LOG: every piece of work, on stderr
  bool backtrace;            // EMULATED_BACKTRACE: complaints say from where
};

const Settings& settings();

}  // namespace emulated
