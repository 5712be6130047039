// What PyTorch's CUDA kernels refuse before they launch: operands elsewhere, generators, dtypes.
#pragma once

#include "job.h"

namespace emulated {

// Throws what the real kernel of the op would, with PyTorch's words.
void check_call(const c10::FunctionSchema& schema, const Stack& arguments);

}  // namespace emulated
