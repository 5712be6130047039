"""A step from capture to backward: compiled once for its key, run from its plan, or again as the model's own."""
