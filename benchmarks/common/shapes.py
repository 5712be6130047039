"""Named shapes of Llamas: what ``LlamaConfig`` takes, as in the published configs of models of that size."""

from __future__ import annotations

from collections.abc import Mapping

Shape = Mapping[str, int]


def llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    """Keyword arguments for ``LlamaConfig``."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


PRESETS: Mapping[str, Shape] = {
    "tiny": llama(128, 256, 2, 4, 2, 96),
    "small": llama(512, 1408, 8, 8, 8, 4096),
    "77m": llama(768, 2048, 10, 12, 12, 4096),
    "1b": llama(2048, 5632, 22, 32, 4, 32000),
    "1.5b": llama(1536, 8960, 28, 12, 2, 151936),
    "7b": llama(4096, 11008, 32, 32, 32, 32000),
    "8b": llama(4096, 14336, 32, 32, 8, 128256),
    "13b": llama(5120, 13824, 40, 40, 40, 32000),
    "14b": llama(5120, 13824, 48, 40, 8, 152064),
    "32b": llama(5120, 27648, 64, 40, 8, 152064),
    "65b": llama(8192, 22016, 80, 64, 64, 32000),
    "70b": llama(8192, 28672, 80, 64, 8, 32000),
}
"""1b: TinyLlama; 7b, 13b, 70b: Llama 2; 65b: the first Llama; 8b: Llama 3; 1.5b, 14b, 32b: the sizes of Qwen2.5."""


def frozen_bytes(shape: Shape, itemsize: int) -> int:
    """Bytes of the weights, the output layer not tied to the embedding."""
    hidden, ffn, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * ffn + 2 * hidden
    return itemsize * (layers * layer + 2 * shape["vocab_size"] * hidden + hidden)
