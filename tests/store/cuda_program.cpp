// A program that knows nothing of the store. It is linked to the runtime, and gets the driver's functions in
// three ways.
//
//   random SEED THREADS ROUNDS   random calls in several threads; after each round a line, and it waits for
//   one hold BYTES                   allocates, says what came of it, and waits for a line fork BYTES the
//   same, then a child that allocates as much; a line of each
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

extern "C" {
using Address = unsigned long long;
struct Extent {
  std::size_t width, height, depth;
};
struct Pitched {
  void* address;
  std::size_t pitch, xsize, ysize;
};
struct Format {
  int x, y, z, w, kind;
};
int cudaSetDevice(int);
int cudaGetLastError();
int cudaMalloc(void**, std::size_t);
int cudaMallocManaged(void**, std::size_t, unsigned);
int cudaMallocPitch(void**, std::size_t*, std::size_t, std::size_t);
int cudaMalloc3D(Pitched*, Extent);
int cudaMallocArray(void**, const Format*, std::size_t, std::size_t, unsigned);
int cudaMalloc3DArray(void**, const Format*, Extent, unsigned);
int cudaFree(void*);
int cudaFreeArray(void*);
int cudaMallocAsync(void**, std::size_t, void*);
int cudaMallocFromPoolAsync(void**, std::size_t, void*, void*);
int cudaFreeAsync(void*, void*);
int cudaMemPoolCreate(void**, const void*);
int cudaMemPoolDestroy(void*);
int cudaMemPoolTrimTo(void*, std::size_t);
int cudaStreamSynchronize(void*);
int cudaDeviceReset();
int fakeForked();
int cudaGetDriverEntryPoint(const char*, void**, unsigned long long, int*);
}

namespace {

// Functions of the driver: by dlsym, by cuGetProcAddress, by the runtime, in turn.
template <typename Function>
Function* driver(const char* symbol, const char* exported) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static std::atomic<unsigned> turn{0};
  void* function = nullptr;
  switch (turn++ % 3) {
    case 0:
      function = dlsym(library, exported);
      break;
    case 1: {
      using Get = int(const char*, void**, int, unsigned long long, int*);
      reinterpret_cast<Get*>(dlsym(library, "cuGetProcAddress_v2"))(symbol, &function, 12080, 0, nullptr);
      break;
    }
    default:
      cudaGetDriverEntryPoint(symbol, &function, 0, nullptr);
  }
  if (function == nullptr) std::abort();
  return reinterpret_cast<Function*>(function);
}

struct Held {
  enum Kind { kLinear, kAsync, kArray, kDriver, kPhysical } kind;
  void* address;
  std::size_t bytes;
};

// The calls of one thread.
class Caller {
 public:
  Caller(unsigned seed, unsigned thread) : random_(seed * 1000 + thread), thread_(thread) {
    struct {
      int type = 1, handles = 0, location_type = 1, location;
      char rest[256] = {};
    } props;
    props.location = static_cast<int>(thread % 2);
    if (cudaMemPoolCreate(&pool_, &props) != 0) std::abort();
  }

  void round(int steps) {
    cudaSetDevice(static_cast<int>(thread_ % 2));
    for (int i = 0; i < steps; ++i) {
      if (random_() % 16 == 0) pools();
      if (held_.empty() || random_() % 5 < 3) {
        allocate(1 + random_() % 100'000);
      } else {
        const std::size_t at = random_() % held_.size();
        free(held_[at]);
        held_[at] = held_.back();
        held_.pop_back();
      }
    }
  }

 private:
  void pools() {
    if (random_() % 2) cudaMemPoolTrimTo(pool_, 0);
    if (random_() % 4 == 0) {
      cudaMemPoolDestroy(pool_);
      *this = Caller(static_cast<unsigned>(random_()), thread_, held_);
    }
  }

  Caller(unsigned seed, unsigned thread, std::vector<Held> held) : Caller(seed, thread) {
    held_ = std::move(held);
  }

  void allocate(std::size_t bytes) {
    void* address = nullptr;
    std::size_t pitch = 0;
    const std::size_t width = 1 + bytes / 16;
    const Format format{32, 0, 0, 0, 2};
    switch (random_() % 14) {
      case 0:
        return keep(Held::kLinear, cudaMallocManaged(&address, bytes, 1), address);
      case 1:
        return keep(Held::kLinear, cudaMallocPitch(&address, &pitch, width, 7), address);
      case 2: {
        Pitched pointer = {};
        const int code = cudaMalloc3D(&pointer, {width, 3, 2});
        return keep(Held::kLinear, code, pointer.address);
      }
      case 3:
        return keep(Held::kArray, cudaMallocArray(&address, &format, width, 3, 0), address);
      case 4:
        return keep(Held::kArray, cudaMalloc3DArray(&address, &format, {width, 2, 2}, 0), address);
      case 5:
      case 6:
        return keep(Held::kAsync, cudaMallocAsync(&address, bytes, nullptr), address);
      case 7:
        return keep(Held::kAsync, cudaMallocFromPoolAsync(&address, bytes, pool_, nullptr), address);
      case 8: {
        const int code = driver<int(Address*, std::size_t)>("cuMemAlloc", "cuMemAlloc_v2")(
            reinterpret_cast<Address*>(&address), bytes);
        return keep(Held::kDriver, code, address);
      }
      case 9: {
        const int code = driver<int(Address*, std::size_t, void*)>("cuMemAllocAsync", "cuMemAllocAsync")(
            reinterpret_cast<Address*>(&address), bytes, nullptr);
        return keep(Held::kAsync, code, address);
      }
      case 10:
        return physical(bytes);
      case 11:  // in vain
        return keep(Held::kLinear, cudaMalloc(&address, std::size_t{1} << 40), address);
      default:
        return keep(Held::kLinear, cudaMalloc(&address, bytes), address);
    }
  }

  void keep(Held::Kind kind, int code, void* address, std::size_t bytes = 0) {
    if (code == 0) {
      held_.push_back({kind, address, bytes});
    } else if (code != 2) {
      std::abort();
    }
    cudaGetLastError();
  }

  // As PyTorch and others do: create, map, and release the handle at once or later.
  void physical(std::size_t bytes) {
    struct {
      int type = 1, handles = 0, location_type = 1, location;
      char rest[64] = {};
    } props;
    props.location = static_cast<int>(random_() % 2);
    Address handle = 0;
    const int code = driver<int(Address*, std::size_t, const void*, unsigned long long)>(
        "cuMemCreate", "cuMemCreate")(&handle, bytes, &props, 0);
    if (code != 0) return keep(Held::kPhysical, code, nullptr);
    const Address at = 0x600000000000 + (mapped_++ << 21);
    driver<int(Address, std::size_t, std::size_t, Address, unsigned long long)>("cuMemMap", "cuMemMap")(
        at, bytes, 0, handle, 0);
    driver<int(Address)>("cuMemRelease", "cuMemRelease")(handle);
    if (random_() % 2) {
      using Retain = int(Address*, void*);
      static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
      const auto retain = reinterpret_cast<Retain*>(dlsym(library, "cuMemRetainAllocationHandle"));
      if (retain(&handle, reinterpret_cast<void*>(at)) != 0) std::abort();
      driver<int(Address)>("cuMemRelease", "cuMemRelease")(handle);
    }
    keep(Held::kPhysical, code, reinterpret_cast<void*>(at), bytes);
  }

  void free(const Held& held) {
    int code = 0;
    const auto number = reinterpret_cast<Address>(held.address);
    switch (held.kind) {
      case Held::kLinear:
        code = cudaFree(held.address);
        break;
      case Held::kAsync:
        code = random_() % 4 == 0 ? cudaFree(held.address) : cudaFreeAsync(held.address, nullptr);
        if (random_() % 8 == 0) cudaStreamSynchronize(nullptr);
        break;
      case Held::kArray:
        code = cudaFreeArray(held.address);
        break;
      case Held::kDriver:
        code = random_() % 2 ? cudaFree(held.address)
                             : driver<int(Address)>("cuMemFree", "cuMemFree_v2")(number);
        break;
      case Held::kPhysical:
        code = driver<int(Address, std::size_t)>("cuMemUnmap", "cuMemUnmap")(number, held.bytes);
    }
    if (code != 0) std::abort();
    if (random_() % 16 == 0) {  // a second time: refused, and not counted
      if (held.kind == Held::kArray && cudaFreeArray(reinterpret_cast<void*>(1)) == 0) std::abort();
      cudaGetLastError();
    }
  }

  std::mt19937 random_;
  unsigned thread_;
  void* pool_ = nullptr;
  std::vector<Held> held_;
  static inline std::atomic<Address> mapped_{0};
};

bool go_on() {
  char line[16];
  std::fflush(stdout);
  return std::fgets(line, sizeof(line), stdin) != nullptr;
}

int random_calls(unsigned seed, unsigned threads, int rounds) {
  std::vector<Caller> callers;
  for (unsigned thread = 0; thread < threads; ++thread) callers.emplace_back(seed, thread);
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::thread> running;
    for (Caller& caller : callers) running.emplace_back([&] { caller.round(60); });
    for (std::thread& thread : running) thread.join();
    std::printf("round %d\n", round);
    if (!go_on()) return 1;
  }
  for (int device : {0, 1}) {
    cudaSetDevice(device);
    cudaDeviceReset();
  }
  std::puts("reset");
  return go_on() ? 0 : 1;
}

// Children of a process whose threads allocate meanwhile: each allocates once, and ends.
int fork_among_threads(int children) {
  // The stand-in opens its driver before there are children that would wait for a thread that does.
  void* first = nullptr;
  if (cudaMalloc(&first, 1) != 0 || cudaFree(first) != 0) std::abort();
  std::atomic<bool> over{false};
  std::vector<std::thread> running;
  for (int i = 0; i < 3; ++i) {
    running.emplace_back([&] {
      while (!over.load()) {
        void* address = nullptr;
        if (cudaMalloc(&address, 1000) != 0 || cudaFree(address) != 0) std::abort();
      }
    });
  }
  int well = 0;
  for (int i = 0; i < children; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      void* address = nullptr;
      // A real driver refuses here; the stand-in's locks may be held by threads that are no more.
      _exit(fakeForked() == 0 && cudaMalloc(&address, 100) == 0 ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    well += status == 0;
  }
  over.store(true);
  for (std::thread& thread : running) thread.join();
  std::printf("well %d\n", well);
  while (go_on()) {
    void* once_more = nullptr;
    if (cudaMalloc(&once_more, 1) != 0 || cudaFree(once_more) != 0) std::abort();
    std::printf("again\n");
  }
  return 0;
}

int allocate_and_say(std::size_t bytes, const char* who) {
  void* address = nullptr;
  const int code = cudaMalloc(&address, bytes);
  std::printf("%s %d last %d\n", who, code, cudaGetLastError());
  std::fflush(stdout);
  return code;
}

}  // namespace

int main(int, char** words) {
  const std::size_t first = std::strtoull(words[2], nullptr, 10);
  if (std::strcmp(words[1], "random") == 0)
    return random_calls(static_cast<unsigned>(first), static_cast<unsigned>(std::atoi(words[3])),
                        std::atoi(words[4]));
  if (std::strcmp(words[1], "forks") == 0) return fork_among_threads(static_cast<int>(first));
  allocate_and_say(first, "parent");
  if (std::strcmp(words[1], "fork") == 0) {
    const pid_t child = fork();
    if (child == 0) {
      allocate_and_say(first, "child");
      pause();
    }
    std::printf("forked %d\n", static_cast<int>(child));
  }
  while (go_on()) allocate_and_say(first, "again");
  return 0;
}
