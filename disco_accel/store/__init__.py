"""A store of tensors that processes of one user share, and of budgets of memory: see README.md."""
