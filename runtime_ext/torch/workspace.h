// The memory that libraries work in when they multiply matrices, one piece for each stream of the engine.
//
// PyTorch takes it from its allocator at the first product of a thread on a stream and keeps it in a table
// that anybody may clear. In a step that allocation would belong to no schedule, so each engine has products
// made on its streams before (BlasWarmup), and again after the table was cleared. Work on a stream never
// overlaps, so the loop threads of all engines are given the same piece.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace disco {

class Workspace {
 public:
  // That of `stream`, a native handle; made at the first call, and never destroyed.
  static Workspace& of(const void* stream);
  // Frees the memory of all of them that PyTorch's table does not hold. What streams still do comes before
  // its reuse.
  static void release_unused();

  // Goes up whenever PyTorch gives a piece back: then it must be taken again before the next op.
  std::uint64_t returned() const { return returned_.load(std::memory_order_acquire); }

  // Until this is called again with false, release_unused() frees nothing of this one, but notes that it was
  // asked: recorded launches use it.
  void keep(bool on);

  // From now on this thread runs ops that count on what was returned `seen` times being taken.
  void watch(std::uint64_t seen);
  // For the allocator's decorator: the workspace that an op of this thread may be asking for within a step,
  // because somebody has cleared PyTorch's table since watch(); else nullptr.
  static Workspace* cleared(std::size_t nbytes);

  // A block of `nbytes` bytes that all holders share, made by `allocate` where there is none so large. For
  // the allocator's decorator, with the stream current.
  template <typename Allocate>
  c10::DataPtr take(std::size_t nbytes, c10::Device device, Allocate allocate) {
    const std::lock_guard lock(mutex_);
    void* ptr = nullptr;
    for (const Piece& piece : pieces_) {
      if (piece.nbytes >= nbytes) ptr = piece.block.get();
    }
    if (ptr == nullptr) {
      pieces_.push_back({nbytes, allocate(nbytes)});
      ptr = pieces_.back().block.get();
    }
    ++holders_;
    release_asked_ = false;
    return {ptr, this, &Workspace::give_back, device};
  }

 private:
  struct Piece {
    std::size_t nbytes;
    c10::DataPtr block;
  };
  static void give_back(void* workspace);

  std::mutex mutex_;
  std::vector<Piece> pieces_;
  std::int64_t holders_ = 0;
  std::int64_t kept_ = 0;
  bool release_asked_ = false;  // while it was kept and nobody held it
  std::atomic<std::uint64_t> returned_{0};
};

// Until it goes out of scope, what this thread allocates on the device is a stream's workspace.
class WorkspaceScope {
 public:
  explicit WorkspaceScope(Workspace& workspace);
  ~WorkspaceScope();
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;
  // Of the calling thread; nullptr outside of any.
  static Workspace* current();
};

}  // namespace disco
