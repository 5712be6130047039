"""Updates of trained weights in host memory, put off to the head of the next step's plan."""
