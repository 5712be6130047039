"""A reader's folder: what the commands of the pages take for granted, with a tiny model in place of large ones.

python -m tests.pages.workspace FOLDER    makes one
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.demo.make_checkpoint import Shape, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Pages are for readers, and what a page says to type has to work when it is typed. " * 60
TINY = Shape(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    max_position_embeddings=256,
)
# The recipes of configs with these values in place of theirs.
SMALLER: dict[str, dict[str, Any]] = {
    "disco.yaml": {"disco_config": {"memory_budget": "16MiB", "compute_threads": 1}},
    "lora_7b.yaml": {
        "max_length": 32,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "save_steps": 0,
        "num_threads": 1,
        "disco_config": {"memory_budget": "16MiB", "compute_threads": 1},
    },
    "lora_demo.yaml": {"max_length": 32, "max_steps": 2},
    "prefill_demo.yaml": {
        "prompts": "prompts.jsonl",
        "max_length": 64,
        "disco_config": {"memory_budget": "16MiB", "compute_threads": 1},
    },
}
SCRIPT = '''
"""A user's training script; it knows nothing of us."""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

model = AutoModelForCausalLM.from_pretrained("out/demo/checkpoint")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": [i + j for j in range(16)], "labels": [i + j for j in range(16)]} for i in range(8)]
arguments = TrainingArguments("out/trained", max_steps=2, per_device_train_batch_size=2, report_to=[])
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
trainer.train()
model.save_pretrained("out/trained")

import sys
if "disco_accel.integrate.prepare" in sys.modules:
    from disco_accel import stats
    steps = {name: stats(model).get(name, 0) for name in ("steps_compiled", "steps_eager")}
    with open("planned.txt", "a") as file:
        print(steps["steps_compiled"], steps["steps_eager"], file=file)
'''


def make(folder: Path) -> None:
    """Fill ``folder``: a tiny checkpoint, scripts, data, configs, and links to what a checkout has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("benchmarks", "docs", "recipes", "tests", "runtime_ext"):
        (folder / name).symlink_to(ROOT / name)
    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT)
    write_checkpoint(folder / "out" / "demo" / "checkpoint", TINY, corpus=corpus)
    (folder / "configs").mkdir()
    for name, changes in SMALLER.items():
        values = yaml.safe_load((ROOT / "configs" / name).read_text())
        values |= changes | ({"model_name_or_path": "out/demo/checkpoint"} if "model_name_or_path" in values else {})
        (folder / "configs" / name).write_text(json.dumps(values))
    records = [{"prompt": f"What is {n}? ", "completion": "A number. " * 9} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "prompts.jsonl").write_text('{"prompt": "What is 7?"}\n{"text": "Pages are for readers"}\n')
    (folder / "train.py").write_text(SCRIPT.lstrip())
    (folder / "acc.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\n")
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    (folder / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}))
    shutil.copy(ROOT / "docs" / "examples" / "chain.taskgraph.json", folder / "task.json")


def shell(text: str, folder: Path, environment: dict[str, str], where: str) -> str:
    """Run the lines of ``text`` in ``folder``; return what they printed. AssertionError naming ``where`` on failure."""
    done = subprocess.run(
        [shutil.which("bash") or "/bin/bash", "-eux", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{where}: ended with {done.returncode}\n{text}\n{done.stdout[-4000:]}"
    return done.stdout


if __name__ == "__main__":
    make(Path(sys.argv[1]))
