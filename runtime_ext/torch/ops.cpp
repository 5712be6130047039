#include "ops.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "../core/scope.h"
#include "ops_decode.h"
#include "wrapped_numbers.h"

namespace disco {
namespace {

using c10::IValue;
using c10::TypeKind;

// Calls fn with each tensor that a call left on its stack, in order: the elements of a returned list count as
// tensors, an optional one that is not there as an undefined one, numbers are skipped.
template <typename Fn>
void for_each_tensor(const std::vector<IValue>& stack, Fn fn) {
  for (const IValue& value : stack) {
    if (value.isTensor()) {
      fn(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) fn(tensor);
    } else if (value.isNone()) {
      fn(at::Tensor());
    }
  }
}

// What holds on a thread while it runs ops: no autograd, and its allocations are counted.
struct ThreadGuards {
  c10::InferenceMode inference;
  EngineThreadScope engine_thread;
};
thread_local bool guarded_for_good = false;

std::vector<IValue>& scratch_stack() {
  thread_local std::vector<IValue> stack;
  return stack;
}

struct StackCleaner {
  std::vector<IValue>& stack;
  ~StackCleaner() { stack.clear(); }
};

void call(const PreparedOp& op, std::vector<IValue>& stack) {
  if (op.kernels.empty()) {
    op.handle.callBoxed(stack);
  } else {
    op.handle.redispatchBoxed(op.kernels, &stack);
  }
}

bool inside(const Ranges& ranges, const void* ptr, std::size_t nbytes) {
  return nbytes <= static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) &&
         ranges.hold(ptr, static_cast<std::int64_t>(nbytes));
}

// Whether a tensor that lies in `ranges` is written to by the op, as its schema or its results say.
bool writes_to(const PreparedOp& op, const Ranges& ranges) {
  const auto lies_there = [&](const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    return storage.nbytes() > 0 && inside(ranges, storage.data_ptr().get(), storage.nbytes());
  };
  const auto& schema = op.handle.schema().arguments();
  std::vector<IValue> written;
  for (std::size_t i = 0; i < schema.size(); ++i) {
    if (schema[i].alias_info() != nullptr && schema[i].alias_info()->isWrite()) written.push_back(op.args[i]);
  }
  for (const ExpectedResult& result : op.results) {
    if (result.mode == ResultMode::kCopied) written.emplace_back(result.where);
  }
  bool found = false;
  for_each_tensor(
      written, [&](const at::Tensor& tensor) { found = found || (tensor.defined() && lies_there(tensor)); });
  return found;
}

std::string message_of(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return torch_error->what_without_backtrace();
  }
  return what_of(error);
}

}  // namespace

void enter_engine_thread() {
  static thread_local std::optional<ThreadGuards> guards;
  if (!guards) guards.emplace();
  guarded_for_good = true;
}

CallerGuards::CallerGuards(const at::ThreadLocalState& plain) : state_(plain) { guarded_for_good = true; }

CallerGuards::~CallerGuards() { guarded_for_good = false; }

void OpTable::set_device(c10::Device device) {
  if (device.type() != device_.type())
    bad_argument(device.str() + " is of another kind than " + device_.str());
  place_ = {Side::kDevice, device};
}

const Backend& OpTable::backend_of(Side side) const {
  return side == Side::kHost ? host_backend() : backend_;
}

std::int64_t OpTable::add_fixed(void* ptr, std::size_t nbytes) {
  storages_.emplace_back(c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(ptr, place_.device), nullptr,
                         false);
  places_.push_back(place_);
  external_.push_back(false);
  bound_.emplace_back();
  return static_cast<std::int64_t>(storages_.size()) - 1;
}

std::int64_t OpTable::add_external(std::size_t nbytes) {
  const std::int64_t index = add_fixed(nullptr, nbytes);
  external_.back() = true;
  externals_.push_back(index);
  return index;
}

void OpTable::bind_external(std::int64_t storage, const at::Tensor& tensor) {
  if (!external_.at(storage)) bad_argument("storage " + std::to_string(storage) + " is not external");
  const c10::Device device = storages_[storage].device();
  if (tensor.device() != device) {
    const char* where =
        places_[storage].side == Side::kHost ? ", the plan has it on " : ", the plan runs on ";
    bad_argument("is on " + tensor.device().str() + where + device.str());
  }
  std::int64_t extent = tensor.numel() > 0 ? 1 : 0;
  for (std::int64_t d = 0; extent > 0 && d < tensor.dim(); ++d)
    extent += (tensor.size(d) - 1) * tensor.stride(d);
  const std::size_t nbytes = static_cast<std::size_t>(extent) * tensor.element_size();
  if (nbytes != storages_[storage].nbytes()) {
    bad_argument("covers " + std::to_string(nbytes) + " bytes where the plan has " +
                 std::to_string(storages_[storage].nbytes()));
  }
  storages_[storage].unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(tensor.data_ptr(), device));
  bound_[storage] = tensor;
}

void OpTable::release_externals() {
  for (const std::int64_t storage : externals_) bound_[storage].reset();
}

// Kernels are called for their place without a look at the tensors.
void OpTable::check_place(const IValue& value, c10::Device device) {
  if (value.isList()) {
    for (const IValue& element : value.toListRef()) check_place(element, device);
    return;
  }
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor tensor = value.toTensor();
  if (tensor.device() != device && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    bad_argument("is on " + tensor.device().str() + ", the op runs on " + device.str());
  }
}

PreparedOp OpTable::prepared(const c10::OperatorHandle& handle, const IValue& args,
                             const std::string& label) const {
  const auto& [name, overload] = handle.operator_name();
  const c10::ArrayRef<IValue> encoded = tuple_elements(args);
  const auto& schema = handle.schema().arguments();
  if (encoded.size() != schema.size()) {
    bad_argument(label + ": " + std::to_string(encoded.size()) + " arguments given, the schema has " +
                 std::to_string(schema.size()));
  }
  const Backend& backend = backend_of(place_.side);
  PreparedOp op{handle, place_, {}, {}, {}, {}, {}, {}, false, backend.kernels(), label, {}, {}, false};
  for (std::size_t i = 0; i < schema.size(); ++i) {
    try {
      op.args.push_back(decode(encoded[i], schema[i].type()));
      check_place(op.args.back(), place_.device);
    } catch (const std::exception& error) {
      bad_argument(label + ": argument '" + schema[i].name() + "': " + message_of(error));
    }
  }
  for (const IValue& value : op.args) note_externals(value, op.externals);
  convert_numbers(name, op.args);
  const auto external = [](const void* table, const c10::StorageImpl* storage) {
    return static_cast<const OpTable*>(table)->is_external(storage);
  };
  if (name == kFusedOp && fused_kernel_is_for(op.args, place_.device.type()))
    op.fused = fused_call(op.args, external, this);
  if (backend.computes_small_ops()) op.direct = direct_call(name, overload, op.args, external, this);
  return op;
}

std::int32_t OpTable::add_op(const std::string& name, const std::string& overload, const IValue& args,
                             const std::string& label) {
  const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle.has_value()) bad_argument(label + ": no op " + name + "." + overload + " in this PyTorch");
  ops_.push_back(prepared(*handle, args, label));
  // Grows this thread's stack once, here: a step must not.
  scratch_stack().reserve(64);
  return static_cast<std::int32_t>(ops_.size()) - 1;
}

ExpectedResult OpTable::expected(ResultMode mode, const IValue& where, PreparedOp& op) const {
  ExpectedResult expected{mode, {}};
  if (mode != ResultMode::kIgnored) {
    expected.where = decode_tensor(tuple_elements(where));
    check_place(expected.where, op.place.device);
    note_externals(expected.where, op.externals);
  }
  return expected;
}

void OpTable::expect_result(std::int32_t op, ResultMode mode, const IValue& where) {
  ops_.at(op).results.push_back(expected(mode, where, ops_.at(op)));
}

void OpTable::set_schedule(std::int32_t op, std::vector<PlannedBlock> blocks) {
  ops_.at(op).schedule = std::move(blocks);
  ops_.at(op).scheduled = true;
}

void OpTable::check_memory(const Memory& memory, const std::vector<Place>& places) const {
  std::vector<std::pair<Place, Ranges>> arenas;
  for (const Place& place : places) {
    std::vector<Range> there;
    for (std::size_t i = 0; i < memory.arenas.size(); ++i) {
      if (places.at(i) == place) there.push_back(memory.arenas[i]);
    }
    arenas.emplace_back(place, Ranges(std::move(there)));
  }
  const Ranges homes(memory.states, Ranges::Adjacent::kApart);
  const Ranges clean(memory.clean);
  const Ranges nowhere{{}};
  const auto arena = [&](const Place& place) -> const Ranges& {
    const auto found =
        std::find_if(arenas.begin(), arenas.end(), [&](const auto& a) { return a.first == place; });
    return found == arenas.end() ? nowhere : found->second;
  };
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const void* const ptr = storages_[i].data_ptr().get();
    const std::size_t nbytes = storages_[i].nbytes();
    const bool at_home =
        places_[i].side == Side::kHost && (inside(homes, ptr, nbytes) || inside(clean, ptr, nbytes));
    if (!external_[i] && !at_home && !inside(arena(places_[i]), ptr, nbytes)) {
      bad_argument("storage " + std::to_string(i) + " of " + std::to_string(nbytes) +
                   " bytes lies outside the arenas of this run");
    }
  }
  for (const PreparedOp& op : ops_) {
    const bool planned = std::all_of(op.schedule.begin(), op.schedule.end(), [&](const PlannedBlock& block) {
      return inside(arena(op.place), block.ptr, block.nbytes);
    });
    if (!planned || !inside(arena(op.place), op.loose.ptr, op.loose.nbytes)) {
      bad_argument(op.label + ": an allocation is planned outside the arenas of this run");
    }
    if (op.place.side == Side::kHost && writes_to(op, clean)) {
      bad_argument(op.label + ": would write to host memory that is only read");
    }
  }
}

std::size_t OpTable::external_bytes(std::int64_t storage) const {
  if (storage < 0 || static_cast<std::size_t>(storage) >= external_.size() || !external_[storage]) {
    bad_argument("storage " + std::to_string(storage) + " is not external");
  }
  return storages_[storage].nbytes();
}

void OpTable::set_rng(std::int32_t op, std::int64_t slot, bool replay) {
  const c10::Device device = ops_.at(op).place.device;
  if (device.type() != device_.type()) {
    bad_argument("random numbers are drawn on " + device_.str() + " alone, not on the host beside it");
  }
  if (rng_ == nullptr) rng_ = std::make_unique<RngSlots>(device_);
  rng_->reserve(slot);
  ops_.at(op).rng = RngSite{rng_.get(), slot, replay};
  if (device != device_) ops_.at(op).rng->elsewhere = at::globalContext().defaultGenerator(device);
}

void OpTable::check_results(const PreparedOp& op, const std::vector<IValue>& stack) const {
  if (op.results.empty()) return;
  std::size_t next = 0;
  for_each_tensor(stack, [&](const at::Tensor& got) {
    if (next >= op.results.size()) return;
    const ExpectedResult& expected = op.results[next++];
    if (expected.mode == ResultMode::kIgnored) return;
    if (!got.defined()) throw std::runtime_error("result " + std::to_string(next - 1) + " is undefined");
    if (expected.mode == ResultMode::kCopied) {
      expected.where.copy_(got);
    } else if (got.data_ptr() != expected.where.data_ptr()) {
      throw std::runtime_error("result " + std::to_string(next - 1) + " is not at its planned address");
    }
  });
}

bool OpTable::is_external(const c10::StorageImpl* storage) const {
  return std::any_of(externals_.begin(), externals_.end(), [&](std::int64_t index) {
    return storages_[static_cast<std::size_t>(index)].unsafeGetStorageImpl() == storage;
  });
}

void OpTable::note_externals(const IValue& value, std::vector<std::int64_t>& externals) const {
  if (value.isList()) {
    for (const IValue& element : value.toListRef()) note_externals(element, externals);
    return;
  }
  if (!value.isTensor() || !value.toTensor().defined()) return;
  for (const std::int64_t index : externals_) {
    const c10::Storage& storage = storages_[static_cast<std::size_t>(index)];
    if (storage.unsafeGetStorageImpl() == value.toTensor().storage().unsafeGetStorageImpl())
      externals.push_back(index);
  }
}

bool OpTable::repeats(std::int32_t index) const {
  const PreparedOp& op = ops_.at(static_cast<std::size_t>(index));
  return op.place.side == Side::kDevice && !op.rng && op.scheduled && op.loose.nbytes == 0 && !op.varies;
}

void OpTable::external_addresses(std::int32_t index, std::vector<std::uint64_t>& words) const {
  for (const std::int64_t storage : ops_[static_cast<std::size_t>(index)].externals) {
    words.push_back(reinterpret_cast<std::uintptr_t>(address(storage)));
  }
}

void OpTable::run(std::int32_t index) const {
  const PreparedOp& op = ops_[static_cast<std::size_t>(index)];
  if (op.direct) {
    op.direct->run();
    return;
  }
  std::optional<ThreadGuards> guards;
  if (!op.fused && !guarded_for_good) guards.emplace();
  try {
    if (op.fused) {
      op.fused->run();
    } else {
      run_boxed(op);
    }
  } catch (const std::exception& error) {
    throw std::runtime_error(op.label + ": " + message_of(error));
  }
}

void OpTable::run_boxed(const PreparedOp& op) const {
  std::vector<IValue>& stack = scratch_stack();
  const StackCleaner cleaner{stack};
  const RngScope rng(op.rng ? &*op.rng : nullptr);
  stack.insert(stack.end(), op.args.begin(), op.args.end());
  if (!op.scheduled) {
    call(op, stack);
    check_results(op, stack);
    return;
  }
  const PlannedScope scope(backend_of(op.place.side).memory(), op.schedule, op.loose);
  call(op, stack);
  scope.finish();
  check_results(op, stack);
  stack.clear();
}

RecordedCall OpTable::record(std::int32_t index) const {
  const PreparedOp& op = ops_.at(static_cast<std::size_t>(index));
  const c10::InferenceMode inference;
  std::vector<IValue> stack(op.args);
  RecordedCall recorded;
  try {
    const RecordScope scope(backend_of(op.place.side).memory());
    if (op.direct) {
      op.direct->run();
      stack.clear();
    } else {
      call(op, stack);
    }
    recorded.blocks = scope.blocks();
  } catch (const std::exception& error) {
    throw std::runtime_error(op.label + ": " + message_of(error));
  }
  for_each_tensor(stack, [&](const at::Tensor& got) {
    std::int64_t block = -1;
    for (std::size_t i = 0; got.defined() && i < recorded.blocks.size(); ++i) {
      const RecordedBlock& candidate = recorded.blocks[i];
      if (candidate.freed < 0 && candidate.ptr == got.storage().data_ptr().get())
        block = static_cast<std::int64_t>(i);
    }
    recorded.results.push_back(got);
    recorded.result_blocks.push_back(block);
  });
  return recorded;
}

}  // namespace disco
