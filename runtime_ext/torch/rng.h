// Random numbers in a step: the user's own generator, drawn from in the order in which eager execution would.
//
// A *site* is an op that draws. The plan's edges order the sites that draw live. A site with a twin notes the
// generator's state that it starts from in a slot; the twin, its recomputation, starts from that state and
// leaves the generator as it found it. A site on another GPU than the script's lends that GPU's generator the
// state of the script's for the launch: GPUs of one model draw the same numbers from the same state.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace disco {

// All that decides what a generator gives next. A CPU generator uses the first three fields, one of an
// accelerator the last two. Copying allocates nothing.
struct GeneratorState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

// The default generator of one device with one state per slot.
class RngSlots {
 public:
  explicit RngSlots(c10::Device device);

  // Makes room for slot numbers up to `slot`; only while no op runs.
  void reserve(std::int64_t slot);
  std::size_t size() const { return states_.size(); }

 private:
  friend class RngScope;
  void save(GeneratorState& into) { save(generator_, into); }
  void load(const GeneratorState& from) { load(generator_, from); }
  void save(at::Generator& generator, GeneratorState& into) const;
  void load(at::Generator& generator, const GeneratorState& from) const;
  // One's state becomes the other's.
  void copy(at::Generator& from, at::Generator& to);

  at::Generator generator_;
  bool cpu_;
  std::vector<GeneratorState> states_;
  // Guarded by the mutex that every RngScope holds.
  GeneratorState live_;      // while a replay runs
  GeneratorState borrower_;  // of another device's generator, while it has this one's state
  GeneratorState copied_;
};

// What a random op does with its slot: -1 is a live draw that nothing replays.
struct RngSite {
  RngSlots* slots = nullptr;
  std::int64_t slot = -1;
  bool replay = false;
  std::optional<at::Generator> elsewhere = {};  // of the op's device, where that is not the slots'
};

// Surrounds one random op. One site of the process runs at a time, so that a live draw never sees the state
// of a replay on another stream; without a site it does nothing.
class RngScope {
 public:
  explicit RngScope(const RngSite* site) : site_(site) {
    if (site_ != nullptr) enter();
  }
  ~RngScope() {
    if (site_ != nullptr) leave();
  }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;

 private:
  void enter();
  void leave();

  const RngSite* site_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace disco
