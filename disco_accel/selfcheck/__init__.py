"""The self-check: does a plan compute on this device what plain PyTorch computes on it, whatever the timing?

``subject.py`` is a small training step and its plan, ``self_check.py`` tries it, ``outcome.py`` keeps the answer.
"""
