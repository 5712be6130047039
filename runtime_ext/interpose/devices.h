// A device's number in this process and on the machine.
#pragma once
#include <cstdint>

namespace disco::interpose {

// What the store calls the device that CUDA calls `device` in this process: CUDA_VISIBLE_DEVICES, if it is a
// list of numbers, is followed as CUDA followed it at its start.
int store_device(int device);

// Read CUDA_VISIBLE_DEVICES, once. Not before the program's first call of CUDA: scripts set it until then.
void read_visible_devices();

}  // namespace disco::interpose
