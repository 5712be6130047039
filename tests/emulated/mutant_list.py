"""The faults of ``tests.emulated.mutants``: exact texts of the sources, what stands in their place, and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ORDER = "tests/emulated/test_order.py::"
_SIDE = (
    _ORDER + "test_a_loop_on_a_side_stream",
    _ORDER + "test_batches_that_a_side_stream_fetches_during_the_step_before",
)
_CALLS = "tests/emulated/test_calls.py::"
_BATCHED = (_CALLS + "test_small_copies_that_are_ready_together_go_in_one_call",)
_STEADY = (_ORDER + "test_a_steady_step_takes_nothing_and_ends_within_what_the_driver_gave",)
_GRAPH_TESTS = "tests/emulated/test_launch_graphs.py::"
_GRAPH_STEPS = (_GRAPH_TESTS + "test_batches_at_addresses_of_their_own",)
_GROWING = ("tests/gpu/test_growing_caches.py::test_tokens_and_logits_are_eagers",)
_HOST = "tests/emulated/test_host_optimizer.py::"
_UPDATES = "tests/emulated/test_update_faults.py::"
_SECOND = "tests/emulated/test_second_device.py::"
_SEVERAL = "tests/emulated/test_several_devices.py::"
_ROUND = (_SEVERAL + "test_a_value_goes_round_all_devices",)
_TWO = {"EMULATED_DEVICES": 2}
_NO_PEERS = {"EMULATED_DEVICES": 2, "EMULATED_PEERS": "none"}
_WRONG_PEERS = {"EMULATED_DEVICES": 2, "EMULATED_PEERS": "wrong"}
_STREAMS = ("tests/emulated/test_engine.py::test_several_compute_streams_have_workspaces_of_their_own",)
_CLASS = "runtime_ext/torch/runtime_class.cpp"
_CUDA = "runtime_ext/torch/cuda_side.cpp"
_DEVICE = "runtime_ext/core/cuda_device.cpp"
_BATCH = "runtime_ext/core/copy_batch.cpp"
_COPIES = "runtime_ext/core/launch_copies.cpp"
_GRAPHS = "runtime_ext/core/launch_graphs.cpp"
_SEGMENTS = "runtime_ext/core/segments.cpp"
_PEERS = "runtime_ext/core/peer_copies.cpp"
_GRADIENTS = "disco_accel/step/placement/gradient_memory.py"
_JITTER = {"EMULATED_JITTER_US": 500, "EMULATED_SEED": 1}
_LATE = {**_JITTER, "EMULATED_LINK_GB_S": 0.01}


_STORE = "tests/emulated/test_store_on_gpu.py::"
_STORE_IN_ORDER = (_STORE + "test_an_object_of_one_process_is_read_by_another_in_order",)
_EVICTED = (_STORE + "test_evicted_objects_come_back_with_their_bits",)
_LANE = "disco_accel/store/cuda_tier.py"
_SLOW = {**_JITTER, "EMULATED_LINK_GB_S": 0.1}


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` is in ``file`` once; with ``new`` in its place one of ``tests`` (pytest's names) must fail.

    ``also``: further replacements of the same kind, for what two places guard: file, old text, new text.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    also: tuple[tuple[str, str, str], ...] = ()


MUTANTS = (
    Mutant(
        "no wait for the caller",
        _CLASS,
        "    side_->put_after_caller();\n    engine_->begin(next);",
        "    engine_->begin(next);",
        _SIDE,
    ),
    Mutant(
        "no workspace warm-up",
        _CUDA,
        "    if (!gpu.device.recording()) gpu.warmups[static_cast<std::size_t>(stream)].run();\n",
        "",
        _STEADY,
    ),
    Mutant(
        "wrong stream",
        _CUDA,
        "gpu.device.launch_stream(stream));\n    if (",
        "nullptr);\n    if (",
        _SIDE,
    ),
    Mutant("missing event", _DEVICE, "  if (source.finished >= token) return;\n", "  return;\n", _STREAMS, _LATE),
    Mutant(
        "event reused too early",
        _DEVICE,
        "api_.event_record(lane.events[slot], lane.stream);",
        "api_.event_record(lane.events[(slot + 1) % lane.events.size()], lane.stream);",
        _SIDE,
        _JITTER,
    ),
    Mutant(
        "event before the token",
        _DEVICE,
        "source.recorded[source.slot(source.covered_by(token))]",
        "source.events[source.slot(token - 1)]",
        _STREAMS,
        _LATE,
    ),
    Mutant(
        "kernels behind an event taken for done",
        _DEVICE,
        "if (next != 0) lane.finished = next;",
        "if (next != 0) lane.finished = lane.enqueued;",
        _SIDE,
        _JITTER,
    ),
    Mutant(
        "no event where an edge leaves the stream",
        "runtime_ext/core/schedule.cpp",
        " || resource_of[s] != resource_of[v];",
        " || s == v;",
        (_CALLS + "test_a_kernel_costs_little_beside_its_launch",),
    ),
    Mutant(
        "nothing recorded when idle",
        _DEVICE,
        "if (next == 0 && !idle) break;",
        "if (next == 0 && (idle || !idle)) break;",
        ("tests/emulated/test_engine.py::test_a_kernel_that_never_ends_is_reported_although_the_step_cannot_drain",),
    ),
    Mutant(
        "copy ends with its first piece",
        "runtime_ext/core/launch.cpp",
        "    if (entry.last) {\n      for (",
        "    if (state_[entry.vertex] != State::kDone) {\n      for (",
        _SIDE,
        {**_SLOW, "EMULATED_COPY_PIECE": 20_000},
    ),
    Mutant("copy direction", _DEVICE, "kMemcpyKind = {1, 2,", "kMemcpyKind = {2, 1,", _SIDE),
    Mutant(
        "unpinned source",
        "disco_accel/native/host_memory.py",
        "                pinned.append(self._lock(self._arena[begin:end], device))\n",
        "                pass\n",
        _STEADY,
    ),
    Mutant(
        "host buffer freed early",
        "disco_accel/execute/executor.py",
        "            if self._engine.abort(_SLICE_SECONDS):\n",
        "            self._pinned = None\n            if self._engine.abort(_SLICE_SECONDS):\n",
        (_ORDER + "test_an_interrupted_step_waits_for_its_copies_before_their_memory_goes",),
    ),
    Mutant(
        "device guard dropped",
        "runtime_ext/core/current_device.h",
        'if (previous_ != device_) check_cuda(api_, "cudaSetDevice", api_.set_device(device_));',
        "",
        (_SECOND + "test_a_plan_that_is_made_while_another_device_is_current",),
        {"EMULATED_DEVICES": 2},
        # PyTorch's guard around the engine's constructor does the same.
        (("disco_accel/execute/executor.py", "        with backend.current():\n", "        if True:\n"),),
    ),
    Mutant(
        "loss read before its copy",
        _CLASS,
        "return static_cast<std::int64_t>(engine_->wait_out(timeout));",
        "return static_cast<std::int64_t>(Status::kDone);",
        _SIDE,
        _JITTER,
    ),
    Mutant(
        "gradients read before their copies",
        _GRADIENTS,
        "        self._backend.synchronize()\n        return ",
        "        return ",
        (_HOST + "test_gradients_that_stay_are_copied_before_they_are_handed_out",),
        _JITTER,
    ),
    Mutant(
        "gradient overwritten during a copy",
        _GRADIENTS,
        "        self._backend.synchronize()\n        ranges",
        "        ranges",
        (_HOST + "test_a_gradient_that_is_being_copied_is_not_overwritten",),
        _JITTER,
    ),
    Mutant(
        "arena of the host device unpinned",
        "disco_accel/execute/executor.py",
        "for memory in (self._memory.host, *made_here)]",
        "for memory in (self._memory.host,)]",
        (_UPDATES + "test_gradients_and_weights_move_between_page_locked_memory_alone",),
    ),
    Mutant(
        "update before its gradient's copy",
        "disco_accel/execute/program.py",
        "if rows[u][0] != VertexKind.INPUT or",
        "if rows[u][0] not in (VertexKind.INPUT, VertexKind.COPY) or",
        ("tests/gpu/test_host_updates.py::test_steps_have_the_bits_of_eager_training",),
        _JITTER,
    ),
    Mutant(
        "allocations of either kind planned",
        "runtime_ext/torch/planned_alloc.cpp",
        "return tls.planned && tls.kind == kind;",
        "return tls.planned;",
        (_UPDATES + "test_what_ops_of_the_gpu_allocate_on_the_host_is_no_part_of_their_plans",),
        also=(
            (
                "runtime_ext/torch/planned_alloc.cpp",
                "return tls.record != nullptr && tls.kind == kind;",
                "return tls.record != nullptr;",
            ),
        ),
    ),
    Mutant(
        "call where it was captured",
        "runtime_ext/torch/ops_decode.cpp",
        "return device == device_ && place_.side == Side::kDevice ? place_.device : device;",
        "return device;",
        (_SEVERAL + "test_a_call_that_names_its_device_runs_where_it_is_put",),
        _TWO,
    ),
    Mutant(
        "transfer before the caller's copy there",
        _CUDA,
        "        writers.push_back(external_stream(other.where, other.device.native_stream(lane)));\n",
        "",
        (_SEVERAL + "test_a_copy_of_the_callers_ends_before_the_next_step_writes_there",),
        _TWO,
    ),
    Mutant("peers believed", _PEERS, "if (arrived != sent) return PeerPath::kWrongBytes;", "", _ROUND, _WRONG_PEERS),
    Mutant("piece sent before it is there", _PEERS, "  wait(arrivals, slot.filled);\n", "", _ROUND, _NO_PEERS),
    Mutant(
        "piece overwritten before it is sent",
        _PEERS,
        "  if (slot.last_emptied != nullptr) wait(stream, slot.last_emptied);\n",
        "",
        _ROUND,
        {**_NO_PEERS, "EMULATED_LINK_GB_S": 0.5},
    ),
    Mutant(
        "transfer over before its last piece",
        _PEERS,
        '  check_cuda(api_, "cudaStreamWaitEvent", api_.stream_wait_event(stream, last, 0));\n',
        "",
        _ROUND,
        _NO_PEERS,
    ),
    Mutant(
        "another device's random numbers",
        "runtime_ext/torch/rng.cpp",
        "  slots.copy(slots.generator_, borrower);\n",
        "",
        (_SEVERAL + "test_random_ops_draw_from_the_scripts_generator_wherever_they_run",),
        _TWO,
    ),
    Mutant(
        "put before its kernels are done",
        "disco_accel/store/cuda_objects.py",
        "        if not writes:\n            self._wait()\n",
        "",
        _STORE_IN_ORDER,
    ),
    Mutant(
        "given back under queued kernels",
        "disco_accel/store/cuda_objects.py",
        "                self._wait()\n            for",
        "                pass\n            for",
        (_STORE + "test_memory_stays_until_the_gpu_is_done_with_it",),
    ),
    Mutant(
        "final objects mapped to write to",
        "disco_accel/store/client.py",
        "memory = self._gpu.map(file, nbytes, writes=bool(reply.amount), freed=release)",
        "memory = self._gpu.map(file, nbytes, writes=True, freed=release)",
        (_STORE + "test_a_final_object_cannot_be_written_to",),
    ),
    Mutant(
        "object handed out before its zeros",
        "disco_accel/store/cuda_tier.py",
        '            call_driver("cuStreamSynchronize", self._fresh)\n',
        "",
        _STORE_IN_ORDER,
    ),
    Mutant(
        "brought back before its copy is done",
        _LANE,
        '            raise\n        call_driver("cuStreamSynchronize", self._stream)\n',
        "            raise\n",
        _EVICTED,
        _SLOW,
    ),
    Mutant(
        "piece refilled before it is sent",
        _LANE,
        '                    call_driver("cuEventSynchronize", piece.copied)\n',
        "                    pass\n",
        _EVICTED,
        _SLOW,
    ),
    Mutant(
        "piece written out before it has arrived",
        _LANE,
        'has filled it."""\n    call_driver("cuEventSynchronize", piece.copied)\n',
        'has filled it."""\n',
        _EVICTED,
        _SLOW,
    ),
    Mutant(
        "event before its batch",
        _DEVICE,
        "  require_room(stream, 1);\n  if (!put_batch(stream, copies)) {",
        "  require_room(stream, 1);\n  Lane& early = lanes_[stream];\n"
        "  api_.event_record(early.events[early.slot(early.enqueued + 1)], early.stream);\n"
        "  if (!put_batch(stream, copies)) {",
        _BATCHED,
        _JITTER,
        (
            (
                _DEVICE,
                "  lane.others[slot] = others;\n  mark(stream);",
                "  lane.others[slot] = others;\n  lane.recorded[slot] = lane.events[slot];",
            ),
        ),
    ),
    Mutant(
        "a size of a batch is another's",
        _BATCH,
        "bytes[count++] = static_cast<std::size_t>(copy.bytes);",
        "bytes[count++] = static_cast<std::size_t>(std::min(copy.bytes, copies.front().bytes));",
        _BATCHED,
    ),
    Mutant(
        "an address of a batch is another's",
        _BATCH,
        "sources[count] = const_cast<void*>(copy.src);",
        "sources[count] = const_cast<void*>(copies.front().src);",
        _BATCHED,
    ),
    Mutant(
        "a copy of a batch left out",
        _BATCH,
        "api.batches.of_cuda_13(targets.data(), sources.data(), bytes.data(), count,",
        "api.batches.of_cuda_13(targets.data(), sources.data(), bytes.data(), count - (count > 1),",
        _BATCHED,
    ),
    Mutant(
        "batch on another stream",
        _DEVICE,
        "copy_batch(api_, copies, lanes_[stream].stream)",
        "copy_batch(api_, copies, streams_->clock())",
        _BATCHED,
        _JITTER,
    ),
    Mutant(
        "batch ends with the one before",
        _COPIES,
        "      {vertices[count - 1], token, device",
        "      {vertices[count - 1], token - 1, device",
        _BATCHED,
        _JITTER,
    ),
    Mutant(
        "no wait in front of a graph",
        _SEGMENTS,
        "return std::any_of(predecessors.begin(),",
        "return false && std::any_of(predecessors.begin(),",
        _GRAPH_STEPS,
        _LATE,
        also=(
            (
                _SEGMENTS,
                "if (leader[s] == leader[v]) continue;",
                "if (leader[s] == leader[v] || (leader[s] != s && program.kind[v] == Kind::kCopy)) continue;",
            ),
        ),
    ),
    Mutant(
        "graph with a stale address",
        _GRAPHS,
        "    if (moved.empty()) return known.graph.get();\n",
        "    return known.graph.get();\n",
        _GRAPH_STEPS,
    ),
    Mutant(
        "graph on another stream",
        _DEVICE,
        "graphs_->launch(*graph, lane.stream);",
        "graphs_->launch(*graph, streams_->clock());",
        _GRAPH_STEPS,
        _JITTER,
    ),
    Mutant(
        "kernels recorded in another order",
        _GRAPHS,
        "runner.run(segment.ops[i], device, stream);",
        "runner.run(segment.ops[segment.ops.size() - 1 - i], device, stream);",
        _GRAPH_STEPS,
    ),
    Mutant(
        "end of a graph's first part taken for all",
        _DEVICE,
        "lane.recorded[slot] = graph->events[part];",
        "lane.recorded[slot] = graph->events[0];",
        _GRAPH_STEPS,
        _JITTER,
    ),
    Mutant(
        "graph under other settings",
        _GRAPHS,
        "    if (words_ != known.graph->settings) return nullptr;\n",
        "",
        (_GRAPH_TESTS + "test_settings_that_change_between_forward_and_backward",),
    ),
    Mutant(
        "recorded where others launch",
        _GRAPHS,
        "recording_ = streams_->recording();",
        "recording_ = streams_->compute(0);",
        (_GRAPH_TESTS + "test_two_models_train_in_two_threads",),
        _JITTER,
    ),
    Mutant(
        "a kernel of another length in a graph",
        "runtime_ext/torch/ops.cpp",
        "op.loose.nbytes == 0 && !op.varies;",
        "op.loose.nbytes == 0;",
        _GROWING,
    ),
    Mutant(
        "numbers of the longest at each length",
        "runtime_ext/torch/ops_lengths.cpp",
        "return longest.toInt() - (longest.toInt() - shortest.toInt()) / span * below;",
        "return longest.toInt() - (longest.toInt() - shortest.toInt()) / span * (below / 2);",
        _GROWING,
    ),
)
