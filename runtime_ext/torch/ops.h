// The ops of a plan as boxed calls whose argument stacks are built once, over addresses that never change.
//
// A value lives in one storage: a fixed address inside an arena, or an external one whose pointer is swapped
// before each step. The tensors in the stacks are views of these storages, so a step builds no argument.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../core/program.h"
#include "backend.h"
#include "direct.h"
#include "fused.h"
#include "planned_alloc.h"
#include "rng.h"

namespace disco {

// Where the tensor that a functional call returns must be. `kPlaced`: its storage begins at the planned
// address. `kCopied`: it is copied there after the call (the op returns an alias, or lays the result out in
// its own way). `kIgnored`: nobody reads it.
enum class ResultMode : std::int64_t { kPlaced = 0, kCopied = 1, kIgnored = 2 };

struct ExpectedResult {
  ResultMode mode = ResultMode::kIgnored;
  at::Tensor where;
};

// Whose an op or a storage is: a device's of the run's own kind, or of one that lies in host memory.
enum class Side : std::uint8_t { kDevice, kHost };

// Where an op or a storage is. All of the host's own devices are one place.
struct Place {
  Side side;
  c10::Device device;
  bool operator==(const Place&) const = default;
};

// One prepared call. `label` is what error messages call it: the op and the module that issued it.
struct PreparedOp {
  c10::OperatorHandle handle;
  Place place;
  std::optional<DirectCall> direct;
  std::optional<FusedCall> fused;
  std::vector<c10::IValue> args;
  std::vector<ExpectedResult> results;
  std::vector<PlannedBlock> schedule;
  PlannedBlock loose;
  bool scheduled = false;
  c10::DispatchKeySet kernels;  // see Backend::kernels
  std::string label;
  std::optional<RngSite> rng;
  std::vector<std::int64_t> externals;  // storages that it uses whose pointers are swapped
  bool varies = false;                  // see OpTable::set_varying
  std::vector<PlannedBlock> room;  // of an op that varies: its schedule at first, which others stay within
};

// An op that depends on a length: see OpTable::set_varying.
struct VaryingOp {
  std::size_t op = 0;
  c10::IValue longest;
  c10::IValue shortest;
};

// What one call allocated while recorded, and what it returned. `result_blocks[i]` is the index of the block
// that holds the i-th returned tensor, or -1 when it lies in none of them.
struct RecordedCall {
  std::vector<RecordedBlock> blocks;
  std::vector<at::Tensor> results;
  std::vector<std::int64_t> result_blocks;
};

// This thread runs ops of engines from now on and does nothing else: what `run` sets up for each op stays.
void enter_engine_thread();

// As after enter_engine_thread(), until it goes out of scope: what the caller has set for its own ops
// (autocast, modes, grad mode) does not reach those of the engine.
class CallerGuards {
 public:
  // `plain`: the state of a thread on which nothing was set.
  explicit CallerGuards(const at::ThreadLocalState& plain);
  ~CallerGuards();
  CallerGuards(const CallerGuards&) = delete;
  CallerGuards& operator=(const CallerGuards&) = delete;

 private:
  at::ThreadLocalStateGuard state_;
  c10::InferenceMode inference_;
  EngineThreadScope engine_thread_;
};

// Storages and prepared calls of one plan. Built by one thread; then `run` may be called for different ops
// from different threads at once.
class OpTable {
 public:
  // Throws std::invalid_argument for a kind of device that there is no backend for.
  explicit OpTable(c10::Device device)
      : device_(device), backend_(Backend::of(device)), place_{Side::kDevice, device} {}

  // Where all is that is added from now on. `device` is of the table's own kind; calls that name the table's
  // device in an argument name `device` instead. At first it is the table's own.
  void set_device(c10::Device device);
  // The same for the host beside it.
  void set_host() { place_ = {Side::kHost, c10::Device(c10::DeviceType::CPU)}; }

  // Storage over `nbytes` at `ptr`, which the caller keeps alive. Returns its index.
  std::int64_t add_fixed(void* ptr, std::size_t nbytes);
  // Storage whose pointer is set by `bind_external` before each step.
  std::int64_t add_external(std::size_t nbytes);
  // Points an external storage at the first element of `tensor` and keeps the tensor until the next binding.
  // Throws std::invalid_argument when the tensor's extent or device is not the planned one.
  void bind_external(std::int64_t storage, const at::Tensor& tensor);
  // Lets go of the tensors bound last; their storages must be bound again before an op reads them.
  void release_externals();
  // The same for one.
  void release_external(std::int64_t storage) { bound_.at(static_cast<std::size_t>(storage)).reset(); }
  void* address(std::int64_t storage) const { return storages_[storage].data_ptr().get(); }

  // Adds the call `name.overload` with `args` encoded as in disco_accel/native/op_encoding.py. Throws
  // std::invalid_argument naming the argument that does not fit the schema, or is elsewhere than the op.
  std::int32_t add_op(const std::string& name, const std::string& overload, const c10::IValue& args,
                      const std::string& label);
  // Adds an expected result to an op, in the order of its returned tensors.
  void expect_result(std::int32_t op, ResultMode mode, const c10::IValue& where);
  // From now on the op's allocations are served from `blocks`, in order.
  void set_schedule(std::int32_t op, std::vector<PlannedBlock> blocks);
  // Room for what the op allocates beyond its schedule, see PlannedScope.
  void set_loose(std::int32_t op, PlannedBlock loose) { ops_.at(op).loose = loose; }
  // The op draws random numbers: see RngSite.
  void set_rng(std::int32_t op, std::int64_t slot, bool replay);

  // The op depends on a length: `set_length` gives it other arguments. It is complete. `longest`, as it is
  // now, and `shortest`: its encoded arguments, the place of each result, and the sizes of its allocations.
  void set_varying(std::int32_t op, c10::IValue longest, c10::IValue shortest);
  // Between steps: all ops that vary are at a length that is `below` the longest from now on, where the
  // shortest is `span` below it. Throws std::invalid_argument, and changes nothing then.
  void set_length(std::int64_t below, std::int64_t span);
  // Between steps: an external storage has so many bytes from now on.
  void resize_external(std::int64_t storage, std::size_t nbytes);

  // Throws std::invalid_argument naming the storage or op unless every fixed storage and every planned block
  // lies in an arena of its place; `places`: by arena. Storages of the host's side may also lie in a home or
  // in clean memory; no op writes to the latter, as far as its schema tells.
  void check_memory(const Memory& memory, const std::vector<Place>& places) const;
  // Bytes of an external storage. Throws std::invalid_argument if there is no such storage.
  std::size_t external_bytes(std::int64_t storage) const;

  // Runs an op on this thread. Throws std::runtime_error with the op's label.
  void run(std::int32_t op) const;
  // Whether what an op launches is the same in each step, but for the addresses of external storages: it
  // draws no random numbers, and what it allocates does not depend on values.
  bool repeats(std::int32_t op) const;
  // Appends the addresses of the external storages that an op uses.
  void external_addresses(std::int32_t op, std::vector<std::uint64_t>& words) const;
  // Whether `run` calls the op without the dispatcher.
  bool is_direct(std::int32_t op) const { return ops_.at(op).direct.has_value(); }
  // Runs an op with PyTorch's own allocator, and reports what it allocated and returned.
  RecordedCall record(std::int32_t op) const;

  const Place& place(std::int32_t op) const { return ops_.at(op).place; }
  std::size_t size() const { return ops_.size(); }
  std::size_t storages() const { return storages_.size(); }
  const std::string& label(std::int32_t op) const { return ops_.at(op).label; }
  c10::Device device() const { return device_; }
  const Backend& backend() const { return backend_; }

 private:
  PreparedOp prepared(const c10::OperatorHandle& handle, const c10::IValue& args,
                      const std::string& label) const;
  ExpectedResult expected(ResultMode mode, const c10::IValue& where, PreparedOp& op) const;
  PreparedOp at_length(const PreparedOp& op, const c10::IValue& encoded) const;
  c10::IValue decode(const c10::IValue& encoded, const c10::TypePtr& type) const;
  c10::IValue decode_list(c10::ArrayRef<c10::IValue> encoded, const c10::TypePtr& element) const;
  at::Tensor decode_tensor(c10::ArrayRef<c10::IValue> encoded) const;
  at::Tensor make_tensor(c10::ArrayRef<c10::IValue> encoded) const;
  bool is_external(const c10::StorageImpl* storage) const;
  void note_externals(const c10::IValue& value, std::vector<std::int64_t>& externals) const;
  c10::IValue decode_enum(const std::string& kind, const std::string& value) const;
  c10::Device decode_device(const std::string& name) const;
  const Backend& backend_of(Side side) const;
  static void check_place(const c10::IValue& value, c10::Device device);
  void run_boxed(const PreparedOp& op) const;
  void check_results(const PreparedOp& op, const std::vector<c10::IValue>& stack) const;

  c10::Device device_;
  const Backend& backend_;
  Place place_;  // of what is added next
  std::vector<c10::Storage> storages_;
  std::vector<Place> places_;  // of each storage
  std::vector<at::Tensor> bound_;
  std::vector<bool> external_;
  std::vector<std::int64_t> externals_;
  std::vector<PreparedOp> ops_;
  std::vector<VaryingOp> varying_;
  // Ops that see a storage in the same way share the tensor: a step then touches less memory.
  mutable std::map<std::vector<std::int64_t>, at::Tensor> tensors_;
  std::unique_ptr<RngSlots> rng_;
};

}  // namespace disco
