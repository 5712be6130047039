// Fused attention: other ops on CUDA than on the host, where they are computed by the host's flash kernels.
#pragma once

#include "job.h"

namespace emulated {

// The body that computes the op of this name, empty if it is not one of them. Without dropout.
Job::Body attention_body(const std::string& op);

}  // namespace emulated
