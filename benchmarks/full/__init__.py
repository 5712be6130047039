"""A whole model trained with AdamW: eager, ours, and others."""
