// Copies from one GPU to another: straight where both reach each other's memory and the bytes arrive, else
// through page-locked host memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_device.h"

namespace disco {

// How bytes get from one GPU to another, and why.
enum class PeerPath : std::uint8_t {
  kDirect = 0,      // a copied pattern has arrived
  kNoAccess = 1,    // the system does not let one reach the other's memory, or refuses such copies
  kWrongBytes = 2,  // it does, but other bytes arrived than were sent: some drivers do so
};

// A GPU's memory and streams, for a trial.
struct TrialSide {
  int ordinal = 0;
  void* memory = nullptr;
  CudaStream stream = nullptr;
};

// Lets the two reach each other's memory, if the system allows it, and copies patterns of `bytes` bytes from
// one to the other. Nothing else uses their memory and streams meanwhile. Throws CudaError.
PeerPath try_peer_path(const CudartApi& api, const TrialSide& from, const TrialSide& to, std::size_t bytes);

// The copies of one GPU to its neighbours. Allocates nothing after construction.
class PeerCopies {
 public:
  static constexpr std::size_t kPiece = std::size_t{4} << 20;

  // Throws CudaError. `ordinal` is current.
  PeerCopies(const CudartApi& api, int ordinal, std::vector<Neighbour> neighbours);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // The neighbour in whose arena [dst, dst + bytes) lies; nullptr if it is none's.
  const Neighbour* holder(const void* dst, std::int64_t bytes) const;
  // The copy is over when `stream`, of this GPU, gets to the next work enqueued there. Through host memory it
  // goes in pieces, one on its way down while the one before is on its way up. Throws CudaError.
  void enqueue(const Neighbour& to, CudaStream stream, void* dst, const void* src, std::size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  // One piece on its way.
  struct Slot {
    std::byte* memory = nullptr;
    CudaEvent filled = nullptr;        // on this GPU
    std::vector<CudaEvent> emptied;    // on each neighbour
    CudaEvent last_emptied = nullptr;  // of these the one recorded last; none: never used
  };

  void make_slots();
  void destroy() noexcept;
  void relay(std::size_t number, CudaStream stream, std::byte* dst, const std::byte* src, std::size_t bytes);

  CudartApi api_;
  int ordinal_;
  std::vector<Neighbour> neighbours_;
  std::vector<CudaStream> arrivals_;  // of each neighbour; null where copies go straight
  std::unique_ptr<std::byte[], Free> memory_;
  std::unique_ptr<PinnedRegion> region_;
  std::array<Slot, 2> slots_;
  std::size_t next_ = 0;
};

}  // namespace disco
