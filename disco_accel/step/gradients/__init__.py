"""Sums and norms of gradients within a step's plan, where an optimizer on the host waits for them."""
