// The engine as a torchbind class: what disco_accel/execute/executor.py drives. torchbind releases the GIL
// around every method, so a wait here stops no Python thread.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/engine.h"
#include "arena.h"
#include "backend.h"
#include "compute_thread.h"
#include "cuda_side.h"
#include "engine_settings.h"
#include "ops_class.h"
#include "peer_paths.h"
#include "planned_alloc.h"
#include "program_tables.h"
#include "watch.h"
#include "wrapped_numbers.h"

namespace disco {
namespace {

constexpr double kDrainSeconds = 5;  // that a device which has stalled is given at the end of its engine

struct TorchEngine : torch::CustomClassHolder, OpRunner {
  // The tables are those of program_tables.h. All memory that the program names lies in `arenas`, one for
  // each device, in `host`, where values are offloaded, in `clean`, which is only read, and in `states`, the
  // homes of values that change; all are kept alive. `places`: PyTorch's device that each device is, empty
  // for one that lies in host memory and uses these homes; `links` has a bandwidth and a latency for each of
  // the others. Throws std::invalid_argument for a program that would touch any other memory.
  TorchEngine(c10::intrusive_ptr<TorchOps> ops, const at::Tensor& vertices, const at::Tensor& edges,
              const at::Tensor& copied, std::vector<at::Tensor> arenas, const at::Tensor& host,
              const std::vector<at::Tensor>& clean, const std::vector<at::Tensor>& states,
              const c10::Dict<std::string, double>& options, const std::vector<double>& links,
              const std::vector<std::string>& places)
      : ops_(std::move(ops)), keep_(std::move(arenas)), pid_(getpid()) {
    std::vector<StartedOn> own;
    if (places.size() != keep_.size()) {
      throw std::invalid_argument("places has " + std::to_string(places.size()) + " devices, there are " +
                                  std::to_string(keep_.size()) + " arenas");
    }
    for (std::size_t i = 0; i < keep_.size(); ++i) {
      const std::string& name = places.at(i);
      const c10::Device device(name.empty() ? "cpu" : name);
      if (!name.empty() && keep_[i].device() != device) {
        throw std::invalid_argument("the arena of device " + std::to_string(i) + " is on " +
                                    keep_[i].device().str() + ", the device is " + name);
      }
      places_.push_back({name.empty() ? Side::kHost : Side::kDevice, device});
      numbers_.push_back(static_cast<int>(own.size()));
      if (!name.empty()) own.push_back({device, keep_[i]});
    }
    const Memory memory = memory_of(keep_, host, clean, states);
    keep_.push_back(host);
    keep_.insert(keep_.end(), clean.begin(), clean.end());
    keep_.insert(keep_.end(), states.begin(), states.end());
    Program program = read_program(vertices, edges);
    check_program(program, ops_->table, memory, places_);
    copied_ = read_copied(copied, program, ops_->table);
    if (links.size() != 2 * own.size()) {
      throw std::invalid_argument("links has " + std::to_string(links.size()) + " figures for " +
                                  std::to_string(own.size()) + " devices");
    }
    layouts_.resize(ops_->table.storages());
    Settings settings = read_settings(options);
    compute_threads_ = settings.compute_threads;
    settings.host.on_compute_thread = [this](int stream) {
      if (stream == 0) plain_.emplace();
      prepare_compute_thread(compute_threads_);
    };
    Started started = ops_->table.backend().start(own, settings, links);
    side_ = std::move(started.side);
    engine_ = std::make_unique<Engine>(std::move(program), with_hosts(std::move(started.devices), settings),
                                       *this, settings.engine);
  }

  // The arena itself is freed by whoever holds it last, so its range must be forgotten first.
  ~TorchEngine() override {
    // In a forked child the engine's threads do not exist, so nothing could end them.
    if (pid_ != getpid()) {
      static_cast<void>(engine_.release());
      static_cast<void>(side_.release());
      return;
    }
    // Work that a device never ends may write to its memory for ever: all of that stays.
    if (side_->may_never_end() && engine_->last_error().draining && !engine_->abort(kDrainSeconds)) {
      static_cast<void>(engine_.release());
      static_cast<void>(side_.release());
      new std::vector<at::Tensor>(std::move(keep_));
      static_cast<void>(ops_.release());
      return;
    }
    engine_.reset();
  }

  // All devices in the program's order: those that a backend has started, and those in host memory.
  std::vector<std::unique_ptr<Device>> with_hosts(std::vector<std::unique_ptr<Device>> started,
                                                  const Settings& settings) const {
    std::vector<std::unique_ptr<Device>> devices;
    auto next = started.begin();
    for (const Place& place : places_) {
      const bool host = place.side == Side::kHost;
      if (!host && next == started.end()) throw std::invalid_argument("more devices than this kind runs");
      devices.push_back(host ? start_host_device(settings.host_threads) : std::move(*next++));
    }
    if (next != started.end()) throw std::invalid_argument("no device but the host's");
    return devices;
  }

  void run(std::int32_t op, int device, int stream) override {
    if (op == failing_)
      throw std::runtime_error(ops_->table.label(op) + ": failed because a test asked for it");
    const auto index = static_cast<std::size_t>(device);
    if (places_[index].side == Side::kHost) {
      ops_->table.run(op);
    } else {
      side_->run(ops_->table, op, numbers_[index], stream);
    }
  }

  bool repeats(std::int32_t op, int device) override {
    return places_[static_cast<std::size_t>(device)].side == Side::kDevice && ops_->table.repeats(op);
  }
  void before_recording(int device, int stream) override {
    side_->before_recording(numbers_[static_cast<std::size_t>(device)], stream);
  }
  void depends_on(std::int32_t op, std::vector<std::uint64_t>& words) override {
    ops_->table.external_addresses(op, words);
  }
  void settings(std::vector<std::uint64_t>& words) override {
    words.push_back(static_cast<std::uint64_t>(failing_));
    side_->settings(words);
  }

  // A caller's own OpenMP team serves the ops if it has the size that they were recorded with. Only a device
  // whose ops run on threads of this process has made such a thread known (`plain_`).
  bool enter() override {
    if (!plain_ || at::get_num_threads() != compute_threads_) return false;
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

  // Binds externals[i] to storages[i]; if that fails, the position i and why.
  std::optional<std::tuple<std::int64_t, std::string>> bind(const Ints& storages,
                                                            const std::vector<at::Tensor>& externals) {
    for (std::size_t i = 0; i < storages.size(); ++i) {
      const auto by_storage = [](const Copied& a, const Copied& b) { return a.storage < b.storage; };
      const auto [first, last] =
          std::equal_range(copied_.begin(), copied_.end(), Copied{storages[i], 0, false}, by_storage);
      try {
        ops_->table.bind_external(storages[i], externals.at(i));
        const ExternalLayout& layout = layouts_.at(storages[i]);
        if (layout.dtype != c10::ScalarType::Undefined) check_layout(externals[i], layout);
        // A copy knows no strides.
        if (std::any_of(first, last, [](const Copied& copied) { return copied.writes; }) &&
            externals[i].numel() > 0 && !externals[i].is_non_overlapping_and_dense()) {
          throw std::invalid_argument("does not fill its memory: a copy would write to the holes in it too");
        }
      } catch (const std::exception& error) {
        return std::tuple(static_cast<std::int64_t>(i), std::string(error.what()));
      }
      for (auto copied = first; copied != last; ++copied) {
        if (copied->writes) {
          engine_->set_target(copied->vertex, externals[i].mutable_data_ptr());
        } else {
          engine_->set_source(copied->vertex, externals[i].const_data_ptr());
        }
      }
    }
    return std::nullopt;
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
    side_->put_after_caller();
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
    side_->put_after_caller();
    engine_->deliver(next);
  }
  bool abort(double timeout) { return engine_->abort(timeout); }
  void invalidate(const Ints& in_place) {
    engine_->invalidate(std::vector<std::int32_t>(in_place.begin(), in_place.end()));
  }
  bool holds_residents() { return engine_->holds_residents(); }
  void set_tracing(bool on) { engine_->set_tracing(on); }
  // Status, position of the vertex, message, whether the device found it later, is lost, still drains; then
  // what had not finished: positions in flight and how many there were; pairs of a position that waits and
  // one that it waits for, -1 for none, and how many there were.
  std::tuple<std::int64_t, std::int64_t, std::string, bool, bool, bool, Ints, std::int64_t, Ints,
             std::int64_t>
  last_error() {
    const EngineError error = engine_->last_error();
    const Unfinished& left = error.unfinished;
    Ints waiting;
    for (const Waiting& one : left.waiting) {
      waiting.push_back(one.vertex);
      waiting.push_back(one.waits_for);
    }
    return {static_cast<std::int64_t>(error.status),
            error.vertex,
            error.message,
            error.later,
            error.lost,
            error.draining,
            Ints(left.in_flight.begin(), left.in_flight.end()),
            left.in_flight_count,
            waiting,
            left.waiting_count};
  }
  // int64 [n, kEventColumns]: vertex, device, stream, issue, start, end, bytes, ready; times in nanoseconds
  // from begin.
  at::Tensor events() {
    const std::vector<TraceEvent> events = engine_->events();
    at::Tensor table = at::empty({static_cast<std::int64_t>(events.size()), kEventColumns}, at::kLong);
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
    out.insert("launches", static_cast<double>(step.launches));
    out.insert("offload_bytes", static_cast<double>(step.offload_bytes));
    out.insert("reload_bytes", static_cast<double>(step.reload_bytes));
    out.insert("transfer_bytes", static_cast<double>(step.transfer_bytes));
    out.insert("changes", static_cast<double>(step.changes));
    out.insert("step_seconds", static_cast<double>(step.step_ns) * 1e-9);
    out.insert("gate_seconds", static_cast<double>(step.gate_ns) * 1e-9);
    out.insert("op_seconds", static_cast<double>(step.op_ns) * 1e-9);
    out.insert("engine_seconds", static_cast<double>(step.loop_ns) * 1e-9);
    out.insert("c10_allocations", static_cast<double>(engine_allocations() - allocations_before_));
    return out;
  }
  // Graphs, kernels in them, bytes of device memory that they take; and why a kernel is in none, or "".
  std::tuple<std::int64_t, std::int64_t, std::int64_t, std::string> launch_graphs() {
    const GraphFigures figures = engine_->graph_figures();
    return {figures.graphs, figures.kernels, figures.bytes, figures.refused};
  }
  bool ran(std::int64_t vertex) { return engine_->ran(static_cast<std::int32_t>(vertex)); }
  std::int64_t ops_run(std::int64_t device) { return engine_->ops_run(static_cast<int>(device)); }
  void release_externals() { ops_->table.release_externals(); }
  void release(const Ints& storages) {
    for (const std::int64_t storage : storages) ops_->table.release_external(storage);
  }

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
      copies.push_back(ops_->table.backend().copy_of(value, ops_->table.device()));
    }
    // The caller's stream makes them in its own time: what is written to the arena next comes after, whoever
    // has it written. All engines of a device share its streams.
    side_->put_after_caller();
    return copies;
  }

  c10::intrusive_ptr<TorchOps> ops_;
  std::vector<at::Tensor> keep_;
  std::vector<Place> places_;  // by device
  std::vector<int> numbers_;   // by device: how many before it are not in host memory
  std::vector<std::vector<at::Tensor>> leaving_;
  std::unique_ptr<EngineSide> side_;     // outlived by keep_
  std::vector<ExternalLayout> layouts_;  // by storage
  std::vector<Copied> copied_;           // by storage
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
  m.def("own_view_of", &own_view_of);
  m.def("other_holders", &other_holders);
  m.def("touched_bytes", &touched_bytes);
  m.def("is_arena", [](const at::Tensor& tensor) { return in_planned_range(tensor.const_data_ptr()); });
  m.def("engine_numbers", &engine_numbers);
  m.def("direct_ops", &direct_ops);
  m.def("fused(int kernel, Tensor[] reads, Tensor(a!)[] writes) -> ()", &run_fused);
  m.def("fused_host_kernel", &fused_host_kernel);
  m.def("fused_cuda_kernel", &fused_cuda_kernel);
  m.def("number_wrapping_ops", &number_wrapping_ops);
  m.def("peer_path", [](const std::string& from, const std::string& to) {
    return static_cast<std::int64_t>(peer_path(c10::Device(from), c10::Device(to)));
  });
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
      .def("set_device", &TorchOps::set_device)
      .def("set_host", &TorchOps::set_host)
      .def("expect_result", &TorchOps::expect_result)
      .def("set_schedule", &TorchOps::set_schedule)
      .def("set_loose", &TorchOps::set_loose)
      .def("set_rng", &TorchOps::set_rng)
      .def("set_varying", &TorchOps::set_varying)
      .def("set_length", &TorchOps::set_length)
      .def("resize_external", &TorchOps::resize_external)
      .def("run", &TorchOps::run)
      .def("is_direct", &TorchOps::is_direct)
      .def("record", &TorchOps::record)
      .def("time", &TorchOps::time);
  m.class_<WatchedLayouts>("WatchedLayouts")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("address", &WatchedLayouts::address);
  m.class_<Pinned>("Pinned").def(torch::init<at::Tensor, bool>());
  m.class_<TorchEngine>("Engine")
      .def(torch::init<c10::intrusive_ptr<TorchOps>, at::Tensor, at::Tensor, at::Tensor,
                       std::vector<at::Tensor>, at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>,
                       c10::Dict<std::string, double>, std::vector<double>, std::vector<std::string>>())
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
      .def("holds_residents", &TorchEngine::holds_residents)
      .def("set_tracing", &TorchEngine::set_tracing)
      .def("last_error", &TorchEngine::last_error)
      .def("events", &TorchEngine::events)
      .def("counters", &TorchEngine::counters)
      .def("launch_graphs", &TorchEngine::launch_graphs)
      .def("ops_run", &TorchEngine::ops_run)
      .def("add_leaving", &TorchEngine::add_leaving)
      .def("copies", &TorchEngine::copies)
      .def("release_externals", &TorchEngine::release_externals)
      .def("release", &TorchEngine::release)
      .def("ran", &TorchEngine::ran);
}

}  // namespace
}  // namespace disco
