#include "compute_thread.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <omp.h>

#include "ops.h"

namespace disco {
namespace {

using Watch = void (*)();

Watch watch_function(const char* name) { return reinterpret_cast<Watch>(dlsym(RTLD_DEFAULT, name)); }

}  // namespace

void watch_thread(int workers) {
  static const Watch enter = watch_function("disco_malloc_watch_enter");
  if (enter == nullptr) return;
#pragma omp parallel num_threads(workers)
  enter();
}

void unwatch_thread() {
  static const Watch leave = watch_function("disco_malloc_watch_leave");
  if (leave != nullptr) leave();
}

// OpenMP's thread count is per thread, unlike at::set_num_threads, which leaks to the whole process. ATen
// sets its own count lazily, once per thread: make it do so first.
void prepare_compute_thread(int count) {
  enter_engine_thread();
  at::get_num_threads();
  omp_set_num_threads(count);
  watch_thread(count);
  using MklSetLocal = int (*)(int);
  static const auto mkl_set_local =
      reinterpret_cast<MklSetLocal>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));
  if (mkl_set_local != nullptr) mkl_set_local(count);
}

}  // namespace disco
