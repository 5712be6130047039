// Memory of the emulated devices. An address that a program gets can be neither read nor written by the host,
// as on a machine with a GPU; its bytes are kept elsewhere.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace emulated {

class DeviceMemory {
 public:
  static constexpr int kUnwritten = 0xFF;  // fresh memory: NaN in every floating-point type
  static constexpr int kFreed = 0xFB;      // freed memory: huge negative numbers

  DeviceMemory();

  void* allocate(int device, std::size_t wanted);  // nullptr when the device is full
  bool release(void* block);                       // false when there is no such block
  bool owns(const void* address) const;            // whether it is a device address at all
  char* bytes(const void* address) const;          // where the bytes are; host addresses stay as they are
  bool in_block(const void* address, std::size_t bytes) const;
  int device_of(const void* address) const;  // -1 outside all blocks
  std::size_t live(int device) const;
  std::size_t peak(int device) const;
  void reset_peak(int device);

  // Parts of the same range of addresses for memory that is created apart from its address (mapped_memory.h).
  char* reserve(std::size_t bytes);  // a multiple of grain(); nullptr when no address is left
  void unreserve(char* address, std::size_t bytes);
  bool take(int device, std::size_t bytes);  // false when the device is full
  void give_back(int device, std::size_t bytes);
  void show(char* address, std::size_t bytes, int device, bool writable);  // kernels may use it from now on
  void hide(char* address);
  bool writable(const void* address) const;  // true outside all blocks
  static std::size_t grain();

 private:
  struct Block {
    std::size_t bytes;
    int device;
    bool mapped = false;  // shown by show(), not given by allocate()
    bool writable = true;
  };
  using Blocks = std::map<const char*, Block>;
  Blocks::const_iterator find(const void* address) const;  // the block that holds it, or the end

  mutable std::mutex mutex_;
  char* addresses_;  // PROT_NONE for ever
  char* store_;
  std::size_t used_ = 0;  // of both ranges
  Blocks blocks_;
  std::multimap<std::size_t, char*> holes_;       // released blocks by size
  std::multimap<std::size_t, char*> reservable_;  // addresses that were reserved once, by size
  std::vector<std::size_t> live_, peak_;          // by device
};

DeviceMemory& device_memory();

}  // namespace emulated
