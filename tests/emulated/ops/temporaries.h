// Device memory that kernels take beside their results: cuBLAS workspaces and scratch.
#pragma once

#include <c10/core/Allocator.h>

#include "job.h"

namespace emulated {

// A product takes a workspace for its thread and stream where PyTorch keeps them, unless one is there.
void take_workspace(const std::string& op, cudaStream_t stream);

// Scratch from CUDA's allocator for the ops that take some, booked with the job; an empty pointer for the
// others.
c10::DataPtr take_scratch(const std::string& op, const Stack& arguments, Job& job,
                          std::vector<Range>& ranges);

}  // namespace emulated
