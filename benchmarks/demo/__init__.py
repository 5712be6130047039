"""LoRA under half the memory, with and without us."""
