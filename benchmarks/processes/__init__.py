"""Several processes on one machine: moving budgets, shared weights, the machine's own limits."""
