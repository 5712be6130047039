// The engine as torchbind classes: what disco_accel/execute/executor.py drives. torchbind releases the GIL
// around every method, so a wait here stops no Python thread.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/cuda_device.h"
#include "../core/engine.h"
#include "../core/host_device.h"
#include "arena.h"
#include "cuda_side.h"
#include "ops.h"
#include "planned_alloc.h"
#include "watch.h"

namespace disco {
namespace {

using Ints = std::vector<std::int64_t>;

constexpr double kDrainSeconds = 5;  // that a device which has stalled is given at the end of its engine

using Watch = void (*)();

Watch watch_function(const char* name) { return reinterpret_cast<Watch>(dlsym(RTLD_DEFAULT, name)); }

// Tells the malloc watch, where there is one, of this thread and of its OpenMP workers, which stay the same
// as long as it lives.
void watch_thread(int workers) {
  static const Watch enter = watch_function("disco_malloc_watch_enter");
  if (enter == nullptr) return;
#pragma omp parallel num_threads(workers)
  enter();
}

void unwatch_thread() {
  static const Watch leave = watch_function("disco_malloc_watch_leave");
  if (leave != nullptr) leave();
}

// OpenMP's thread count is per thread, unlike at::set_num_threads, which leaks to the whole process. ATen
// sets its own count lazily, once per thread: make it do so first.
void prepare_compute_thread(int count) {
  enter_engine_thread();
  at::get_num_threads();
  omp_set_num_threads(count);
  watch_thread(count);
  using MklSetLocal = int (*)(int);
  static const auto mkl_set_local =
      reinterpret_cast<MklSetLocal>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));
  if (mkl_set_local != nullptr) mkl_set_local(count);
}

std::size_t byte_count(std::int64_t nbytes) {
  if (nbytes < 0) throw std::invalid_argument("a size of " + std::to_string(nbytes) + " bytes");
  return static_cast<std::size_t>(nbytes);
}

struct TorchOps : torch::CustomClassHolder {
  explicit TorchOps(const std::string& device) : table(c10::Device(device)) {
    if (table.device().is_cpu()) install_cpu_decorator();
  }

  std::int64_t add_fixed(std::int64_t address, std::int64_t nbytes) {
    return table.add_fixed(reinterpret_cast<void*>(address), byte_count(nbytes));
  }
  std::int64_t add_external(std::int64_t nbytes) { return table.add_external(byte_count(nbytes)); }
  std::int64_t add_op(const std::string& name, const std::string& overload, const c10::IValue& args,
                      const std::string& label) {
    return table.add_op(name, overload, args, label);
  }
  void expect_result(std::int64_t op, std::int64_t mode, const c10::IValue& where) {
    table.expect_result(checked(op), static_cast<ResultMode>(mode), where);
  }
  void set_schedule(std::int64_t op, const Ints& addresses, const Ints& sizes) {
    std::vector<PlannedBlock> blocks;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      blocks.push_back({reinterpret_cast<void*>(addresses[i]), byte_count(sizes.at(i))});
    }
    table.set_schedule(checked(op), std::move(blocks));
  }
  void set_loose(std::int64_t op, std::int64_t address, std::int64_t nbytes) {
    table.set_loose(checked(op), {reinterpret_cast<void*>(address), byte_count(nbytes)});
  }
  void set_rng(std::int64_t op, std::int64_t slot, bool replay) { table.set_rng(checked(op), slot, replay); }
  void run(std::int64_t op) { table.run(checked(op)); }
  bool is_direct(std::int64_t op) const { return table.is_direct(checked(op)); }

  // (block sizes, born, freed, returned tensors, block of each returned tensor; undefined tensors have block
  // -2)
  std::tuple<Ints, Ints, Ints, std::vector<at::Tensor>, Ints> record(std::int64_t op) {
    const RecordedCall call = table.record(checked(op));
    Ints sizes, born, freed, where;
    std::vector<at::Tensor> tensors;
    for (const RecordedBlock& block : call.blocks) {
      sizes.push_back(static_cast<std::int64_t>(block.nbytes));
      born.push_back(block.born);
      freed.push_back(block.freed);
    }
    for (std::size_t i = 0; i < call.results.size(); ++i) {
      const bool defined = call.results[i].defined();
      where.push_back(defined ? call.result_blocks[i] : -2);
      if (defined) tensors.push_back(call.results[i]);
    }
    return {sizes, born, freed, tensors, where};
  }
  // Seconds of each of `repeats` runs.
  std::vector<double> time(std::int64_t op, std::int64_t repeats) {
    std::vector<double> seconds;
    for (std::int64_t i = 0; i < repeats; ++i) {
      const std::int64_t start = now_ns();
      table.run(checked(op));
      seconds.push_back(static_cast<double>(now_ns() - start) * 1e-9);
    }
    return seconds;
  }
  std::int32_t checked(std::int64_t op) const {
    if (op < 0 || op >= static_cast<std::int64_t>(table.size()))
      throw std::invalid_argument("no op " + std::to_string(op));
    return static_cast<std::int32_t>(op);
  }

  OpTable table;
};

// What an external tensor must look like. Without `known_layout` only the dtype counts.
struct ExternalLayout {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  Ints shape, stride;
  bool known_layout = false;
};

std::string text_of(c10::ArrayRef<std::int64_t> values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

bool same_strides(const at::Tensor& tensor, const Ints& stride) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != stride[static_cast<std::size_t>(d)]) return false;
  }
  return true;
}

void check_layout(const at::Tensor& tensor, const ExternalLayout& planned) {
  if (tensor.scalar_type() != planned.dtype) {
    throw std::invalid_argument(std::string("is ") + c10::toString(tensor.scalar_type()) +
                                ", the plan reads " + c10::toString(planned.dtype));
  }
  if (!planned.known_layout) return;
  if (tensor.sizes() != planned.shape) {
    throw std::invalid_argument("has shape " + text_of(tensor.sizes()) + ", the plan was made for " +
                                text_of(planned.shape));
  }
  if (tensor.numel() > 0 && !same_strides(tensor, planned.stride)) {
    throw std::invalid_argument("has strides " + text_of(tensor.strides()) + ", the plan was made for " +
                                text_of(planned.stride));
  }
}

struct Settings {
  EngineOptions engine;
  HostDeviceOptions host;
  int compute_threads = 1;
};

Settings read_settings(const c10::Dict<std::string, double>& values) {
  const auto get = [&](const char* key) { return values.at(key); };
  Settings settings;
  settings.engine.dispatch = static_cast<Dispatch>(static_cast<int>(get("dispatch")));
  settings.engine.seed = static_cast<std::uint64_t>(get("seed"));
  settings.engine.lookahead = static_cast<int>(get("lookahead"));
  settings.engine.stall_timeout = get("stall_timeout");
  settings.engine.time_ops = get("time_ops") != 0;
  settings.compute_threads = static_cast<int>(get("compute_threads"));
  settings.host.compute_streams = static_cast<int>(get("compute_streams"));
  settings.host.inline_compute = get("inline_compute") != 0;
  settings.host.link_jitter = get("link_jitter");
  settings.host.link_jitter_seed = static_cast<std::uint64_t>(get("link_jitter_seed"));
  return settings;
}

void check_table(const at::Tensor& table, std::int64_t columns, const char* name) {
  if (table.scalar_type() != at::kLong || !table.device().is_cpu() || !table.is_contiguous() ||
      table.dim() != 2 || table.size(1) != columns) {
    throw std::invalid_argument(std::string(name) + " must be a contiguous int64 table [n, " +
                                std::to_string(columns) + "] on the CPU");
  }
}

// `value` as a T; what does not fit in its Whole is refused, not cut.
template <typename T, typename Whole = T>
T narrow(std::int64_t value, const char* what) {
  if (value < std::numeric_limits<Whole>::min() || value > std::numeric_limits<Whole>::max()) {
    throw std::invalid_argument(std::string("program: ") + what + " " + std::to_string(value));
  }
  return static_cast<T>(value);
}

// `vertices` is int64 [n, 7]: kind, device, op, dst, src, bytes, flags; `edges` is int64 [m, 2].
Program read_program(const at::Tensor& vertices, const at::Tensor& edges) {
  check_table(vertices, 7, "vertices");
  check_table(edges, 2, "edges");
  ProgramBuilder builder;
  builder.reserve(static_cast<std::size_t>(vertices.size(0)), static_cast<std::size_t>(edges.size(0)));
  const auto* row = vertices.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < vertices.size(0); ++i, row += 7) {
    builder.add({narrow<Kind, std::uint8_t>(row[0], "kind"), narrow<std::int32_t>(row[1], "device"),
                 narrow<std::int32_t>(row[2], "op"), reinterpret_cast<void*>(row[3]),
                 reinterpret_cast<const void*>(row[4]), row[5], narrow<std::uint8_t>(row[6], "flags")});
  }
  const auto* edge = edges.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < edges.size(0); ++i, edge += 2) {
    builder.edge(narrow<std::int32_t>(edge[0], "edge"), narrow<std::int32_t>(edge[1], "edge"));
  }
  return std::move(builder).build();
}

Range range_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), static_cast<std::int64_t>(tensor.nbytes())};
}

// The last word on a plan: whatever made it, nothing that it runs touches other memory than `memory`. Throws
// std::invalid_argument. `copied` as for TorchEngine.
void check_program(const Program& program, const OpTable& table, const Memory& memory,
                   const at::Tensor& copied) {
  std::string message = program.validate(static_cast<int>(memory.arenas.size()));
  if (message.empty()) message = program.validate_memory(memory);
  if (!message.empty()) throw std::invalid_argument(message);
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (program.kind[v] == Kind::kKernel && static_cast<std::size_t>(program.op[v]) >= table.size()) {
      throw std::invalid_argument("vertex " + std::to_string(v) + " (kernel): no op " +
                                  std::to_string(program.op[v]));
    }
  }
  table.check_memory(Ranges(memory.arenas));
  check_table(copied, 2, "copied");
  const auto* pair = copied.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < copied.size(0); ++i, pair += 2) {
    if (pair[1] < 0 || pair[1] >= program.size() || program.kind[pair[1]] != Kind::kTransfer ||
        static_cast<std::size_t>(program.bytes[pair[1]]) > table.external_bytes(pair[0])) {
      throw std::invalid_argument("vertex " + std::to_string(pair[1]) +
                                  " is no transfer within external storage " + std::to_string(pair[0]));
    }
  }
}

at::Tensor copy_of(const at::Tensor& value, c10::Device device) {
  if (!device.is_cpu() || !value.is_non_overlapping_and_dense())
    return value.to(device, false, /*copy=*/true);
  at::Tensor copy = at::detail::empty_strided_cpu(value.sizes(), value.strides(), value.scalar_type());
  if (value.numel() > 0) std::memcpy(copy.mutable_data_ptr(), value.const_data_ptr(), value.nbytes());
  return copy;
}

struct TorchEngine : torch::CustomClassHolder, OpRunner {
  // `copied` is int64 [k, 2]: the storage of an external input and a transfer that reads it. All memory that
  // the program names lies in `arenas`, one for each device, in `host`, where values are offloaded, and in
  // `clean`, which is only read; all three are kept alive. `links` has a bandwidth and a latency for each
  // device. Throws std::invalid_argument for a program that would touch any other memory.
  TorchEngine(c10::intrusive_ptr<TorchOps> ops, const at::Tensor& vertices, const at::Tensor& edges,
              const at::Tensor& copied, std::vector<at::Tensor> arenas, const at::Tensor& host,
              const std::vector<at::Tensor>& clean, const c10::Dict<std::string, double>& options,
              const std::vector<double>& links)
      : ops_(std::move(ops)), keep_(std::move(arenas)), pid_(getpid()) {
    Memory memory;
    for (const at::Tensor& arena : keep_) memory.arenas.push_back(range_of(arena));
    memory.host = range_of(host);
    for (const at::Tensor& weights : clean) memory.clean.push_back(range_of(weights));
    keep_.push_back(host);
    keep_.insert(keep_.end(), clean.begin(), clean.end());
    Program program = read_program(vertices, edges);
    check_program(program, ops_->table, memory, copied);
    if (links.size() != 2 * memory.arenas.size()) {
      throw std::invalid_argument("links has " + std::to_string(links.size()) + " figures for " +
                                  std::to_string(memory.arenas.size()) + " devices");
    }
    layouts_.resize(ops_->table.storages());
    const auto* pair = copied.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < copied.size(0); ++i, pair += 2) copied_.emplace_back(pair[0], pair[1]);
    Settings settings = read_settings(options);
    compute_threads_ = settings.compute_threads;
    settings.host.on_compute_thread = [this](int stream) {
      if (stream == 0) plain_.emplace();
      prepare_compute_thread(compute_threads_);
    };
    std::vector<std::unique_ptr<Device>> devices;
    if (ops_->table.device().is_cuda()) {
      const c10::Device where = ops_->table.device();
      if (!where.has_index()) throw std::invalid_argument("a CUDA device needs its index, as in cuda:0");
      CudaDeviceOptions cuda;
      cuda.ordinal = where.index();
      cuda.compute_streams = settings.host.compute_streams;
      cuda.window = std::max(cuda.window, settings.engine.lookahead + 2);
      const CudartApi api = CudartApi::load();
      cuda.streams = CudaStreams::shared(api, cuda.ordinal);
      auto device = std::make_unique<CudaDevice>(api, cuda);
      cuda_ = device.get();
      caller_ = std::make_unique<CallerOrder>(where);
      for (int stream = 0; stream < cuda.compute_streams; ++stream) {
        warmups_.emplace_back(where, cuda_->native_stream(stream));
      }
      devices.push_back(std::move(device));
      for (const at::Tensor& tensor : keep_) {
        if (!tensor.device().is_cpu()) {
          planned_ranges_.add(tensor);
        }
      }
    } else {
      for (std::size_t d = 0; 2 * d < links.size(); ++d) {
        HostDeviceOptions host = settings.host;
        host.link_bandwidth = links[2 * d];
        host.link_latency = links.at(2 * d + 1);
        devices.push_back(std::make_unique<HostDevice>(host));
      }
    }
    engine_ = std::make_unique<Engine>(std::move(program), std::move(devices), *this, settings.engine);
  }

  // The arena itself is freed by whoever holds it last, so its range must be forgotten first.
  ~TorchEngine() override {
    // In a forked child the engine's threads do not exist, so nothing could end them.
    if (pid_ != getpid()) {
      static_cast<void>(engine_.release());
      planned_ranges_.bases.clear();
      return;
    }
    // Work that a device never ends may write to its memory for ever: all of that stays.
    if (cuda_ != nullptr && engine_->last_error().draining && !engine_->abort(kDrainSeconds)) {
      static_cast<void>(engine_.release());
      planned_ranges_.bases.clear();
      new std::vector<at::Tensor>(std::move(keep_));
      static_cast<void>(ops_.release());
      static_cast<void>(caller_.release());
      return;
    }
    engine_.reset();
  }

  void run(std::int32_t op, int /*device*/, int stream) override {
    if (op == failing_)
      throw std::runtime_error(ops_->table.label(op) + ": failed because a test asked for it");
    if (cuda_ != nullptr) {
      const StreamScope scope(ops_->table.device(), cuda_->native_stream(stream));
      warmups_[static_cast<std::size_t>(stream)].run();
      ops_->table.run(op);
    } else {
      ops_->table.run(op);
    }
  }

  // A caller's own OpenMP team serves the ops if it has the size that they were recorded with.
  bool enter() override {
    if (cuda_ != nullptr || !plain_ || at::get_num_threads() != compute_threads_) return false;
    // Without the memory for that the loop thread runs the ops.
    try {
      guards_.emplace(*plain_);
    } catch (const std::bad_alloc&) {
      return false;
    }
    watch_thread(compute_threads_);
    return true;
  }
  void leave() override {
    guards_.reset();
    unwatch_thread();
  }

  void expect_dtype(std::int64_t storage, const std::string& dtype) {
    layouts_.at(storage).dtype = c10::getStringToDtypeMap().at(dtype);
  }
  void expect_layout(std::int64_t storage, const std::string& dtype, Ints shape, Ints stride) {
    layouts_.at(storage) = {c10::getStringToDtypeMap().at(dtype), std::move(shape), std::move(stride), true};
  }

  // Binds externals[i] to storages[i]. The message of a failure starts with the position i.
  void bind(const Ints& storages, const std::vector<at::Tensor>& externals) {
    for (std::size_t i = 0; i < storages.size(); ++i) {
      try {
        ops_->table.bind_external(storages[i], externals.at(i));
        const ExternalLayout& layout = layouts_.at(storages[i]);
        if (layout.dtype != c10::ScalarType::Undefined) check_layout(externals[i], layout);
      } catch (const std::exception& error) {
        throw std::invalid_argument(std::to_string(i) + ":" + error.what());
      }
      for (const auto& [storage, vertex] : copied_) {
        if (storage == storages[i]) {
          engine_->set_source(static_cast<std::int32_t>(vertex), externals[i].const_data_ptr());
        }
      }
    }
  }
  // For tests: from now on op number `op` fails as if it had thrown; -1 = none. Call between steps.
  void fail_at(std::int64_t op) { failing_ = static_cast<std::int32_t>(op); }
  void begin() { start(Next::kAnything); }
  // begin() and the first wait_out() in one.
  std::int64_t run_out(double timeout) {
    start(Next::kWait);
    return wait_out(timeout);
  }
  void start(Next next) {
    allocations_before_ = engine_allocations();
    if (cuda_ != nullptr) caller_->put_after_caller(*cuda_);
    engine_->begin(next);
  }
  std::int64_t wait_out(double timeout) { return static_cast<std::int64_t>(engine_->wait_out(timeout)); }
  std::int64_t wait_end(double timeout) { return static_cast<std::int64_t>(engine_->wait_end(timeout)); }
  void deliver() { open_gate(Next::kAnything); }
  // deliver() and the first wait_end() in one.
  std::int64_t run_end(double timeout) {
    open_gate(Next::kWait);
    return wait_end(timeout);
  }
  void open_gate(Next next) {
    if (cuda_ != nullptr) caller_->put_after_caller(*cuda_);
    engine_->deliver(next);
  }
  bool abort(double timeout) { return engine_->abort(timeout); }
  void invalidate() { engine_->invalidate(); }
  void set_tracing(bool on) { engine_->set_tracing(on); }
  // Status, position of the vertex, message, and whether the device found it later, is lost, still drains.
  std::tuple<std::int64_t, std::int64_t, std::string, bool, bool, bool> last_error() {
    const EngineError& error = engine_->last_error();
    return {static_cast<std::int64_t>(error.status),
            error.vertex,
            error.message,
            error.later,
            error.lost,
            error.draining};
  }
  // int64 [n, 8]: vertex, device, stream, issue, start, end, bytes, ready; times in nanoseconds from begin.
  at::Tensor events() {
    const std::vector<TraceEvent> events = engine_->events();
    at::Tensor table = at::empty({static_cast<std::int64_t>(events.size()), 8}, at::kLong);
    auto* row = table.mutable_data_ptr<std::int64_t>();
    for (const TraceEvent& event : events) {
      for (const std::int64_t value :
           {std::int64_t{event.vertex}, std::int64_t{event.device}, std::int64_t{event.stream}, event.issue,
            event.start, event.end, event.bytes, event.ready}) {
        *row++ = value;
      }
    }
    return table;
  }
  c10::Dict<std::string, double> counters() {
    const StepCounters& step = engine_->counters();
    c10::Dict<std::string, double> out;
    out.insert("steps", static_cast<double>(step.steps));
    out.insert("vertices", static_cast<double>(step.vertices));
    out.insert("offload_bytes", static_cast<double>(step.offload_bytes));
    out.insert("reload_bytes", static_cast<double>(step.reload_bytes));
    out.insert("transfer_bytes", static_cast<double>(step.transfer_bytes));
    out.insert("step_seconds", static_cast<double>(step.step_ns) * 1e-9);
    out.insert("gate_seconds", static_cast<double>(step.gate_ns) * 1e-9);
    out.insert("op_seconds", static_cast<double>(step.op_ns) * 1e-9);
    out.insert("engine_seconds", static_cast<double>(step.loop_ns) * 1e-9);
    out.insert("c10_allocations", static_cast<double>(engine_allocations() - allocations_before_));
    return out;
  }
  void release_externals() { ops_->table.release_externals(); }

  // Remembers values that leave the arena together after each step; returns the number of the group.
  std::int64_t add_leaving(std::vector<at::Tensor> values) {
    leaving_.push_back(std::move(values));
    return static_cast<std::int64_t>(leaving_.size()) - 1;
  }
  // Copies of the values of a group, on the run's device.
  std::vector<at::Tensor> copies(std::int64_t group) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> copies;
    for (const at::Tensor& value : leaving_.at(static_cast<std::size_t>(group))) {
      copies.push_back(copy_of(value, ops_->table.device()));
    }
    // The caller's stream makes them in its own time: what is written to the arena next comes after, whoever
    // has it written. All engines of a device share its streams.
    if (cuda_ != nullptr) caller_->put_after_caller(*cuda_);
    return copies;
  }

  // Where planned memory lies on the device, as long as this lives: also when the constructor fails.
  struct PlannedRanges {
    PlannedRanges() = default;
    ~PlannedRanges() {
      for (const void* base : bases) remove_planned_range(base);
    }
    PlannedRanges(const PlannedRanges&) = delete;
    PlannedRanges& operator=(const PlannedRanges&) = delete;
    void add(const at::Tensor& tensor) {
      bases.reserve(bases.size() + 1);
      add_planned_range(tensor.data_ptr(), tensor.nbytes());
      bases.push_back(tensor.data_ptr());
    }
    std::vector<const void*> bases;
  };

  c10::intrusive_ptr<TorchOps> ops_;
  std::vector<at::Tensor> keep_;
  std::vector<std::vector<at::Tensor>> leaving_;
  PlannedRanges planned_ranges_;  // outlived by keep_
  CudaDevice* cuda_ = nullptr;
  std::unique_ptr<CallerOrder> caller_;
  std::vector<BlasWarmup> warmups_;      // by compute stream; used by the loop thread alone
  std::vector<ExternalLayout> layouts_;  // by storage
  std::vector<std::pair<std::int64_t, std::int64_t>> copied_;  // storage of an external input, copy of it
  std::int32_t failing_ = -1;
  int compute_threads_ = 1;
  std::optional<at::ThreadLocalState> plain_;  // of a thread on which nothing was set
  std::optional<CallerGuards> guards_;         // of the caller that runs ops itself
  const pid_t pid_;
  std::unique_ptr<Engine> engine_;
  std::int64_t allocations_before_ = 0;
};

TORCH_LIBRARY(disco_accel, m) {
  m.def("map_arena", &map_arena);
  m.def("carve", &carve);
  m.def("touched_bytes", &touched_bytes);
  m.def("is_arena", [](const at::Tensor& tensor) { return in_planned_range(tensor.const_data_ptr()); });
  m.def("release_unused_workspaces", &Workspace::release_unused);
  m.def("engine_allocations", &engine_allocations);
  m.def("fail_allocation", [](std::int64_t nth) {
    install_cpu_decorator();
    return fail_allocation(nth);
  });
  m.def("set_live_tracking", [](bool on) {
    install_cpu_decorator();
    set_live_tracking(on);
  });
  m.def("live_bytes", &live_bytes);
  m.def("peak_live_bytes", &peak_live_bytes);
  m.def("reset_peak_live_bytes", &reset_peak_live_bytes);
  m.class_<TorchOps>("Ops")
      .def(torch::init<std::string>())
      .def("add_fixed", &TorchOps::add_fixed)
      .def("add_external", &TorchOps::add_external)
      .def("add_op", &TorchOps::add_op)
      .def("expect_result", &TorchOps::expect_result)
      .def("set_schedule", &TorchOps::set_schedule)
      .def("set_loose", &TorchOps::set_loose)
      .def("set_rng", &TorchOps::set_rng)
      .def("run", &TorchOps::run)
      .def("is_direct", &TorchOps::is_direct)
      .def("record", &TorchOps::record)
      .def("time", &TorchOps::time);
  m.class_<WatchedLayouts>("WatchedLayouts")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("address", &WatchedLayouts::address);
  m.class_<Pinned>("Pinned").def(torch::init<at::Tensor>());
  m.class_<TorchEngine>("Engine")
      .def(torch::init<c10::intrusive_ptr<TorchOps>, at::Tensor, at::Tensor, at::Tensor,
                       std::vector<at::Tensor>, at::Tensor, std::vector<at::Tensor>,
                       c10::Dict<std::string, double>, std::vector<double>>())
      .def("expect_dtype", &TorchEngine::expect_dtype)
      .def("expect_layout", &TorchEngine::expect_layout)
      .def("fail_at", &TorchEngine::fail_at)
      .def("bind", &TorchEngine::bind)
      .def("begin", &TorchEngine::begin)
      .def("run_out", &TorchEngine::run_out)
      .def("run_end", &TorchEngine::run_end)
      .def("wait_out", &TorchEngine::wait_out)
      .def("wait_end", &TorchEngine::wait_end)
      .def("deliver", &TorchEngine::deliver)
      .def("abort", &TorchEngine::abort)
      .def("invalidate", &TorchEngine::invalidate)
      .def("set_tracing", &TorchEngine::set_tracing)
      .def("last_error", &TorchEngine::last_error)
      .def("events", &TorchEngine::events)
      .def("counters", &TorchEngine::counters)
      .def("add_leaving", &TorchEngine::add_leaving)
      .def("copies", &TorchEngine::copies)
      .def("release_externals", &TorchEngine::release_externals);
}

}  // namespace
}  // namespace disco
