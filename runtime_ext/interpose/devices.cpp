#include "devices.h"

#include <atomic>
#include <cstdlib>

#include "channel.h"

namespace disco::interpose {
namespace {

constexpr int kMachineDevices = 64;  // of which the wire has numbers

std::atomic<bool> known{false};
std::atomic<int> numbers[kDevices];
std::atomic<int> listed{0};

}  // namespace

void read_visible_devices() {
  if (known.exchange(true)) return;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  while (text != nullptr && *text != 0 && count < kDevices) {
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    while (*end == ' ') ++end;
    // Names of devices (GPU-..., MIG-...) can't be told apart here.
    if (end == text || (*end != 0 && *end != ',') || number < 0 || number >= kMachineDevices) break;
    numbers[count++].store(static_cast<int>(number), std::memory_order_relaxed);
    text = *end == ',' ? end + 1 : end;
  }
  listed.store(count, std::memory_order_release);
}

int store_device(int device) {
  return device < listed.load(std::memory_order_acquire) ? numbers[device].load(std::memory_order_relaxed)
                                                         : device;
}

}  // namespace disco::interpose
