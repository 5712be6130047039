#include "fork_mutex.h"

#include <pthread.h>

namespace disco {
namespace {

std::mutex list_mutex;
ForkMutex* first = nullptr;

}  // namespace

struct ForkHandlers {
  static void lock_all() {
    list_mutex.lock();
    for (ForkMutex* mutex = first; mutex != nullptr; mutex = mutex->next_) mutex->lock();
  }
  static void unlock_all() {
    for (ForkMutex* mutex = first; mutex != nullptr; mutex = mutex->next_) mutex->unlock();
    list_mutex.unlock();
  }
};

ForkMutex::ForkMutex() {
  static const int once =
      pthread_atfork(&ForkHandlers::lock_all, &ForkHandlers::unlock_all, &ForkHandlers::unlock_all);
  (void)once;
  const std::lock_guard lock(list_mutex);
  next_ = first;
  first = this;
}

}  // namespace disco
