// Stands for libcuda.so.1: the driver's calls that allocate, on the devices of the file FAKE_CUDA_MACHINE.
// Addresses are numbers that are used again at once, as they may be on a GPU, and freed or foreign ones are
// refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "fake_cuda.h"

namespace {

using Address = unsigned long long;
constexpr int kOk = 0, kInvalid = 1, kNoMemory = 2, kNotFound = 500;

struct Pool {
  int device;
  std::int64_t reserved = 0, used = 0, keep = 0;
};
struct Block {
  int device;
  std::int64_t bytes;
  Pool* pool;
};
struct Physical {
  int device;
  std::int64_t bytes;
  int handles, mappings;
};

std::recursive_mutex lock;
fake::Machine* machine = nullptr;
std::map<Address, Block> blocks;
std::map<Address, Physical> physical;
std::map<Address, std::pair<Address, std::size_t>> mappings;
std::set<Address> free_numbers;
Address next_number = 1;
Pool default_pools[fake::kDevices] = {{0}, {1}};
thread_local int current = 0;
thread_local bool in_capture = false;
char primary[fake::kDevices];
long calls = 0;

fake::Device& device(int index) {
  if (machine == nullptr) {
    const int file = open(std::getenv("FAKE_CUDA_MACHINE"), O_RDWR | O_CLOEXEC);
    void* const at = mmap(nullptr, sizeof(fake::Machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) std::abort();
    machine = static_cast<fake::Machine*>(at);
  }
  return machine->devices[index];
}

bool take(int index, std::int64_t bytes) {
  fake::Device& from = device(index);
  for (std::int64_t used = __atomic_load_n(&from.used, __ATOMIC_SEQ_CST);;) {
    if (bytes > from.total - used) {
      __atomic_fetch_add(&from.fails, 1, __ATOMIC_SEQ_CST);
      return false;
    }
    if (__atomic_compare_exchange_n(&from.used, &used, used + bytes, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST))
      return true;
  }
}

void give(int index, std::int64_t bytes) { __atomic_fetch_sub(&device(index).used, bytes, __ATOMIC_SEQ_CST); }

Address new_number() {
  if (free_numbers.empty()) return 0x700000000000 + (next_number++ << 21);
  const Address number = *free_numbers.begin();
  free_numbers.erase(free_numbers.begin());
  return number;
}

int allocate(Address* address, std::int64_t bytes, Pool* pool = nullptr) {
  if (address == nullptr || bytes <= 0) return kInvalid;
  const std::lock_guard guard(lock);
  ++calls;
  const int on = pool == nullptr ? current : pool->device;
  if (pool == nullptr && !take(on, bytes)) return kNoMemory;
  if (pool != nullptr) {
    const std::int64_t more = std::max<std::int64_t>(0, pool->used + bytes - pool->reserved);
    const std::int64_t grown = (more + 1023) / 1024 * 1024;
    if (grown != 0 && !take(on, grown)) return kNoMemory;
    pool->reserved += grown;
    pool->used += bytes;
  }
  *address = new_number();
  blocks[*address] = {on, bytes, pool};
  return kOk;
}

int release(Address address) {
  if (address == 0) return kOk;
  const std::lock_guard guard(lock);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  if (found->second.pool == nullptr) {
    give(found->second.device, found->second.bytes);
  } else {
    found->second.pool->used -= found->second.bytes;
  }
  blocks.erase(found);
  free_numbers.insert(address);
  return kOk;
}

void shrink(Pool& pool, std::int64_t keep) {
  const std::lock_guard guard(lock);
  const std::int64_t stays = std::max((pool.used + 1023) / 1024 * 1024, keep);
  if (stays >= pool.reserved) return;
  give(pool.device, pool.reserved - stays);
  pool.reserved = stays;
}

void let_go(std::map<Address, Physical>::iterator found) {
  if (found->second.handles > 0 || found->second.mappings > 0) return;
  give(found->second.device, found->second.bytes);
  physical.erase(found);
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return kOk; }
long fakeAllocations() { return calls; }
// What another thread left half done at a fork is not looked at again.
int fakeDriverForked() {
  new (&lock) std::recursive_mutex;
  new (&blocks) std::map<Address, Block>;
  new (&free_numbers) std::set<Address>;
  return kOk;
}
void fakeCapture(int on) { in_capture = on != 0; }

int cuDeviceTotalMem_v2(std::size_t* bytes, int index) {
  *bytes = static_cast<std::size_t>(device(index).total);
  return kOk;
}
int cuCtxGetDevice(int* index) {
  *index = current;
  return kOk;
}
int cuCtxGetCurrent(void** context) {
  *context = &primary[current];
  return kOk;
}
int cuCtxSetCurrent(void* context) {
  current = static_cast<int>(static_cast<char*>(context) - primary);
  return kOk;
}
int cuDevicePrimaryCtxRetain(void** context, int index) {
  *context = &primary[index];
  return kOk;
}
int cuDevicePrimaryCtxReset_v2(int index) {
  const std::lock_guard guard(lock);
  for (auto at = blocks.begin(); at != blocks.end();) {
    const auto block = at++;
    if (block->second.device == index) release(block->first);
  }
  shrink(default_pools[index], 0);
  return kOk;
}

int cuMemAlloc_v2(Address* address, std::size_t bytes) {
  return allocate(address, static_cast<std::int64_t>(bytes));
}
int cuMemAlloc(unsigned*, unsigned) { return kInvalid; }  // of the first versions, with other types
int cuMemAllocManaged(Address* address, std::size_t bytes, unsigned) {
  return allocate(address, static_cast<std::int64_t>(bytes));
}
int cuMemAllocPitch_v2(Address* address, std::size_t* pitch, std::size_t width, std::size_t height,
                       unsigned) {
  *pitch = (width + 255) / 256 * 256;
  return allocate(address, static_cast<std::int64_t>(*pitch * height));
}
int cuMemFree_v2(Address address) { return release(address); }

struct Array {
  std::size_t width, height, depth;
  int format;
  unsigned channels, flags;
};
int cuArray3DCreate_v2(void** array, const Array* shape) {
  const std::size_t texels =
      shape->width * std::max<std::size_t>(shape->height, 1) * std::max<std::size_t>(shape->depth, 1);
  Address address = 0;
  const int code = allocate(
      &address, static_cast<std::int64_t>(texels * shape->channels * (shape->format == 0x20 ? 4 : 1)));
  if (code == kOk) *array = reinterpret_cast<void*>(address);
  return code;
}
int cuArrayDestroy(void* array) { return release(reinterpret_cast<Address>(array)); }

int cuDeviceGetMemPool(void** pool, int index) {
  *pool = &default_pools[index];
  return kOk;
}
struct PoolProps {
  int type, handles, location_type, location;
};
int cuMemPoolCreate(void** pool, const PoolProps* props) {
  *pool = new Pool{props->location};
  return kOk;
}
int cuMemPoolDestroy(void* pool) {
  auto* const gone = static_cast<Pool*>(pool);
  const std::lock_guard guard(lock);
  shrink(*gone, 0);
  // What is left is freed with the blocks, one by one.
  std::int64_t bytes = gone->reserved;
  for (auto& [address, block] : blocks)
    if (block.pool == gone) {
      block.pool = nullptr;
      bytes -= block.bytes;
    }
  give(gone->device, bytes);
  *gone = {gone->device, -1, -1};
  return kOk;
}
int cuMemPoolTrimTo(void* pool, std::size_t keep) {
  shrink(*static_cast<Pool*>(pool), static_cast<std::int64_t>(keep));
  return kOk;
}
int cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
  const std::lock_guard guard(lock);
  const auto& of = *static_cast<Pool*>(pool);
  if (of.reserved < 0) std::abort();  // it is gone: a driver would read freed memory
  *static_cast<std::int64_t*>(value) = attribute == 5 ? of.reserved : of.used;
  return attribute == 5 || attribute == 7 ? kOk : kInvalid;
}
int cuMemAllocFromPoolAsync(Address* address, std::size_t bytes, void* pool, void*) {
  return allocate(address, static_cast<std::int64_t>(bytes), static_cast<Pool*>(pool));
}
int cuMemAllocAsync(Address* address, std::size_t bytes, void* stream) {
  if (in_capture) return *address = 0x500000000000, kOk;
  return cuMemAllocFromPoolAsync(address, bytes, &default_pools[current], stream);
}
int cuMemFreeAsync(Address address, void*) { return in_capture ? kOk : release(address); }
int cuStreamIsCapturing(void*, int* status) {
  *status = in_capture ? 1 : 0;
  return kOk;
}
int cuStreamSynchronize(void*) {
  for (Pool& pool : default_pools) shrink(pool, 0);
  return kOk;
}

struct Props {
  int type, handles, location_type, location;
};
int cuMemCreate(Address* handle, std::size_t bytes, const Props* props, unsigned long long) {
  const std::lock_guard guard(lock);
  ++calls;
  const auto size = static_cast<std::int64_t>(bytes);
  if (!take(props->location, size)) return kNoMemory;
  *handle = new_number();
  physical[*handle] = {props->location, size, 1, 0};
  return kOk;
}
int cuMemRelease(Address handle) {
  const std::lock_guard guard(lock);
  const auto found = physical.find(handle);
  if (found == physical.end() || found->second.handles == 0) return kInvalid;
  --found->second.handles;
  let_go(found);
  return kOk;
}
int cuMemMap(Address address, std::size_t bytes, std::size_t, Address handle, unsigned long long) {
  const std::lock_guard guard(lock);
  ++physical.at(handle).mappings;
  mappings[address] = {handle, bytes};
  return kOk;
}
int cuMemUnmap(Address address, std::size_t bytes) {
  const std::lock_guard guard(lock);
  const auto first = mappings.lower_bound(address), last = mappings.lower_bound(address + bytes);
  for (auto at = first; at != last; ++at) {
    const auto found = physical.find(at->second.first);
    --found->second.mappings;
    let_go(found);
  }
  mappings.erase(first, last);
  return kOk;
}
int cuMemRetainAllocationHandle(Address* handle, void* address) {
  const std::lock_guard guard(lock);
  const auto found = mappings.find(reinterpret_cast<Address>(address));
  if (found == mappings.end()) return kInvalid;
  *handle = found->second.first;
  ++physical.at(*handle).handles;
  return kOk;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long, int*) {
  struct Row {
    const char* name;
    int first;
    void* function;
  };
#define ROW(name, first, function)                  \
  {                                                 \
    name, first, reinterpret_cast<void*>(&function) \
  }
  static const Row rows[] = {
      ROW("cuMemAlloc", 3020, cuMemAlloc_v2),
      ROW("cuMemAlloc", 2000, cuMemAlloc),
      ROW("cuMemFree", 3020, cuMemFree_v2),
      ROW("cuMemAllocManaged", 6000, cuMemAllocManaged),
      ROW("cuMemAllocPitch", 3020, cuMemAllocPitch_v2),
      ROW("cuArray3DCreate", 3020, cuArray3DCreate_v2),
      ROW("cuArrayDestroy", 2000, cuArrayDestroy),
      ROW("cuMemAllocAsync", 11020, cuMemAllocAsync),
      ROW("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync),
      ROW("cuMemFreeAsync", 11020, cuMemFreeAsync),
      ROW("cuMemPoolCreate", 11020, cuMemPoolCreate),
      ROW("cuMemPoolDestroy", 11020, cuMemPoolDestroy),
      ROW("cuMemPoolTrimTo", 11020, cuMemPoolTrimTo),
      ROW("cuMemPoolGetAttribute", 11020, cuMemPoolGetAttribute),
      ROW("cuDeviceGetMemPool", 11020, cuDeviceGetMemPool),
      ROW("cuStreamIsCapturing", 10000, cuStreamIsCapturing),
      ROW("cuStreamSynchronize", 2000, cuStreamSynchronize),
      ROW("cuMemCreate", 10020, cuMemCreate),
      ROW("cuMemRelease", 10020, cuMemRelease),
      ROW("cuMemMap", 10020, cuMemMap),
      ROW("cuMemUnmap", 10020, cuMemUnmap),
      ROW("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
      ROW("cuCtxGetDevice", 2000, cuCtxGetDevice),
      ROW("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
      ROW("cuDevicePrimaryCtxReset", 11000, cuDevicePrimaryCtxReset_v2),
      ROW("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
      ROW("fakeCapture", 0, fakeCapture),
      ROW("fakeDriverForked", 0, fakeDriverForked),
  };
#undef ROW
  for (const Row& row : rows)
    if (std::strcmp(row.name, symbol) == 0 && version >= row.first) return *function = row.function, kOk;
  *function = nullptr;
  return kNotFound;
}
}
