"""Merges adapters into packed bases: ``merge_packed.py SCRATCH`` prints a line of JSON for each."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from disco_accel.errors import ConfigError
from disco_accel.integrate.hf.merge import merge_adapter
from tests.integrate.merge_cases import differing_files

FORMS: dict[str, Any] = {
    "NF4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "NF4, double": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "FP4": BitsAndBytesConfig(load_in_4bit=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}  # fmt: skip
HOST = {"": "cpu"}


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def packed(folder: Path, form: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        attention_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=form, device_map=HOST)
    model.save_pretrained(folder / "base", max_shard_size="100KB")


def dequantised(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", device_map=HOST).dequantize()
    # Conversions of packed weights, which cannot be reverted and are none of the dequantised model's.
    model._weight_conversions = None
    return model


def merged_both_ways(folder: Path) -> list[str]:
    """The files that differ."""
    tuned = get_peft_model(
        dequantised(folder), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(str(folder / "adapter"))
    merged: Any = PeftModel.from_pretrained(dequantised(folder), str(folder / "adapter")).merge_and_unload()
    merged.save_pretrained(folder / "peft")
    report = merge_adapter(folder / "adapter", folder / "ours", memory=1 << 20)
    return [*differing_files(folder / "ours", folder / "peft"), *(["limit"] if report.peak > 1 << 20 else [])]


def main() -> None:
    disable_progress_bar()
    set_verbosity_error()
    scratch = Path(sys.argv[1])
    for name, form in FORMS.items():
        for dtype in (torch.float32, torch.bfloat16):
            folder = scratch / f"{name} {dtype}"
            packed(folder, form, dtype)
            tell(form=name, dtype=str(dtype), different=merged_both_ways(folder))
    from torchao.quantization import Int8WeightOnlyConfig

    packed(scratch / "torchao", TorchAoConfig(Int8WeightOnlyConfig()), torch.bfloat16)
    try:
        merge_adapter(
            scratch / "NF4 torch.float32" / "adapter", scratch / "ours", base=str(scratch / "torchao" / "base")
        )
    except ConfigError as error:
        tell(refused=str(error))


main()
