// cudaMemcpyBatchAsync without CUDA's types: its arguments are those of the version that the runtime says it
// is.
#pragma once

#include <cstddef>

namespace emulated {

struct Batch {
  void* const* to;
  const void* const* from;
  const std::size_t* bytes;
  std::size_t count;
  const void* attributes;
  const std::size_t* first;  // the copy from which on each of the attributes holds
  std::size_t kinds;         // how many attributes there are
};

// The code of the runtime's error.
int put_batch(const Batch& batch, void* stream);

}  // namespace emulated
