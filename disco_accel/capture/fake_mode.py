"""The mode of fake tensors under which code of others runs, which may copy tensors."""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensorMode


class _SharedMode(FakeTensorMode):
    """Not copied with its tensors.

    torch's own copies its table of constants too, each a weak reference to a storage, without counting it again. Both
    tables release it in turn, the second one in memory that is free by then and may be somebody else's.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedMode:
        return self


def fake_mode() -> FakeTensorMode:
    """A fake mode that takes real tensors as well, and is the mode of copies of its tensors, too."""
    return _SharedMode(allow_non_fake_inputs=True)
