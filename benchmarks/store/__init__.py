"""A tensor store: its speed, its policies, training with it, attacks on it."""
