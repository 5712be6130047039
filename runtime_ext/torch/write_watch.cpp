#include "write_watch.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "fork_mutex.h"

namespace disco {
namespace {

// Of Linux 6.7's headers, which need not be the ones installed.
constexpr int kUserModeOnly = 1;
constexpr std::uint64_t kWpUnpopulated = 1ULL << 13;
constexpr std::uint64_t kWpAsync = 1ULL << 15;
constexpr std::uint64_t kPageIsWritten = 1ULL << 1;
constexpr std::uint64_t kScanWpMatching = 1ULL << 0;
constexpr std::uint64_t kScanCheckWpAsync = 1ULL << 1;

struct PageRegion {
  std::uint64_t start, end, categories;
};

struct ScanArgument {
  std::uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask,
      category_anyof_mask, return_mask;
};

constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArgument);

struct Region {
  std::uintptr_t end = 0;
  bool device_writes = false;
};

struct Watch {
  ForkMutex mutex;
  std::map<std::uintptr_t, Region> regions;
  std::vector<WriteListener*> listeners;
  bool allowed = true;
  std::optional<bool> works;
  int faults = -1;
  int pagemap = -1;
};

// Never destroyed: arenas may be freed after static objects are.
Watch& watch() {
  static auto* the = new Watch;
  return *the;
}

// Without closing them: a program may have done that, and their numbers may be another file's now.
void forget_files(Watch& w) { w.faults = w.pagemap = -1; }

void in_child() {
  // The parent's files act on the parent's memory; a child opens its own.
  Watch& w = watch();
  w.regions.clear();
  for (WriteListener* listener : w.listeners) listener->lost();
  forget_files(w);
  w.works.reset();
}

void follow_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, in_child);
  (void)once;
}

bool open_files(Watch& w) {
  w.faults = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
  w.pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (w.faults < 0 || w.pagemap < 0) return false;
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = kWpUnpopulated | kWpAsync;
  return ioctl(w.faults, UFFDIO_API, &api) == 0;
}

bool protect(const Watch& w, std::uintptr_t begin, std::size_t nbytes) {
  uffdio_register range{};
  range.range = {begin, nbytes};
  range.mode = UFFDIO_REGISTER_MODE_WP;
  return ioctl(w.faults, UFFDIO_REGISTER, &range) == 0;
}

// Calls tell(begin, end) for each run of written pages in [begin, end) and protects them again. False: the
// kernel refuses; what was written is not known.
template <typename Tell>
bool scan(const Watch& w, std::uintptr_t begin, std::uintptr_t end, Tell&& tell) {
  std::array<PageRegion, 256> runs{};
  while (begin < end) {
    ScanArgument argument{};
    argument.size = sizeof argument;
    argument.flags = kScanWpMatching | kScanCheckWpAsync;
    argument.start = begin;
    argument.end = end;
    argument.vec = reinterpret_cast<std::uint64_t>(runs.data());
    argument.vec_len = runs.size();
    argument.category_mask = argument.return_mask = kPageIsWritten;
    const int count = ioctl(w.pagemap, kPagemapScan, &argument);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 || argument.walk_end <= begin) return false;
    for (int i = 0; i < count; ++i) tell(runs[i].start, runs[i].end);
    begin = argument.walk_end;
  }
  return true;
}

// Whether exactly the pages [first, last) of those at `at` were written to since the last look.
bool sees(const Watch& w, std::uintptr_t at, std::size_t page, std::size_t first, std::size_t last) {
  std::uintptr_t begin = 0, end = 0;
  bool once = true;
  const bool ok = scan(w, at, at + 2 * page, [&](std::uintptr_t from, std::uintptr_t to) {
    once = once && begin == end;
    begin = from, end = to;
  });
  return ok && once && (first == last ? begin == end : begin == at + first * page && end == at + last * page);
}

bool kernel_write(void* target) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  const char byte = 1;
  const bool ok = write(ends[1], &byte, 1) == 1 && read(ends[0], target, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return ok;
}

// A program's write, one of the kernel's and none at all, each on a page of a mapping made for it.
bool try_out(const Watch& w) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* pages = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(pages);
  auto* bytes = static_cast<volatile char*>(pages);
  bool ok = protect(w, at, 2 * page);
  bytes[0] = 1;
  bytes[page] = 1;
  ok = ok && sees(w, at, page, 0, 2) && sees(w, at, page, 0, 0);
  bytes[page] = 2;
  ok = ok && sees(w, at, page, 1, 2);
  ok = ok && kernel_write(pages) && sees(w, at, page, 0, 1) && sees(w, at, page, 0, 0);
  munmap(pages, 2 * page);
  return ok;
}

bool usable(Watch& w) {
  if (!w.works.has_value()) {
    follow_forks();
    w.works = open_files(w) && try_out(w);
    if (!*w.works) {
      for (const int file : {w.faults, w.pagemap}) {
        if (file >= 0) close(file);
      }
      forget_files(w);
    }
  }
  return *w.works && w.allowed;
}

bool collect(Watch& w, std::uintptr_t start) {
  const auto region = w.regions.find(start);
  if (region == w.regions.end()) return false;
  const bool ok = scan(w, start, region->second.end, [&w](std::uintptr_t begin, std::uintptr_t end) {
    for (WriteListener* listener : w.listeners) listener->written(begin, end);
  });
  if (!ok) {
    // Our files were closed by somebody, say. Later arenas do without.
    w.works = false;
    forget_files(w);
    w.regions.erase(region);
    for (WriteListener* listener : w.listeners) listener->lost();
  }
  return ok;
}

}  // namespace

bool can_watch_writes() {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  return usable(w);
}

void allow_watching_writes(bool on) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  w.allowed = on;
}

bool watch_writes(void* begin, std::size_t nbytes) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  const auto at = reinterpret_cast<std::uintptr_t>(begin);
  if (nbytes == 0 || !usable(w) || !protect(w, at, nbytes)) return false;
  w.regions[at] = Region{at + nbytes, false};
  return true;
}

void unwatch_writes(void* begin) {
  // Unmapping ends the protection, so that another mapping at this address is never taken for the arena.
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  w.regions.erase(reinterpret_cast<std::uintptr_t>(begin));
}

std::uintptr_t watched_region(std::uintptr_t begin, std::uintptr_t end) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  auto after = w.regions.upper_bound(begin);
  if (after == w.regions.begin()) return 0;
  const auto& [start, region] = *std::prev(after);
  return end <= region.end ? start : 0;
}

void expect_device_writes(void* begin) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  const auto region = w.regions.find(reinterpret_cast<std::uintptr_t>(begin));
  if (region != w.regions.end()) region->second.device_writes = true;
}

bool device_may_write(std::uintptr_t start) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  const auto region = w.regions.find(start);
  return region != w.regions.end() && region->second.device_writes;
}

void collect_writes(std::uintptr_t start) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  collect(w, start);
}

void expect_rewrite(std::uintptr_t begin, std::uintptr_t end) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  auto after = w.regions.upper_bound(begin);
  if (begin >= end || after == w.regions.begin() || end > std::prev(after)->second.end) return;
  uffdio_writeprotect pages{};
  pages.range = {begin, end - begin};
  pages.mode = 0;
  // Refused, they stay protected: their first writes cost more, and are found one by one.
  if (ioctl(w.faults, UFFDIO_WRITEPROTECT, &pages) != 0) return;
  for (WriteListener* listener : w.listeners) listener->written(begin, end);
}

void add_listener(WriteListener* listener, const std::vector<std::uintptr_t>& regions) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  bool watched = true;
  for (const std::uintptr_t region : regions) watched = collect(w, region) && watched;
  w.listeners.push_back(listener);
  if (!watched) listener->lost();
}

void remove_listener(WriteListener* listener) {
  Watch& w = watch();
  const std::lock_guard lock(w.mutex);
  w.listeners.erase(std::remove(w.listeners.begin(), w.listeners.end(), listener), w.listeners.end());
}

}  // namespace disco
