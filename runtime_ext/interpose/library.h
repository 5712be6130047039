// The real CUDA libraries of this process, and their functions.
#pragma once
#include <atomic>
#include <cstddef>

#include "names.h"

namespace disco::interpose {

// A loaded library that has CUDA's functions: the driver, or one of the runtimes that a process may have
// several of. It is never unloaded once it is here, because its functions are kept.
class Library {
 public:
  // The address of a function; nullptr if the library has none of that name.
  void* find(Id id);
  template <typename Function>
  Function* get(Id id) {
    return reinterpret_cast<Function*>(find(id));
  }
  bool is(const void* base) const { return base_.load(std::memory_order_acquire) == base; }

 private:
  friend Library* adopt(Layer layer, void* function);

  std::atomic<const void*> base_{nullptr};  // where it is mapped, set last
  void* handle_ = nullptr;
  std::atomic<void*> functions_[kIds] = {};
};

// The libraries that a call may go to; nullptr: this process has none that can be found.
Library* driver();
// Of the code at `caller`, which is linked to a runtime.
Library* runtime_of(const void* caller);
// Of those who asked dlsym for the runtime's functions.
Library* runtime_by_name();

// The library that `function` is part of; nullptr if it is none that wrappers can forward to: the process has
// a driver, or a runtime for those who ask dlsym, that is another library.
Library* adopt_driver(void* function);
Library* adopt_runtime(void* function);

// The loader's own dlsym, whose answers depend on the place of its caller.
using Dlsym = void* (*)(void*, const char*);
Dlsym real_dlsym();

// Whether `address` is part of this library.
bool ours(const void* address);

}  // namespace disco::interpose
