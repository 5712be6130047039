"""Losses and gradients are compared bit for bit."""

from tests.support.one_thread import one_thread

__all__ = ["one_thread"]
