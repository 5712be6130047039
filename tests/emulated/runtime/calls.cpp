#include "calls.h"

#include <array>
#include <atomic>

namespace emulated {
namespace {

constexpr std::size_t kMostDevices = 64;
thread_local int this_device = 0;
thread_local cudaError_t this_error = cudaSuccess;
std::array<std::atomic<bool>, kMostDevices> contexts;
std::array<std::array<std::atomic<bool>, kMostDevices>, kMostDevices> peers;  // by device, by its peer

}  // namespace

int current_device() { return this_device; }

void set_current_device(int device) { this_device = device; }

void need_context() { contexts[static_cast<std::size_t>(this_device)] = true; }

bool has_context(int device) { return contexts.at(static_cast<std::size_t>(device)); }

bool enable_peer(int device, int peer) {
  return !peers.at(static_cast<std::size_t>(device)).at(static_cast<std::size_t>(peer)).exchange(true);
}

bool reaches_peer(int device, int peer) {
  return peers.at(static_cast<std::size_t>(device)).at(static_cast<std::size_t>(peer));
}

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) this_error = error;
  return error;
}

cudaError_t last_error(bool forget) {
  if (const int sticky = faults().sticky()) return static_cast<cudaError_t>(sticky);
  const cudaError_t error = this_error;
  if (forget) this_error = cudaSuccess;
  return error;
}

}  // namespace emulated
