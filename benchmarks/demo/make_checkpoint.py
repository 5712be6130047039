"""Write a Hugging Face checkpoint directory of a randomly initialised Llama, with a tokenizer of its own.

    python -m benchmarks.demo.make_checkpoint out/demo/checkpoint

The weights are bf16 safetensors in several shards, drawn from a fixed seed; the tokenizer is a byte-level BPE
trained on the text that the repository ships. Everything a checkpoint from a hub has, without a network.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

CORPUS = Path(__file__).resolve().parents[2] / "recipes" / "data" / "persuasion.txt"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama. The defaults make 77 M parameters, 154 MB in bf16."""

    hidden_size: int = 768
    num_hidden_layers: int = 10
    intermediate_size: int = 2048
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    vocab_size: int = 4096
    max_position_embeddings: int = 2048


def train_tokenizer(corpus: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` tokens, trained on one text file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def write_checkpoint(
    directory: str | Path,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str = "40MB",
    corpus: Path = CORPUS,
) -> int:
    """Write config, sharded weights and tokenizer into ``directory`` (replaced if there); returns bytes of weights."""
    shape = shape or Shape()
    target = Path(directory)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = train_tokenizer(corpus, shape.vocab_size)
    config = LlamaConfig(
        **asdict(shape),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    disable_progress_bar()
    model.save_pretrained(partial, max_shard_size=shard_size)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the size of what was written."""
    parser = argparse.ArgumentParser(description="write a random-init Llama checkpoint")
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", default="40MB")
    for name, value in asdict(Shape()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = vars(parser.parse_args(argv))
    directory, seed, shard_size = args.pop("directory"), args.pop("seed"), args.pop("shard_size")
    weights = write_checkpoint(directory, Shape(**args), seed=seed, shard_size=shard_size)
    shards = len(list(Path(directory).glob("*.safetensors")))
    print(f"{directory}: {weights // 2 / 1e6:.1f} M parameters, {weights / 1e6:.1f} MB in {shards} shards")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
