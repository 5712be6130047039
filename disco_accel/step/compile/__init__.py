"""From a model and a batch to a verified plan that can run: capture, costs, devices, budget, plan."""
