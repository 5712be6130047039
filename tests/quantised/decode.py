"""Tokens of a mixture whose experts are packed: ``decode.py BUDGET``. Prints a line of JSON for each form.

In ``BUDGET`` a prompt's unpacked experts of one layer have room, and little else.
"""

import json
import sys
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.plan.summary import link_bytes
from disco_accel.step.run.session import find_state
from disco_accel.verify.static import verify
from tests.support.models import family_lora, random_batch
from tests.support.quantised import bnb_experts

torch.set_num_threads(1)
SIZES = {"num_experts": 64, "moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}


def model_of(nested: bool) -> Any:
    model: Any = family_lora("qwen3_moe", quantise=bnb_experts(nested), **SIZES).eval()
    model.get_base_model().set_experts_implementation("grouped_mm")
    return model


def generated(model: Any) -> list[torch.Tensor]:
    """Token ids and logits, with a cache that grows and then with a static one."""
    ids = random_batch(length=12)["input_ids"]
    keys = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    keys |= {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for kind in (None, "static"):
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation=kind, **keys)
        found += [made.sequences, *made.logits]
    return found


def outcome(nested: bool, budget: str) -> dict[str, Any]:
    expected, keys = generated(model_of(nested)), {"plan_cache": None, "device": "cpu", "link_bandwidth": 1e8}
    model = prepare(model_of(nested), DiscoConfig(memory_budget=budget, **keys))
    got = generated(model)
    state = find_state(model)
    assert state is not None and state.memory.current is not None
    step = state.memory.current
    verify(step.graph, step.plan)
    return {
        "equal": len(got) == len(expected) and all(map(torch.equal, got, expected)),
        "unplanned": stats(model)["forwards_unplanned"],
        "fallbacks": stats(model)["fallbacks"],
        "packed": sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name),
        "loaded": link_bytes(step.plan)[0],
        "unpacked": [step.graph.ops[v.id].args[4][0] for v in step.graph.vertices if v.op.endswith("dequantize_4bit")],
    }


def main() -> None:
    for nested in (False, True):
        print(json.dumps({"nested": nested, **outcome(nested, sys.argv[1])}), flush=True)


if __name__ == "__main__":
    main()
