"""Machines, and plans in simulated time on them."""
