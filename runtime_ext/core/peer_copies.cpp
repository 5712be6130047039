#include "peer_copies.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "current_device.h"

namespace disco {
namespace {

// Values of the CUDA runtime's ABI.
constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr int kPeerAccessAlreadyEnabled = 704;

constexpr std::size_t kPage = 4096;
constexpr int kPatterns = 4;

// Whether `from` reaches the memory of `to` from now on.
bool reach(const CudartApi& api, int from, int to) {
  int can = 0;
  check_cuda(api, "cudaDeviceCanAccessPeer", api.can_access_peer(&can, from, to));
  if (can == 0) return false;
  const CurrentDevice current(api, from);
  const int code = api.enable_peer_access(to, 0);
  if (code != 0) api.get_last_error();
  return code == 0 || code == kPeerAccessAlreadyEnabled;
}

void copy(const CudartApi& api, void* dst, const void* src, std::size_t bytes, int kind, CudaStream stream) {
  check_cuda(api, "cudaMemcpyAsync", api.memcpy_async(dst, src, bytes, kind, stream));
  check_cuda(api, "cudaStreamSynchronize", api.stream_synchronize(stream));
}

// Bytes that depend on their place, so that one at a wrong place shows.
void fill(std::vector<unsigned char>& bytes, int pattern) {
  std::uint32_t state = 2654435761U * static_cast<std::uint32_t>(pattern + 1);
  for (unsigned char& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<unsigned char>(state >> 24);
  }
}

}  // namespace

PeerPath try_peer_path(const CudartApi& api, const TrialSide& from, const TrialSide& to, std::size_t bytes) {
  // Both ways: which of the two a copy needs is the driver's affair.
  if (!reach(api, from.ordinal, to.ordinal) || !reach(api, to.ordinal, from.ordinal))
    return PeerPath::kNoAccess;
  std::vector<unsigned char> sent(bytes);
  std::vector<unsigned char> arrived(bytes);
  for (int pattern = 0; pattern < kPatterns; ++pattern) {
    fill(arrived, -pattern - 2);
    copy(api, to.memory, arrived.data(), bytes, kHostToDevice, to.stream);
    fill(sent, pattern);
    copy(api, from.memory, sent.data(), bytes, kHostToDevice, from.stream);
    if (api.memcpy_peer_async(to.memory, to.ordinal, from.memory, from.ordinal, bytes, from.stream) != 0) {
      api.get_last_error();
      return PeerPath::kNoAccess;
    }
    check_cuda(api, "cudaStreamSynchronize", api.stream_synchronize(from.stream));
    copy(api, arrived.data(), to.memory, bytes, kDeviceToHost, to.stream);
    if (arrived != sent) return PeerPath::kWrongBytes;
  }
  return PeerPath::kDirect;
}

void PeerCopies::Free::operator()(std::byte* memory) const { std::free(memory); }

PeerCopies::PeerCopies(const CudartApi& api, int ordinal, std::vector<Neighbour> neighbours)
    : api_(api), ordinal_(ordinal), neighbours_(std::move(neighbours)) {
  for (const Neighbour& each : neighbours_)
    arrivals_.push_back(each.direct ? nullptr : each.streams->arrivals());
  const auto direct = [](const Neighbour& each) { return each.direct; };
  if (std::all_of(neighbours_.begin(), neighbours_.end(), direct)) return;
  try {
    make_slots();
  } catch (...) {
    destroy();
    throw;
  }
}

PeerCopies::~PeerCopies() { destroy(); }

void PeerCopies::make_slots() {
  const std::size_t bytes = kPiece * slots_.size();
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, bytes)));
  if (memory_ == nullptr) throw std::bad_alloc();
  region_ = std::make_unique<PinnedRegion>(api_, memory_.get(), bytes);
  std::byte* begin = memory_.get();
  const auto make = [this](CudaEvent& event) {
    check_cuda(api_, "cudaEventCreateWithFlags", api_.event_create(&event, kEventDisableTiming));
  };
  for (Slot& slot : slots_) {
    slot.memory = std::exchange(begin, begin + kPiece);
    slot.emptied.assign(neighbours_.size(), nullptr);
    make(slot.filled);
    for (std::size_t i = 0; i < neighbours_.size(); ++i) {
      const CurrentDevice current(api_, neighbours_[i].ordinal);
      make(slot.emptied[i]);
    }
  }
}

// What cannot be given back is lost with the process; there is nobody left to tell.
void PeerCopies::destroy() noexcept {
  for (const Slot& slot : slots_) {
    if (slot.filled != nullptr) api_.event_destroy(slot.filled);
    for (CudaEvent event : slot.emptied) {
      if (event != nullptr) api_.event_destroy(event);
    }
  }
  slots_ = {};
  if (region_ == nullptr) return;
  try {
    const CurrentDevice current(api_, ordinal_);
    region_.reset();
  } catch (const CudaError&) {
    region_.reset();
  }
}

const Neighbour* PeerCopies::holder(const void* dst, std::int64_t bytes) const {
  if (bytes <= 0) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(dst);
  for (const Neighbour& neighbour : neighbours_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(neighbour.arena);
    if (address >= begin && address - begin < neighbour.bytes) return &neighbour;
  }
  return nullptr;
}

void PeerCopies::enqueue(const Neighbour& to, CudaStream stream, void* dst, const void* src,
                         std::size_t bytes) {
  if (to.direct) {
    check_cuda(api_, "cudaMemcpyPeerAsync",
               api_.memcpy_peer_async(dst, to.ordinal, src, ordinal_, bytes, stream));
    return;
  }
  const auto number = static_cast<std::size_t>(&to - neighbours_.data());
  auto* const target = static_cast<std::byte*>(dst);
  const auto* const source = static_cast<const std::byte*>(src);
  CudaEvent last = nullptr;
  for (std::size_t begin = 0; begin < bytes; begin += kPiece) {
    relay(number, stream, target + begin, source + begin, std::min(kPiece, bytes - begin));
    last = slots_[next_].last_emptied;
    next_ = (next_ + 1) % slots_.size();
  }
  check_cuda(api_, "cudaStreamWaitEvent", api_.stream_wait_event(stream, last, 0));
}

void PeerCopies::relay(std::size_t number, CudaStream stream, std::byte* dst, const std::byte* src,
                       std::size_t bytes) {
  Slot& slot = slots_[next_];
  CudaStream const arrivals = arrivals_[number];
  const auto wait = [this](CudaStream waiting, CudaEvent event) {
    check_cuda(api_, "cudaStreamWaitEvent", api_.stream_wait_event(waiting, event, 0));
  };
  const auto record = [this](CudaEvent event, CudaStream on) {
    check_cuda(api_, "cudaEventRecord", api_.event_record(event, on));
  };
  const auto move = [&](void* to, const void* from, int kind, CudaStream on) {
    check_cuda(api_, "cudaMemcpyAsync", api_.memcpy_async(to, from, bytes, kind, on));
  };
  if (slot.last_emptied != nullptr) wait(stream, slot.last_emptied);
  move(slot.memory, src, kDeviceToHost, stream);
  record(slot.filled, stream);
  wait(arrivals, slot.filled);
  move(dst, slot.memory, kHostToDevice, arrivals);
  record(slot.emptied[number], arrivals);
  slot.last_emptied = slot.emptied[number];
}

}  // namespace disco
