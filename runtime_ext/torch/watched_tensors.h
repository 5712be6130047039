// Contents of host tensors compared with an earlier look at them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "content_hash.h"
#include "write_watch.h"

namespace disco {

// Host tensors as they were when this was made. Of those in memory that the write watch covers nothing is
// read but the pages that they share with a neighbour, once those are written to; of all others, every byte
// each time.
class WatchedTensors : public torch::CustomClassHolder, private WriteListener {
 public:
  // Throws std::invalid_argument for a tensor that is not on the CPU.
  explicit WatchedTensors(std::vector<at::Tensor> tensors);
  ~WatchedTensors() override;
  WatchedTensors(const WatchedTensors&) = delete;
  WatchedTensors& operator=(const WatchedTensors&) = delete;

  // Whether one of them lies elsewhere now.
  bool moved() const;
  // Whether one of them was moved or written to. A write to a whole page counts even if it changed nothing.
  bool changed() { return begin_check() || finish_check(); }
  // The same in two parts: whether a change shows at once, else the reading of much begins in threads of its
  // own; and what came of that. Writes in between may or may not be noticed, by this check and surely by the
  // next.
  bool begin_check();
  bool finish_check();
  // Bytes that changed() reads each time.
  std::int64_t hashed_bytes() const;
  // For disco_tensors_changed: to call a method by way of TorchScript takes tens of microseconds in a step.
  std::int64_t address() const { return reinterpret_cast<std::int64_t>(this); }

 private:
  // Bytes [begin, end) of one page that may hold bytes of others.
  struct Border {
    std::uintptr_t begin, end;
    std::uint64_t hash;
  };
  struct Range {
    std::uintptr_t begin, end;
  };
  // Of all that must be read, with the copies that were made to read it.
  struct Reading {
    explicit Reading(const std::vector<at::Tensor>& tensors);
    std::vector<at::Tensor> packed;
    SpansHash hash;
  };

  void written(std::uintptr_t begin, std::uintptr_t end) noexcept override;
  void lost() noexcept override { written_ = true; }
  void protect(std::uintptr_t begin, std::uintptr_t end);
  bool finish_reading();
  // There a thread of the parent's may hold checking_ for ever.
  bool in_child() const { return process_ != getpid(); }
  std::uint64_t sample() const;

  const pid_t process_ = getpid();
  std::vector<at::Tensor> tensors_;
  // Kept, so that no other memory can appear at the address of a tensor whose storage was replaced.
  std::vector<OwnStorage> storages_;
  std::vector<const void*> addresses_;
  std::vector<std::uintptr_t> regions_;
  std::vector<Range> whole_pages_;
  std::vector<Border> borders_;
  std::vector<at::Tensor> hashed_;
  std::uint64_t hash_ = 0;
  // In memory that devices write to, with how often each was written to by PyTorch's count. Of other memory
  // that count says nothing new: it rises where nothing was written, too, as by set_ to the same storage.
  std::vector<at::Tensor> sampled_;
  std::vector<std::int64_t> versions_;
  std::uint64_t sample_ = 0;
  // Of the check: a second one that begins before the first has finished replaces its reading with a later
  // one.
  std::mutex checking_;
  std::unique_ptr<Reading> reading_;
  // Once a change was noticed it stays one.
  std::atomic<bool> written_ = false;
};

// All of `tensors` are about to be rewritten: whoever watches them hears of it now, and no page of theirs
// alone is protected until somebody looks again. Those that no kernel watches are passed over.
void expect_rewrite_of(const std::vector<at::Tensor>& tensors);

// Whether this PyTorch can refuse it for a while; the two functions do nothing where it cannot.
bool can_refuse_data_access();
// Until allow_data_access each access to the data of these tensors' storages, through whichever tensor over
// them, throws with `message`. Addresses that somebody has already are not affected.
void refuse_data_access(const std::vector<at::Tensor>& tensors, const std::string& message);
void allow_data_access(const std::vector<at::Tensor>& tensors);

}  // namespace disco
