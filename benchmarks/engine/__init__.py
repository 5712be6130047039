"""The engine's overhead and overlap, on plans and on programs of its core."""
