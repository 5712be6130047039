"""What happens to gradients within a step's plan where an optimizer on the host waits for them."""
