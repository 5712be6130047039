#include <map>

#include "cuda_device.h"
#include "current_device.h"

namespace disco {
CudaStreams::CudaStreams(const CudartApi& api, int ordinal) : api_(api), ordinal_(ordinal) {
  const CurrentDevice current(api_, ordinal_);
  try {
    for (CudaStream& lane : lanes_) lane = make();
    clock_ = make();
  } catch (...) {
    destroy();
    throw;
  }
}

CudaStreams::~CudaStreams() { destroy(); }

std::shared_ptr<CudaStreams> CudaStreams::shared(const CudartApi& api, int ordinal) {
  // Leaked on purpose: the CUDA runtime may be gone before static objects are.
  static auto* mutex = new std::mutex;
  static auto* streams = new std::map<int, std::shared_ptr<CudaStreams>>;
  const std::lock_guard lock(*mutex);
  std::shared_ptr<CudaStreams>& entry = (*streams)[ordinal];
  if (entry == nullptr) entry = std::make_shared<CudaStreams>(api, ordinal);
  return entry;
}

CudaStream CudaStreams::compute(int index) {
  const std::lock_guard lock(mutex_);
  const CurrentDevice current(api_, ordinal_);
  while (compute_.size() <= static_cast<std::size_t>(index)) {
    compute_.reserve(compute_.size() + 1);
    compute_.push_back(make());
  }
  return compute_[static_cast<std::size_t>(index)];
}

CudaStream CudaStreams::arrivals() {
  const std::lock_guard lock(mutex_);
  const CurrentDevice current(api_, ordinal_);
  if (arrivals_ == nullptr) arrivals_ = make();
  return arrivals_;
}

CudaStream CudaStreams::recording() {
  const std::lock_guard lock(mutex_);
  const CurrentDevice current(api_, ordinal_);
  if (recording_ == nullptr) recording_ = make();
  return recording_;
}

CudaStream CudaStreams::make() {
  CudaStream stream = nullptr;
  check_cuda(api_, "cudaStreamCreateWithFlags", api_.stream_create(&stream, kStreamNonBlocking));
  return stream;
}

// What cannot be given back is lost with the process; there is nobody left to tell.
void CudaStreams::destroy() noexcept {
  for (CudaStream stream : compute_) api_.stream_destroy(stream);
  for (CudaStream stream : lanes_) {
    if (stream != nullptr) api_.stream_destroy(stream);
  }
  if (clock_ != nullptr) api_.stream_destroy(clock_);
  if (arrivals_ != nullptr) api_.stream_destroy(arrivals_);
  if (recording_ != nullptr) api_.stream_destroy(recording_);
}

}  // namespace disco
