#include "mapped_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "device_memory.h"
#include "faults.h"
#include "journal.h"
#include "order.h"
#include "settings.h"

using namespace emulated;

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kOperatingSystem = 304;
constexpr int kRead = 1, kReadWrite = 3;
constexpr std::string_view kName = "emulated-cuda-";  // of the files, followed by the device's number

// The memory itself. It is there until the last handle and the last mapping of the last process are gone.
struct Memory {
  int file;
  std::size_t bytes;
  int device;
  bool made_here;

  ~Memory() {
    close(file);
    if (made_here) device_memory().give_back(device, bytes);
  }
};

struct Mapping {
  std::size_t bytes;
  std::shared_ptr<Memory> memory;
  int access = 0;
};

// Never destroyed: threads of streams outlive main().
std::mutex& mutex = *new std::mutex;
auto& handles = *new std::map<std::uint64_t, std::shared_ptr<Memory>>;
auto& reservations = *new std::map<const char*, std::size_t>;
auto& mappings = *new std::map<const char*, Mapping>;
std::uint64_t last_handle = 0;

bool whole(std::size_t bytes) { return bytes != 0 && bytes % DeviceMemory::grain() == 0; }

std::uint64_t add(std::shared_ptr<Memory> memory) {
  const std::lock_guard lock(mutex);
  handles[++last_handle] = std::move(memory);
  return last_handle;
}

// The bytes of `address` are `file`, or nothing where that is -1.
bool lay(char* address, std::size_t bytes, int protection, int file) {
  const int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
  return mmap(device_memory().bytes(address), bytes, protection, flags, file, 0) != MAP_FAILED;
}

std::string name_of(int file) {
  char target[256] = {};
  readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), target, sizeof target - 1);
  return target;
}

}  // namespace

extern "C" {

std::size_t emuVmGrain() { return DeviceMemory::grain(); }

int emuVmCreate(std::uint64_t* handle, std::size_t bytes, int device) {
  if (const int sticky = faults().sticky()) return sticky;
  if (!whole(bytes) || device < 0 || device >= settings().devices) return kInvalidValue;
  if (!device_memory().take(device, bytes)) return kOutOfMemory;
  const int file = memfd_create((std::string(kName) + std::to_string(device)).c_str(), MFD_CLOEXEC);
  std::shared_ptr<Memory> memory(new Memory{file, bytes, device, true});
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (fresh == MAP_FAILED) return kOutOfMemory;
  std::memset(fresh, DeviceMemory::kUnwritten, bytes);
  munmap(fresh, bytes);
  *handle = add(std::move(memory));
  journal().count("cuMemCreate " + std::to_string(device));
  return kSuccess;
}

int emuVmRelease(std::uint64_t handle) {
  const std::lock_guard lock(mutex);
  if (handles.erase(handle) == 1) return kSuccess;
  journal().complain("cuMemRelease of a handle that does not exist");
  return kInvalidValue;
}

int emuVmExport(int* file, std::uint64_t handle) {
  const std::lock_guard lock(mutex);
  const auto at = handles.find(handle);
  if (at == handles.end()) return kInvalidValue;
  *file = fcntl(at->second->file, F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? kOperatingSystem : kSuccess;
}

int emuVmImport(std::uint64_t* handle, int file) {
  if (const int sticky = faults().sticky()) return sticky;
  const std::string name = name_of(file);
  const std::size_t at = name.find(kName);
  struct stat found;
  if (at == std::string::npos || fstat(file, &found) != 0) return kInvalidValue;
  const int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return kOperatingSystem;
  const int device = std::stoi(name.substr(at + kName.size()));
  const auto bytes = static_cast<std::size_t>(found.st_size);
  *handle = add(std::shared_ptr<Memory>(new Memory{own, bytes, device, false}));
  return kSuccess;
}

int emuVmReserve(char** address, std::size_t bytes) {
  if (const int sticky = faults().sticky()) return sticky;
  if (!whole(bytes)) return kInvalidValue;
  char* found = device_memory().reserve(bytes);
  if (found == nullptr) return kOutOfMemory;
  lay(found, bytes, PROT_NONE, -1);
  const std::lock_guard lock(mutex);
  reservations[found] = bytes;
  *address = found;
  return kSuccess;
}

int emuVmFree(char* address, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto at = reservations.find(address);
  if (at == reservations.end() || at->second != bytes || mappings.contains(address)) {
    journal().complain("cuMemAddressFree of what is mapped, or is no reservation");
    return kInvalidValue;
  }
  reservations.erase(at);
  device_memory().unreserve(address, bytes);
  return kSuccess;
}

int emuVmMap(char* address, std::size_t bytes, std::uint64_t handle) {
  if (const int sticky = faults().sticky()) return sticky;
  const std::lock_guard lock(mutex);
  const auto place = reservations.find(address);
  const auto memory = handles.find(handle);
  if (place == reservations.end() || memory == handles.end() || mappings.contains(address))
    return kInvalidValue;
  if (bytes != place->second || bytes != memory->second->bytes) return kInvalidValue;
  if (!lay(address, bytes, PROT_NONE, memory->second->file)) return kOutOfMemory;
  mappings[address] = {bytes, memory->second};
  return kSuccess;
}

int emuVmSetAccess(char* address, std::size_t bytes, int device, int access) {
  if (const int sticky = faults().sticky()) return sticky;
  const std::lock_guard lock(mutex);
  const auto at = mappings.find(address);
  if (at == mappings.end() || at->second.bytes != bytes) return kInvalidValue;
  Mapping& mapping = at->second;
  if (device != mapping.memory->device || (access != 0 && access != kRead && access != kReadWrite))
    return kInvalidValue;
  const bool taken = access < mapping.access && order().in_use(address, bytes, access == kRead);
  if (taken) journal().complain("cuMemSetAccess takes access from queued work");
  const int protection = access == 0 ? PROT_NONE : PROT_READ | (access == kReadWrite ? PROT_WRITE : 0);
  // Work that was queued before does what it does, instead of ending the process before it is told.
  if (!taken && mprotect(device_memory().bytes(address), bytes, protection) != 0) return kOperatingSystem;
  mapping.access = access;
  if (access == 0) device_memory().hide(address);
  if (access != 0) device_memory().show(address, bytes, device, access == kReadWrite);
  return kSuccess;
}

int emuVmGetAccess(unsigned long long* access, int device, const char* address) {
  const std::lock_guard lock(mutex);
  const auto at = mappings.find(address);
  if (at == mappings.end()) return kInvalidValue;
  *access = at->second.memory->device == device ? static_cast<unsigned long long>(at->second.access) : 0;
  return kSuccess;
}

int emuVmUnmap(char* address, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto at = mappings.find(address);
  if (at == mappings.end() || at->second.bytes != bytes) {
    journal().complain("cuMemUnmap of what is not mapped so");
    return kInvalidValue;
  }
  if (faults().sticky() == 0 && order().in_use(address, bytes, false))
    journal().complain("cuMemUnmap of " + std::to_string(bytes) + " bytes that queued work uses");
  device_memory().hide(address);
  // Queued work finds it gone, and says so itself; a process that ends tells nobody anything.
  lay(address, bytes, PROT_READ | PROT_WRITE, -1);
  mappings.erase(at);
  journal().count("cuMemUnmap");
  return kSuccess;
}
}
