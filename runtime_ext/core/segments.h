// Segments: runs of kernels that a stream may be given as one, because all waits lie in front of the first.
#pragma once

#include <cstdint>
#include <vector>

namespace disco {

// Kernels that follow each other in the order of one stream. A kernel behind the first waits for others of
// its segment, or for kernels of the same stream that come before the segment: so all of them may be launched
// at once as soon as that holds of each. Its parts are what the device tells the ends of.
struct Segment {
  std::vector<std::int32_t> vertices;
  std::vector<std::int32_t> ops;   // of each vertex
  std::vector<std::int32_t> ends;  // of each part: one past its last kernel, an index of `vertices`
};

// Fewer kernels are launched one by one: a launch of several costs more than one of one.
constexpr std::size_t kFewestKernels = 4;
// More are another segment: until one has ended a kernel that it has overtaken waits, and copies that become
// ready while it is recorded do.
constexpr std::size_t kMostKernels = 64;
constexpr std::int64_t kLongestNs = 1'000'000;

}  // namespace disco
