// A key of 128 bits for the bytes of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace disco {

// Two halves of the key of the tensors' bytes in their order, from the first to the last element of each.
// They are read once, by several threads, as fast as memory allows. Each bit of both halves depends on every
// bit read; contents that differ have one key but for one chance in 2^128 or so. Not meant against whom wants
// two contents to collide. Throws std::invalid_argument for a tensor that is not on the CPU or has holes.
std::vector<std::int64_t> content_key(const std::vector<at::Tensor>& tensors);

}  // namespace disco
