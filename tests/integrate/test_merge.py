"""A merge has the bytes of PEFT's ``merge_and_unload`` and ``save_pretrained``, file by file, and holds little."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint
from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.merge import merge_adapter
from disco_accel.integrate.hf.merge_plan import plan_merge
from disco_accel.integrate.hf.merge_recording import _Ledger
from tests.integrate.merge_cases import FAMILIES, FORMS, differing_files, llama, make_case, merge_with_peft
from tests.support.models import random_batch

FEW = "40KB"


@pytest.mark.parametrize("shard", ["50GB", FEW], ids=["one file", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_has_the_bytes_of_pefts_merge(tmp_path: Path, family: str, dtype: torch.dtype, shard: str) -> None:
    make_case(tmp_path, *FAMILIES[family], dtype, shard)
    merge_with_peft(tmp_path, shard)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "ours", max_shard_size=shard)
    assert differing_files(tmp_path / "ours", tmp_path / "peft") == []
    assert (report.shards > 3) == (shard == FEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "ours", "peft"]


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_adapter_is_merged_as_peft_does(tmp_path: Path, form: str) -> None:
    make_case(tmp_path, *FORMS[form], torch.bfloat16, FEW)
    merge_with_peft(tmp_path, FEW)
    merge_adapter(tmp_path / "adapter", tmp_path / "ours", max_shard_size=FEW)
    assert differing_files(tmp_path / "ours", tmp_path / "peft") == []


def test_another_data_type_is_that_of_from_pretrained(tmp_path: Path) -> None:
    make_case(tmp_path, *FAMILIES["llama"], torch.bfloat16)
    merge_with_peft(tmp_path, dtype=torch.float16)
    merge_adapter(tmp_path / "adapter", tmp_path / "ours", dtype="float16")
    assert differing_files(tmp_path / "ours", tmp_path / "peft") == []


def test_a_cache_of_links_is_a_base(tmp_path: Path) -> None:
    """As the hub's cache has it: each file a link to one named by its hash. ``--base`` wins over the adapter's."""
    make_case(tmp_path, *FAMILIES["llama"], torch.bfloat16, FEW)
    merge_with_peft(tmp_path, FEW)
    blobs, linked = tmp_path / "blobs", tmp_path / "snapshot"
    linked.mkdir()
    shutil.move(tmp_path / "base", blobs)
    for number, path in enumerate(sorted(blobs.iterdir())):
        (linked / path.name).symlink_to(path.rename(blobs / str(number)))
    merge_adapter(tmp_path / "adapter", tmp_path / "ours", base=str(linked), max_shard_size=FEW)
    assert differing_files(tmp_path / "ours", tmp_path / "peft") == []


def test_the_adapter_of_a_planned_training_is_merged(tmp_path: Path) -> None:
    """Trained by us, with the tokenizer of the base."""
    shape = Shape(
        hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=256,
    )  # fmt: skip
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Pages are for readers, and a page has lines. " * 90)
    write_checkpoint(tmp_path / "base", shape, corpus=corpus)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    tuned.train()
    prepare(tuned, DiscoConfig(memory_budget="16MiB", plan_cache=None, compute_threads=1, quiet=True))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for seed in range(3):
        tuned(**random_batch(320, seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stats(tuned)["steps_compiled"] == 3
    restore(tuned).save_pretrained(tmp_path / "adapter")
    merge_with_peft(tmp_path)
    merge_adapter(tmp_path / "adapter", tmp_path / "ours")
    different = differing_files(tmp_path / "ours", tmp_path / "peft")
    assert different == ["tokenizer.json", "tokenizer_config.json"]  # save_pretrained of a model writes none


def test_a_merge_holds_no_more_than_it_may_and_refuses_less(tmp_path: Path) -> None:
    """The limit is the smallest that works; the model is twenty times as large."""
    make_case(tmp_path, lambda: llama(num_hidden_layers=20), FORMS["dora, modules_to_save"][1], torch.float32)
    merge_with_peft(tmp_path)
    with pytest.raises(ConfigError, match=r"--memory: to merge .*weight takes .* at a time, 4KiB are given") as refused:
        merge_adapter(tmp_path / "adapter", tmp_path / "ours", memory=4096)
    assert "give --memory 1MiB" in str(refused.value)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "ours", memory=1 << 20)
    assert report.peak < report.nbytes / 20
    shutil.rmtree(tmp_path / "ours")
    tight = merge_adapter(tmp_path / "adapter", tmp_path / "ours", memory=report.peak)
    assert tight.peak <= report.peak
    assert differing_files(tmp_path / "ours", tmp_path / "peft") == []
    shutil.rmtree(tmp_path / "ours")
    with pytest.raises(ConfigError, match="--memory: "):
        merge_adapter(tmp_path / "adapter", tmp_path / "ours", memory=report.peak - 1)
    assert not (tmp_path / "ours").exists()


def test_the_ledger_counts_every_tensor_that_is_made(tmp_path: Path) -> None:
    """Bytes of all tensors that PyTorch allocates while the groups run, against those that were forecast."""
    from torch.profiler import ProfilerActivity, profile

    make_case(tmp_path, *FAMILIES["experts"], torch.float32)
    (tmp_path / "files").mkdir()
    plan = plan_merge(tmp_path / "base", tmp_path / "adapter", "auto", 1 << 40, tmp_path / "files")
    for group in plan.groups:
        ledger = _Ledger(1 << 40)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            plan.recording.run(group, ledger, lambda name, tensor: None)
        held = most = 0
        for event in measured.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        assert (ledger.peak, ledger.held) == (group.peak, 0)
        assert most <= 1.05 * group.peak + 4096, (list(group.results), most, group.peak)


def test_weights_that_peft_copies_are_of_the_same_mode(tmp_path: Path) -> None:
    """A second mode would release weak references of the first: a later allocation crashes, in any code."""
    make_case(tmp_path, *FORMS["dora, modules_to_save"], torch.bfloat16)
    (tmp_path / "files").mkdir()
    plan = plan_merge(tmp_path / "base", tmp_path / "adapter", "auto", 1 << 40, tmp_path / "files")
    fakes: list[Any] = [fake for fake, _ in plan.recording._storages.values()]
    assert len(fakes) > 20 and len({id(fake.fake_mode) for fake in fakes}) == 1


def _broken(folder: Path, case: str) -> str:
    adapter, base = folder / "adapter", folder / "base"
    config = json.loads((adapter / "adapter_config.json").read_text())
    if case == "scale":
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": float("nan")}))
        return r"adapter_config.json: lora_alpha is nan.*correct it"
    if case == "task":
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))
        return r"task_type is SEQ_CLS.*merge_and_unload"
    if case == "no base":
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
        return r"names no base_model_name_or_path; give it as --base"
    if case == "moved base":
        base.rename(folder / "elsewhere")
        return r"base: .*base is no folder here; give the folder of the base as --base"
    if case == "another base":
        shutil.rmtree(base)
        llama(hidden_size=32).to(torch.bfloat16).save_pretrained(base)
        return r"adapter: does not fit .*base \(.*size mismatch"
    if case == "a base with fewer layers":
        shutil.rmtree(base)
        llama(num_hidden_layers=1).to(torch.bfloat16).save_pretrained(base)
        return r"adapter_model.safetensors: \d+ tensors have no place in the base, the first is .*layers\.1.*--base"
    file = next((adapter if case.startswith("adapter") else base).glob("*.safetensors"))
    return _broken_file(file, case)


def _broken_file(file: Path, case: str) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if case.endswith("cut short"):
        file.write_bytes(file.read_bytes()[:-100])
        return rf"{file.name}: tensor .* behind the end of the file; download it again"
    name = next(n for n in sorted(tensors) if "down_proj" in n)
    if case.endswith("lacks a tensor"):
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})
        if case.startswith("adapter"):
            return r"down_proj.weight: the merged weight depends on values that neither"
        return rf"base: lacks 1 tensors, the first is {name}; download it again"
    tensors[name][0, 0] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    return rf"adapter_model.safetensors: tensor {name} has values that are infinite or no numbers"


@pytest.mark.parametrize(
    "case",
    [
        *("scale", "task", "no base", "moved base", "another base", "a base with fewer layers"),
        *(
            "adapter cut short",
            "base cut short",
            "adapter lacks a tensor",
            "base lacks a tensor",
            "adapter is infinite",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name_and_leave_nothing(tmp_path: Path, case: str) -> None:
    make_case(tmp_path, llama, {"target_modules": ["q_proj", "down_proj"]}, torch.bfloat16)
    before = _broken(tmp_path, case), sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=before[0]):
        merge_adapter(tmp_path / "adapter", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == before[1]
