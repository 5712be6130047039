"""Updates of trained weights in host memory, deferred to the head of the next step's plan."""
