// Random numbers: a CPU generator for each call, seeded by where CUDA's generator stands.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "job.h"

namespace emulated {

// Moves CUDA's generator on (the current device's default one unless `given`), as a kernel that draws does.
at::Generator drawn_generator(const std::optional<at::Generator>& given);

// The body of native_dropout(input, p, train), whose two results have the input's shape.
Job::Body dropout_body();

}  // namespace emulated
