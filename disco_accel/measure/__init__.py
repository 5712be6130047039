"""Costs of ops, known before a plan is made: allocations, seconds, writes in place."""
