"""Decompositions: the graph of a step on one device becomes that of the same step on several."""
