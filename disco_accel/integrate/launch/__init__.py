"""Launching an unchanged script."""
