"""Libraries that pack weights: one file for each, one table (``libraries.py``). None of them is imported here."""
