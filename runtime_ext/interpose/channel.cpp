#include "channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "devices.h"
#include "wire.h"

namespace disco::interpose {
namespace {

constexpr std::int64_t kRetry = 1'000'000'000;  // no sooner is a store looked for again
constexpr int kHighFile = 200;                  // programs that close and reuse files count from below

constexpr int kMoment = 10;  // milliseconds

bool is_full() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM; }

struct stat errors_at_start;  // what standard error was
bool errors_known = false;

}  // namespace

std::int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void Channel::configure(const char* path) {
  errors_known = fstat(STDERR_FILENO, &errors_at_start) == 0;
  if (path == nullptr || std::strlen(path) >= sizeof(path_)) return;
  std::strcpy(path_, path);
}

void Channel::say_once(const char* what) {
  if (said_) return;
  said_ = true;
  // A file that the program has opened since, by the same number, is not for us to write to.
  struct stat errors;
  if (!errors_known || fstat(STDERR_FILENO, &errors) != 0) return;
  if (errors.st_dev != errors_at_start.st_dev || errors.st_ino != errors_at_start.st_ino) return;
  char line[256];
  const int size =
      std::snprintf(line, sizeof(line), "disco_accel: %s at %s: device memory of process %d is not counted\n",
                    what, path_, static_cast<int>(getpid()));
  if (size > 0 && write(STDERR_FILENO, line, size < 256 ? size : 255) < 0) return;
}

bool Channel::still_ours() const {
  struct stat status;
  return file_ >= 0 && fstat(file_, &status) == 0 && status.st_dev == file_device_ &&
         status.st_ino == file_node_;
}

void Channel::hang_up(bool close_file) {
  if (close_file && still_ours()) close(file_);
  file_ = -1;
  // The store forgets what a connection told when that ends; the next one starts from nothing.
  std::memset(told_, 0, sizeof(told_));
}

void Channel::abandon() {
  hang_up(true);
  next_try_ = 0;
}

bool Channel::connect() {
  if (path_[0] == 0 || now() < next_try_) return false;
  next_try_ = now() + kRetry;
  int file = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (file < 0) return false;
  const int high = fcntl(file, F_DUPFD_CLOEXEC, kHighFile);
  if (high >= 0) {
    close(file);
    file = high;
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_, sizeof(path_));
  // Of a socket that does not block this returns at once, also when too many wait to be accepted.
  const bool reached = ::connect(file, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  ucred peer = {};
  socklen_t size = sizeof(peer);
  const bool own =
      reached && getsockopt(file, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
  struct stat status;
  if (!own || fstat(file, &status) != 0) {
    say_once(!reached ? "no store listens" : "not this user's store listens");
    close(file);
    return false;
  }
  file_ = file;
  file_device_ = status.st_dev;
  file_node_ = status.st_ino;
  return true;
}

bool Channel::connected() {
  if (file_ >= 0 && !still_ours()) {
    hang_up(false);
    next_try_ = 0;  // it was the program that closed it
  }
  return file_ >= 0 || connect();
}

bool Channel::alive() {
  if (!still_ours()) return false;
  Reply reply;
  for (;;) {
    const ssize_t size = recv(file_, &reply, sizeof(reply), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (size == 0 || refuses(reply, static_cast<std::size_t>(size))) return false;
  }
}

// A store that is behind gets a moment, not often: a program whose last call was a free may make no other
// one.
bool Channel::wait_for_room() {
  if (now() < next_wait_) return false;
  pollfd writable{file_, POLLOUT, 0};
  if (poll(&writable, 1, kMoment) == 1) return true;
  next_wait_ = now() + kRetry;
  return false;
}

bool Channel::tell(const std::int64_t (&held)[kDevices]) {
  if (!connected()) return false;
  if (!alive()) {
    say_once("the store is gone");
    hang_up(true);
    return false;
  }
  for (int device = 0; device < kDevices; ++device) {
    const std::int64_t change = held[device] - told_[device];
    if (change == 0) continue;
    const Request message = first_class(store_device(device), change);
    ssize_t sent = send(file_, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && is_full() && wait_for_room())
      sent = send(file_, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == sizeof(message)) {
      told_[device] = held[device];
      continue;
    }
    if (is_full() || errno == EINTR) return false;
    say_once("the store is gone");
    hang_up(true);
    return false;
  }
  return true;
}

}  // namespace disco::interpose
