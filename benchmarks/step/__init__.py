"""A LoRA step beside eager mode and others."""
