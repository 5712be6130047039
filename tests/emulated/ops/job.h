// One call of an op, taken apart: what the stream's thread needs to compute it later.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "emulated.h"

namespace emulated {

using Stack = torch::jit::Stack;

struct Job {
  using Body = std::function<void(Job&)>;

  c10::OperatorHandle op;
  Stack arguments;                  // tensors are host views
  std::vector<at::Tensor> results;  // host views, undefined where the op writes into an argument
  Body body;                        // in place of the op's CPU kernel, if given
  std::vector<std::pair<char*, std::size_t>> scratch;  // filled before, compared after

  const at::Tensor& tensor(std::size_t argument) const { return arguments[argument].toTensor(); }
};

// Puts the job on `stream`. A failure there is a complaint.
void launch(Job job, c10::cuda::CUDAStream stream, const std::vector<Range>& ranges);

std::string name_of(const c10::OperatorHandle& op);

}  // namespace emulated
