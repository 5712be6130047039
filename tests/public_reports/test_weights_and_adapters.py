"""Reports about tied weights, adapters that come and go, edits of weights, merging and saving."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification

from tests.public_reports.rig import Run, adamw, batch, case, compare, llama, lora


def saved(model: Any) -> dict[str, str]:
    """The hash of every weight file that ``save_pretrained`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).rglob("*.safetensors"))
        assert files
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def evaluate(run: Run, model: Any, name: str) -> None:
    """See the logits of one batch, in eval mode."""
    model.eval()
    with torch.no_grad():
        run.see(name, model(input_ids=batch(9)["input_ids"]).logits)
    model.train()


def tied_head(run: Run, tie: bool) -> None:
    """peft #2864, unsloth #9331: the trained head of a tied model was lost when it was merged."""
    head = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": tie}
    model = run.prepare(lora(llama(tie_word_embeddings=True), task_type="CAUSAL_LM", **head))
    optimizer = adamw(model)
    for seed in range(3):
        run.step(model, optimizer, **batch(seed))
    run.end(model, optimizer)
    run.see("adapter", saved(model))
    evaluate(run, model, "before")
    merged = model.merge_and_unload()
    evaluate(run, merged, "merged")
    run.see("merged files", saved(merged))


@case(3)
def test_a_tied_head_that_is_trained_is_merged(run: Run) -> None:
    """With both modules tied."""
    tied_head(run, True)


@case(3, long=True)
def test_a_head_that_is_no_longer_tied_is_merged(run: Run) -> None:
    """With a copy of each."""
    tied_head(run, False)


@case(2)
def test_some_tokens_are_trained_after_the_vocabulary_grew(run: Run) -> None:
    """peft #2399, LLaMA-Factory #6749: ``trainable_token_indices`` on tied models, beside LoRA."""
    base = llama(tie_word_embeddings=True)
    base.resize_token_embeddings(140)
    model = run.prepare(lora(base, task_type="CAUSAL_LM", trainable_token_indices=[3, 5]))
    optimizer = adamw(model)
    ids = torch.tensor([[3, 5, 9, 131, 3, 7, 5, 139]])
    for _ in range(2):
        run.step(model, optimizer, input_ids=ids, labels=ids)
    run.end(model, optimizer)
    run.see("files", saved(model))


@case(2)
def test_the_vocabulary_grows_in_training(run: Run) -> None:
    """LLaMA-Factory #6749: ``resize_token_embeddings`` of a model that trains already."""
    model = run.prepare(llama(tie_word_embeddings=True))
    optimizer = adamw(model)
    run.step(model, optimizer, **batch(0))
    model.resize_token_embeddings(136)
    optimizer = adamw(model)
    ids = torch.tensor([[3, 5, 9, 131, 3, 7, 5, 135]])
    run.step(model, optimizer, input_ids=ids, labels=ids)
    run.end(model, optimizer)


@case(4)
def test_loading_an_adapter_changes_nothing_of_another(run: Run) -> None:
    """peft #3580, #3487, #2759: loading a second adapter flipped requires_grad of the first."""
    model = run.prepare(lora(llama(), task_type="CAUSAL_LM"))
    optimizer = adamw(model)
    run.step(model, optimizer, **batch(0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        run.step(model, optimizer, **batch(1))
        model.load_adapter(folder, "second", is_trainable=True)
    run.see("trained", [name for name, p in model.named_parameters() if p.requires_grad])
    optimizer = adamw(model)
    run.step(model, optimizer, **batch(2))
    model.set_adapter("second")
    run.see("trained", [name for name, p in model.named_parameters() if p.requires_grad])
    run.step(model, adamw(model), **batch(3))
    model.set_requires_grad("default", requires_grad=True)
    model.set_requires_grad("second", requires_grad=False)
    run.see("trained", [name for name, p in model.named_parameters() if p.requires_grad])
    model.set_adapter("default")
    run.step(model, adamw(model), **batch(4))
    run.end(model)


@case(4)
def test_a_reference_adapter_is_a_copy(run: Run) -> None:
    """trl #5222, #6043: DPO's ``ref`` adapter is made by ``.data.copy_`` and read without gradients."""
    model = lora(llama(), task_type="CAUSAL_LM")
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = run.prepare(model)
    optimizer = adamw(model)
    for seed in range(4):
        if seed in (0, 3):
            weights = dict(model.named_parameters())
            for name, weight in weights.items():
                if ".ref." in name:
                    weight.data.copy_(weights[name.replace(".ref.", ".default.")].data)
        inputs = batch(seed)
        with torch.no_grad():
            model.set_adapter("ref")
            reference = model(**inputs).loss
            model.set_adapter("default")
            with model.disable_adapter():
                base = model(**inputs).loss
        run.see("references", [reference, base])
        loss = model(**inputs).loss
        run.backward(model, -torch.nn.functional.logsigmoid(0.1 * (reference - loss) + 0.1 * (base - loss)))
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@case(4)
def test_an_adapter_is_taken_off_and_another_put_on(run: Run) -> None:
    """sd-forge #795, peft #2611, diffusers #12396: the compiled graph kept the old adapter."""
    from peft.utils.hotswap import hotswap_adapter

    model = run.prepare(lora(llama(), task_type="CAUSAL_LM"))
    run.step(model, adamw(model), **batch(0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        run.step(model, adamw(model, 0.1), **batch(1))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.set_adapter("other")
        model.delete_adapter("default")
        run.step(model, adamw(model), **batch(1))
        model.add_adapter("default", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.set_adapter("default")
        run.step(model, adamw(model), **batch(1))
        hotswap_adapter(model, folder, adapter_name="default", torch_device="cpu")
    run.step(model, adamw(model), **batch(1))
    run.end(model)


@case(2)
def test_an_adapter_that_changes_its_base(run: Run) -> None:
    """peft #1929, #1626: PiSSA and OLoRA take their part out of the frozen base when they are added."""
    model = run.prepare(lora(llama(), task_type="CAUSAL_LM"))
    run.step(model, adamw(model), **batch(0))
    for kind in ("pissa", "olora"):
        model.add_adapter(kind, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=kind))
        model.set_adapter(kind)
        run.step(model, adamw(model), **batch(1))
        with model.disable_adapter():
            evaluate(run, model, f"without {kind}")
    run.end(model)


@case(2)
def test_dora_of_conv1d_with_dropout(run: Run) -> None:
    """peft #1588, OneTrainer #1571: DoRA on GPT-2's transposed weights."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    base = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False))
    keys = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_dropout": 0.1, "use_dora": True}
    model = run.prepare(lora(base, **keys))
    optimizer = adamw(model)
    for seed in range(3):
        run.step(model, optimizer, **batch(seed))
    run.end(model, optimizer)


@case(2, tight=True)
def test_what_is_saved_has_no_placeholders(run: Run) -> None:
    """sglang #16737, peft #868, #1190, accelerate #4261: a merge or a save under offload reads placeholders."""
    model = run.prepare(lora(llama(num_hidden_layers=2), task_type="CAUSAL_LM"))
    optimizer = adamw(model)
    for seed in range(2):
        loss = model(**batch(seed)).loss
        run.see("between", saved(model))
        run.backward(model, loss)
        optimizer.step()
        optimizer.zero_grad()
    run.see("adapter", saved(model))
    run.see("state", model.state_dict())
    merged = model.merge_and_unload()
    run.see("merged", merged.state_dict())
    run.see("files", saved(merged))


@pytest.mark.parametrize("optimizer", ["planned", pytest.param("host", marks=pytest.mark.long)])
def test_a_merge_between_steps_has_the_last_update(optimizer: str) -> None:
    """sglang #16737, peft #868: weights are synced to a server after each step: merge, copy, unmerge."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama(), task_type="CAUSAL_LM"))
        updates = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        for seed in range(3):
            model(**batch(seed)).loss.backward()
            updates.step()
            updates.zero_grad()
            model.merge_adapter()
            run.see("synced", model.state_dict())
            model.unmerge_adapter()
        run.see("published", model.merge_and_unload().state_dict())

    compare(script, "plenty", optimizer, planned=3)


@pytest.mark.parametrize("order", ["load, prepare", pytest.param("prepare, load", marks=pytest.mark.long)])
def test_a_trained_score_head_comes_back(order: str, tmp_path: Path) -> None:
    """sentence-transformers #3980, peft #1070: the trained score head was not restored."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "num_labels": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}

    def base() -> Any:
        torch.manual_seed(7)
        return LlamaForSequenceClassification(LlamaConfig(**(sizes | heads))).train()

    def script(run: Run) -> None:
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
        model = run.prepare(get_peft_model(base(), adapters).train())
        inputs = {"input_ids": batch(1)["input_ids"], "labels": torch.tensor([0, 2])}
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer, **inputs)
        model.save_pretrained(tmp_path)
        if order == "load, prepare":
            again = run.prepare(PeftModel.from_pretrained(base(), tmp_path, is_trainable=True).train())
        else:
            again = run.prepare(get_peft_model(base(), copy.deepcopy(adapters)).train())
            again.load_adapter(tmp_path, "default", is_trainable=True)
        run.step(again, adamw(again), **inputs)
        run.end(again)

    compare(script, "plenty", "device", planned=3)
