"""The command line, ``disco-accel``."""
