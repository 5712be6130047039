#include "job.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "tensors.h"

namespace emulated {
namespace {

constexpr char kCanary = '\x5A';
constexpr std::size_t kReasonKept = 600;

void compute(Job& job) {
  const c10::InferenceMode inference;
  if (job.body) {
    job.body(job);
    return;
  }
  // The job keeps its arguments: a graph runs it again. A kernel with several outputs returns references to
  // them, too, which are read after those of the stack were dropped (seen with PyTorch 2.11).
  Stack stack = job.arguments;
  job.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  std::size_t next = 0;
  for (const c10::IValue& value : stack) {
    // An undefined tensor counts too: it has its place among the results.
    map_tensors(value, [&](const at::Tensor& made) {
      if (next < job.results.size() && job.results[next].defined() && made.defined())
        job.results[next].copy_(made);
      ++next;
      return made;
    });
  }
}

void run(Job& job) {
  for (const auto& [begin, bytes] : job.scratch) std::memset(begin, kCanary, bytes);
  std::string reason;
  try {
    compute(job);
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (!reason.empty())
    emuComplain((name_of(job.op) + " failed on its stream: " + reason.substr(0, kReasonKept)).c_str());
  for (const auto& [begin, bytes] : job.scratch) {
    if (!std::all_of(begin, begin + bytes, [](char byte) { return byte == kCanary; }))
      emuComplain(("something else wrote into the scratch of " + name_of(job.op)).c_str());
  }
}

}  // namespace

std::string name_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

void launch(Job job, c10::cuda::CUDAStream stream, const std::vector<Range>& ranges) {
  const auto kept = std::make_shared<Job>(std::move(job));
  emuLaunch(stream.stream(), name_of(kept->op), [kept] { run(*kept); }, ranges);
}

}  // namespace emulated
