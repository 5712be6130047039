// The connection to the store, which may be there or not and never keeps the program waiting. Its owner has
// the lock.
#pragma once
#include <sys/types.h>

#include <cstdint>

namespace disco::interpose {

inline constexpr int kDevices = 64;

class Channel {
 public:
  // Where the store listens, from the environment as it was when the program started.
  void configure(const char* path);

  // Tell the store what `held` says, in bytes by device, and it does not know. False: there is none that
  // listens, or it does not keep up; what it was not told now is told with the next call that succeeds.
  bool tell(const std::int64_t (&held)[kDevices]);

  // Whether the store is still there. Takes nothing for granted but what the kernel says at once.
  bool alive();

  // In the child of a fork: this connection is the parent's.
  void abandon();

 private:
  bool connected();
  bool connect();
  bool wait_for_room();
  bool still_ours() const;
  void hang_up(bool close_file);
  void say_once(const char* what);

  char path_[108] = {};
  int file_ = -1;
  dev_t file_device_ = 0;  // the program may close our file, and have one of its own by that number
  ino_t file_node_ = 0;
  std::int64_t next_wait_ = 0;
  std::int64_t next_try_ = 0;  // nanoseconds of the monotonic clock
  bool said_ = false;
  std::int64_t told_[kDevices] = {};
};

std::int64_t now();  // nanoseconds of the monotonic clock

}  // namespace disco::interpose
