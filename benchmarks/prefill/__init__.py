"""A prefill beside eager mode and others."""
