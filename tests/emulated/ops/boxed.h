// The kernel that stands in for every CUDA kernel of ATen.
#pragma once

#include "job.h"

namespace emulated {

// Takes results and temporaries from CUDA's allocator now; the values come when the current stream gets
// there.
void call_op(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);

// For results that are numbers or whose shapes depend on values: waits for the stream and computes at once.
void call_op_at_once(const c10::OperatorHandle& op, Stack* stack);

}  // namespace emulated
