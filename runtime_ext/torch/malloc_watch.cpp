// Counts the large heap allocations of engine threads. Preloaded (LD_PRELOAD) by a test and the demo, never
// in production: the engine's claim is that a steady-state step makes none, and a claim about malloc needs
// malloc to tell.
//
// A thread is watched from disco_malloc_watch_enter() on; the engine calls it on each thread that runs its
// ops and on the OpenMP workers of that thread. A caller's thread is watched only while it runs them. Copy
// threads run nothing but memcpy and are not watched.
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
}

namespace {

constexpr std::size_t kLarge = 4096;
constexpr int kFrames = 24;
constexpr long kSamples = 64;

struct Sample {
  std::size_t nbytes;
  int depth;
  void* frames[kFrames];
};

// backtrace() may itself allocate, hence a flag that is off while a sample is taken.
thread_local bool watched __attribute__((tls_model("initial-exec"))) = false;
std::atomic<long> count{0};
std::atomic<long> threads{0};
std::atomic<long> bytes{0};
Sample samples[kSamples];

void note(std::size_t nbytes) {
  if (!watched || nbytes < kLarge) return;
  watched = false;
  const long index = count.fetch_add(1);
  bytes.fetch_add(static_cast<long>(nbytes));
  if (index < kSamples) {
    samples[index].nbytes = nbytes;
    samples[index].depth = backtrace(samples[index].frames, kFrames);
  }
  watched = true;
}

}  // namespace

extern "C" {

void disco_malloc_watch_enter() {
  void* frames[2];
  backtrace(frames, 2);
  thread_local bool known = false;
  if (!known) threads.fetch_add(1);
  known = watched = true;
}
// A caller's thread has run ops in an engine's place for a while.
void disco_malloc_watch_leave() { watched = false; }
// Threads that were ever watched.
long disco_malloc_watch_threads() { return threads.load(); }
long disco_malloc_watch_count() { return count.load(); }
long disco_malloc_watch_bytes() { return bytes.load(); }
void disco_malloc_watch_reset() {
  count.store(0);
  bytes.store(0);
}
// Frame `frame` of sample `index`, or null past the end.
void* disco_malloc_watch_frame(long index, int frame) {
  const bool known = index >= 0 && index < kSamples && index < count.load();
  return known && frame >= 0 && frame < samples[index].depth ? samples[index].frames[frame] : nullptr;
}
long disco_malloc_watch_size(long index) {
  return index >= 0 && index < kSamples && index < count.load() ? static_cast<long>(samples[index].nbytes)
                                                                : -1;
}

void* malloc(std::size_t nbytes) {
  note(nbytes);
  return __libc_malloc(nbytes);
}
void* calloc(std::size_t items, std::size_t nbytes) {
  note(items * nbytes);
  return __libc_calloc(items, nbytes);
}
void* realloc(void* ptr, std::size_t nbytes) {
  note(nbytes);
  return __libc_realloc(ptr, nbytes);
}
void* memalign(std::size_t alignment, std::size_t nbytes) {
  note(nbytes);
  return __libc_memalign(alignment, nbytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t nbytes) {
  note(nbytes);
  return __libc_memalign(alignment, nbytes);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t nbytes) {
  note(nbytes);
  void* ptr = __libc_memalign(alignment, nbytes);
  if (ptr == nullptr) return ENOMEM;
  *out = ptr;
  return 0;
}
void* mmap(void* address, std::size_t nbytes, int protection, int flags, int fd, off_t offset) {
  using Mmap = void* (*)(void*, std::size_t, int, int, int, off_t);
  static const auto next = reinterpret_cast<Mmap>(dlsym(RTLD_NEXT, "mmap"));
  note(nbytes);
  return next(address, nbytes, protection, flags, fd, offset);
}
}
