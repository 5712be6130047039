// A mutex of the whole process that no fork leaves locked in the child, where its owner does not run.
#pragma once

#include <mutex>

namespace disco {

// Lives as long as the process. Its holder asks for no other one and not for Python's lock, which the thread
// that forks holds: fork() waits for each of them.
class ForkMutex {
 public:
  ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  friend struct ForkHandlers;
  std::mutex mutex_;
  ForkMutex* next_ = nullptr;
};

}  // namespace disco
