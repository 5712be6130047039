#include "temporaries.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <tuple>
#include <type_traits>

#include "tensors.h"

namespace emulated {
namespace {

const std::set<std::string> kProducts{"aten::mm",      "aten::addmm", "aten::bmm",
                                      "aten::baddbmm", "aten::addmv", "aten::dot"};
// Those that sort, reduce in two passes or count. How much real kernels take is not known here.
const std::set<std::string> kWithScratch{"aten::sum",
                                         "aten::mean",
                                         "aten::cumsum",
                                         "aten::sort",
                                         "aten::_softmax_backward_data",
                                         "aten::_log_softmax_backward_data",
                                         "aten::embedding_dense_backward",
                                         "aten::_index_put_impl_",
                                         "aten::nll_loss_forward"};
constexpr std::size_t kAlignment = 16, kLeast = 256;

// A template, as the map's values are of another type before PyTorch 2.12 or so: blocks without their sizes.
template <typename Kept>
void take(Kept& kept, cudaStream_t stream) {
  thread_local char handle;  // stands for the thread's cuBLAS handle
  const auto key = std::make_tuple(static_cast<void*>(&handle), static_cast<void*>(stream));
  const std::unique_lock lock(kept.mutex);
  if (kept.map.count(key) != 0) return;
  const std::size_t bytes = at::cuda::getChosenWorkspaceSize();
  c10::DataPtr block = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  using Value = std::decay_t<decltype(kept.map.begin()->second)>;
  if constexpr (std::is_same_v<Value, c10::DataPtr>) {
    kept.map[key] = std::move(block);
  } else {
    kept.map[key] = Value{std::move(block), bytes};
  }
}

}  // namespace

void take_workspace(const std::string& op, cudaStream_t stream) {
  if (kProducts.count(op) != 0) take(at::cuda::cublas_handle_stream_to_workspace(), stream);
}

c10::DataPtr take_scratch(const std::string& op, const Stack& arguments, Job& job,
                          std::vector<Range>& ranges) {
  if (kWithScratch.count(op) == 0) return {};
  std::size_t largest = 0;
  for (const c10::IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) largest = std::max(largest, extent(tensor));
    });
  }
  const std::size_t bytes = largest / 2 / kAlignment * kAlignment + kLeast;
  c10::DataPtr block = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  job.scratch.emplace_back(static_cast<char*>(emuBytes(block.get())), bytes);
  ranges.push_back({block.get(), bytes, true});
  return block;
}

}  // namespace emulated
