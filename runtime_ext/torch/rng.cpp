#include "rng.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <stdexcept>
#include <string>

namespace disco {
namespace {

// One for the process: every engine draws from the same default generators.
std::mutex& site_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

RngSlots::RngSlots(c10::Device device)
    : generator_(at::globalContext().defaultGenerator(device)), cpu_(device.is_cpu()) {}

void RngSlots::reserve(std::int64_t slot) {
  if (slot < -1) throw std::invalid_argument("slot " + std::to_string(slot) + " is negative");
  if (slot >= static_cast<std::int64_t>(states_.size())) states_.resize(static_cast<std::size_t>(slot) + 1);
}

void RngSlots::save(at::Generator& generator, GeneratorState& into) const {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (cpu_) {
    auto* const cpu = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
    into.engine = cpu->engine();
    into.next_float_normal = cpu->next_float_normal_sample();
    into.next_double_normal = cpu->next_double_normal_sample();
  } else {
    into.seed = generator.unsafeGetGeneratorImpl()->current_seed();
    into.offset = generator.unsafeGetGeneratorImpl()->get_offset();
  }
}

void RngSlots::load(at::Generator& generator, const GeneratorState& from) const {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (cpu_) {
    auto* const cpu = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
    cpu->set_engine(from.engine);
    cpu->set_next_float_normal_sample(from.next_float_normal);
    cpu->set_next_double_normal_sample(from.next_double_normal);
  } else {
    // Setting the seed resets the offset, so the offset comes second.
    generator.unsafeGetGeneratorImpl()->set_current_seed(from.seed);
    generator.unsafeGetGeneratorImpl()->set_offset(from.offset);
  }
}

void RngSlots::copy(at::Generator& from, at::Generator& to) {
  save(from, copied_);
  load(to, copied_);
}

void RngScope::enter() {
  lock_ = std::unique_lock(site_mutex());
  RngSlots& slots = *site_->slots;
  if (site_->slot >= 0) {
    GeneratorState& state = slots.states_[static_cast<std::size_t>(site_->slot)];
    if (site_->replay) {
      slots.save(slots.live_);
      slots.load(state);
    } else {
      slots.save(state);
    }
  }
  if (!site_->elsewhere) return;
  at::Generator borrower = *site_->elsewhere;
  slots.save(borrower, slots.borrower_);
  slots.copy(slots.generator_, borrower);
}

void RngScope::leave() {
  RngSlots& slots = *site_->slots;
  if (site_->elsewhere) {
    at::Generator borrower = *site_->elsewhere;
    slots.copy(borrower, slots.generator_);
    slots.load(borrower, slots.borrower_);
  }
  if (site_->replay) slots.load(slots.live_);
}

}  // namespace disco
