"""Checkpoints that appear all at once: a process that is killed while it saves leaves no half of one behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from disco_accel.graph.files import flush_to_disk

STAGING = ".saving"
"""Where files are written before they get their place; what a killed process leaves in it is removed."""


class WholeCheckpoints(Trainer):
    """A Trainer that writes each checkpoint to a folder beside the others and then renames it.

    All processes of a run must share its output folder, as Trainer wants it anyway.
    """

    _staging: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))
        staging = folder / STAGING
        if self.args.should_save:
            clear(staging)
        self.accelerator.wait_for_everyone()
        self._staging = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish(staging, folder)
            self._drop_oldest(folder)

    def _drop_oldest(self, folder: Path) -> None:
        limit = self.args.save_total_limit
        if not limit:
            return
        checkpoints = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda c: int(c.name.rpartition("-")[2]))
        for checkpoint in checkpoints[:-limit]:
            # A folder that is being deleted is no checkpoint any more.
            (folder / STAGING).mkdir(exist_ok=True)
            clear(checkpoint.rename(folder / STAGING / checkpoint.name))
        clear(folder / STAGING)


def clear(staging: Path) -> None:
    """Remove ``staging`` and all in it, if it is there."""
    shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, folder: Path) -> None:
    """Move everything in ``staging`` to ``folder``, once it is on disk; what has the same name there is replaced."""
    files = [path for path in staging.rglob("*") if path.is_file()]
    for path in [*files, *(p for p in staging.rglob("*") if p.is_dir()), staging]:
        flush_to_disk(path)
    for path in sorted(staging.iterdir()):
        target = folder / path.name
        if target.is_dir():
            clear(target.rename(staging / f"{path.name}.replaced"))
        path.replace(target)
    flush_to_disk(folder)
    clear(staging)
