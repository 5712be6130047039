"""Training of all weights with the optimizer's state in host memory, on a published study's machine, simulated."""
