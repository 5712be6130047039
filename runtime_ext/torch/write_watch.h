// Which pages of an arena were written to: Linux's asynchronous write protection (userfaultfd with WP_ASYNC,
// and PAGEMAP_SCAN, Linux 6.7). The kernel lifts the protection of a written page by itself, for writes of
// the kernel's own (read(2) into a tensor) as well as for a program's: no signal handler, no thread, and no
// write fails. Plain mprotect would make a kernel write fail with EFAULT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace disco {

// Is told of written bytes by whoever collects them, in that thread, under the watch's lock.
class WriteListener {
 public:
  virtual ~WriteListener() = default;
  // Pages [begin, end) were written to since this listener was added or last told of them.
  virtual void written(std::uintptr_t begin, std::uintptr_t end) noexcept = 0;
  // From now on writes may go by unnoticed: the kernel said no, or this is a forked child.
  virtual void lost() noexcept = 0;
};

// Whether this kernel and this process's rights allow it, tried out on two pages the first time.
bool can_watch_writes();

// For tests: with false every later can_watch_writes() is false. Regions that are watched already stay so.
void allow_watching_writes(bool on);

// Watches whole pages [begin, begin + nbytes) of a private mapping from now on; whether that worked. Nothing
// is protected, so writes cost nothing, until the first collect_writes. Of a file all pages must be mapped
// already: the first read of one that is not looks like a write.
bool watch_writes(void* begin, std::size_t nbytes);

// To be called before memory is unmapped; does nothing for memory that is not watched.
void unwatch_writes(void* begin);

// The start of the watched region that holds all of [begin, end); 0 if there is none.
std::uintptr_t watched_region(std::uintptr_t begin, std::uintptr_t end);

// Notes that devices write to the region that begins at `begin`, which no protection of pages sees.
void expect_device_writes(void* begin);
bool device_may_write(std::uintptr_t region);

// Tells all listeners what was written to in a region, and protects those pages again, each at the same
// instant.
void collect_writes(std::uintptr_t region);

// Whole pages [begin, end) of one watched region are about to be written to: all listeners hear of it now,
// and the pages are not protected until the next collect_writes. Rewriting them costs what other memory
// costs.
void expect_rewrite(std::uintptr_t begin, std::uintptr_t end);

// The listener hears of every write to one of the regions that comes after this, and of none before.
void add_listener(WriteListener* listener, const std::vector<std::uintptr_t>& regions);
// Returns once no other thread is telling it anything.
void remove_listener(WriteListener* listener);

}  // namespace disco
