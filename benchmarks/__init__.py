"""Measurements, and the driver of ``make demo``."""
