// Without CUDA's header, which declares the function for one version.
#include <cstdarg>

#include "batches.h"
#include "settings.h"

using namespace emulated;

extern "C" {

// In CUDA 12 the eighth argument is where the number of a refused copy goes, and the ninth is the stream; in
// CUDA 13 the eighth is the stream. A ninth that nobody gave is not looked at: its place is the caller's.
int cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                         std::size_t count, const void* attributes, const std::size_t* first,
                         std::size_t kinds, ...) {
  std::va_list rest;
  va_start(rest, kinds);
  if (settings().cudart < 13000) {
    if (auto* failed = va_arg(rest, std::size_t*); failed != nullptr) *failed = static_cast<std::size_t>(-1);
  }
  void* const stream = va_arg(rest, void*);
  va_end(rest);
  return put_batch({to, from, bytes, count, attributes, first, kinds}, stream);
}
}
