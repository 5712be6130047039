"""LoRA fine-tuning of a Hugging Face causal language model, from one YAML file.

    python recipes/lora.py configs/lora_demo.yaml
    accelerate launch --config configs/disco.yaml recipes/lora.py configs/lora_demo.yaml

The second line runs the same program under a memory budget; nothing here knows about it. A ``disco_config`` section
in the recipe does the same without a launcher. Exit code 0: trained; 2: the recipe, model or data is wrong (a line
on stderr says what); 130: stopped by Ctrl-C, once with a checkpoint to resume from, twice at once; 1: a step failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, "") and (Path(__file__).resolve().parents[1] / "disco_accel").is_dir():
    # Run as a script in a checkout: this folder is on the path, the package that it belongs to need not be.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from disco_accel.config.settings import process_rank
from disco_accel.errors import DiscoError, ExecutionError
from disco_accel.recipes.settings import read_recipe


def main(argv: list[str] | None = None) -> int:
    """Run the recipe named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lora.py", description="LoRA fine-tuning from a recipe file")
    parser.add_argument("recipe", help="YAML file; see configs/lora_demo.yaml")
    parser.add_argument("--output_dir", help="replaces the recipe's key")
    parser.add_argument("--max_steps", type=int, help="replaces the recipe's key")
    parser.add_argument(
        "--resume_from_checkpoint",
        nargs="?",
        const=True,
        type=lambda text: {"true": True, "false": False}.get(text.lower(), text),
        help="a checkpoint folder; alone or true: the last one in output_dir",
    )
    args = parser.parse_args(argv)
    overrides = {key: value for key, value in vars(args).items() if key != "recipe" and value is not None}
    try:
        recipe = read_recipe(args.recipe, overrides)
        if process_rank() == 0 and sys.modules.get("torch") is None:
            print(f"{recipe.model_name_or_path}: loading PyTorch and transformers", file=sys.stderr, flush=True)
        from disco_accel.recipes.lora_training import quiet_libraries, train

        quiet_libraries()
        return train(recipe)
    except ExecutionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except DiscoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once, without a checkpoint of this step", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
