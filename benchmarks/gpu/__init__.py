"""Measurements on a GPU, in stages."""
