"""The pictures of docs/report.md, of an 8 B Llama as planned for 11 GiB, or of the step in a folder.

python -m tests.observe.screenshots [DIR]
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import yaml
from PIL import Image

from tests.support.browser import Tab, opened

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
LLAMA_8B = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False},
}


def planned() -> Path:
    """The folder of a plan of 1 x 2048 tokens; it takes a minute."""
    folder = ROOT / "out" / "screenshots"
    model = folder / "Llama 8B"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    recipe = yaml.safe_load((ROOT / "configs" / "lora_7b.yaml").read_text())
    recipe |= {"model_name_or_path": model.name, "max_length": 2048, "per_device_train_batch_size": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "disco_accel.cli.main", "plan", "recipe.yaml"]
    subprocess.run([*command, "--device", "cuda", "--memory", "11GiB", "-o", "plan"], cwd=folder, check=True)
    return folder / "plan"


def box(tab: Tab, first: str, last: str) -> tuple[float, float, float, float]:
    """The rectangle of the page from one element to another."""
    at = [tab.value(f"document.querySelector({each!r}).getBoundingClientRect().toJSON()") for each in (first, last)]
    top = tab.value("window.scrollY")
    height = at[1]["y"] + at[1]["height"] - at[0]["y"]
    return max(at[0]["x"] - 12, 0), max(at[0]["y"] + top - 12, 0), at[0]["width"] + 24, height + 24


def save(name: str, png: bytes) -> None:
    """With 256 colours, which is a third of the bytes."""
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(IMAGES / name, optimize=True)


def main() -> None:
    """Take them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else planned()
    page = folder / "report.html"
    IMAGES.mkdir(exist_ok=True)
    with opened(page, width=1240) as tab:
        save("report-step.png", tab.picture(box(tab, "header", "#live")))
        tab.click("#moved tbody button")
        save("report-tables.png", tab.picture(box(tab, "section:nth-of-type(3)", "section:nth-of-type(4)")))
    with opened(page, width=1240, dark=True) as tab:
        tab.value("page.view.set(page.finish * 0.36, page.finish * 0.4)")
        tab.drawn()
        tab.mouse("mouseMoved", *tab.place("#timeline", 0.56, 0.52))
        tab.drawn()
        save("report-near.png", tab.picture(box(tab, "main section", "#memory")))
        assert not tab.errors, tab.errors


if __name__ == "__main__":
    main()
