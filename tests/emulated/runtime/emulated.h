// What the emulated CUDA runtime offers beside CUDA's own functions: to the emulated ops, and to tests
// (device.py).
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace emulated {

// Device or host memory that a piece of work reads or writes.
struct Range {
  const void* address;
  std::size_t bytes;
  bool written;
};

}  // namespace emulated

extern "C" {

// Where the bytes of a device address are kept; any other address is returned as it is.
void* emuBytes(const void* address);
// Puts a kernel on a stream (a cudaStream_t). `ranges` are all that it touches. After a fault it is dropped
// unrun.
void emuLaunch(void* stream, const std::string& name, std::function<void()> run,
               const std::vector<emulated::Range>& ranges);
// Counts something that happened.
void emuCount(const char* what);
// Books something that no correct program does; tests fail on it.
void emuComplain(const char* text);

// Counts as lines "name<tab>number", complaints as lines. Writes at most `room` bytes with the final zero and
// returns the room that all of it takes.
std::size_t emuCounts(char* text, std::size_t room);
std::size_t emuComplaints(char* text, std::size_t room);
void emuReset();  // forgets both

std::size_t emuLiveBytes(int device, int peak);  // what cudaMalloc has given and cudaFree not taken back
void emuResetPeak(int device);
int emuHasContext(int device);
// cudaHostRegister fails for more than `bytes`, or than `more` in all beside what is pinned now; 0: no limit
void emuPinLimit(std::size_t bytes, std::size_t more);

// The `nth` (from 1) piece of work whose name contains `text`, counted as streams reach it from now on, fails
// with the sticky error `code`, or hangs if `code` is 0.
void emuArm(const char* text, long nth, int code);
void emuHang(void* stream);  // the stream's next piece of work is one that does not end
int emuHanging();            // how many streams hang now
void emuRelease();           // ends all that hangs, disarms, and forgets the sticky error
}
