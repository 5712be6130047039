"""The entry point that importing torch calls: it lets stock ``accelerate launch`` know our section.

torch calls ``autoload`` at the end of its own import (entry point group ``torch.backends``). In nearly every process
that costs one environment look-up. In an ``accelerate launch`` whose config file has a ``disco_config`` section, and in
the training process that such a launch starts, it waits for accelerate's modules and patches them once they are there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from disco_accel.config.keys import PARSERS

Patch = Callable[[ModuleType], None]

_LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate_cli.py", "launch.py")
# At the start of a line, or anywhere in a mapping that is written on one, as json.dump writes it.
_SECTION_LINE = re.compile(rf"""^["'{{\s]*(disco|({"|".join(PARSERS)})\b)|^[^#\n]*[{{,]\s*["']?disco""", re.MULTILINE)


class AfterImport(MetaPathFinder):
    """Calls a patch for a module as soon as the module has the attribute that the patch needs.

    A module that is not imported yet is patched right after its code has run. One whose import is under way (accelerate
    imports torch near its top, and torch calls us) is looked at again whenever anything else is imported.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, Patch]] = {}

    def add(self, module: str, attribute: str, patch: Patch) -> None:
        """Call ``patch(module)`` once ``module.attribute`` exists, at once if it does already."""
        self._waiting[module] = (attribute, patch)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._try(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing itself; wrap the loader of a module that is waited for."""
        for name in tuple(self._waiting):
            self._try(name)
        if fullname not in self._waiting:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._wrap(spec)
        return spec

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._try(spec.name)

        # On the instance: runpy, inspect and importlib.resources keep seeing the loader's own class.
        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _try(self, name: str) -> None:
        module = sys.modules.get(name)
        waiting = self._waiting.get(name)
        if module is None or waiting is None or not hasattr(module, waiting[0]):
            return
        # Removed first: a patch may import, which comes back here.
        del self._waiting[name]
        waiting[1](module)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


_after_import = AfterImport()


def autoload() -> None:
    """Called by the entry point of the ``torch.backends`` group. Never raises: a fault must not break torch."""
    try:
        from disco_accel.config import settings

        if not settings.autoload_wanted():
            return
        if settings.launched():
            activate()
        elif is_our_launch(sys.argv, getattr(sys, "orig_argv", ())):
            patch_launcher()
    except Exception as error:
        sys.stderr.write(f"disco_accel: not loaded with torch: {type(error).__name__}: {error}\n")


def activate() -> None:
    """Make this process train under the launcher's config file: patch accelerate and Trainer, now or once imported."""
    from disco_accel.config import settings
    from disco_accel.integrate.accelerate.patches import patch_accelerator, patch_ds_config
    from disco_accel.integrate.launch import exit_status
    from disco_accel.observe.log_to_stderr import show_messages

    exit_status.install()
    show_messages()
    if settings.ds_config_file() is not None:
        _after_import.add("accelerate.utils.deepspeed", "HfDeepSpeedConfig", patch_ds_config)
    _after_import.add("accelerate.accelerator", "Accelerator", patch_accelerator)
    _after_import.add("transformers.trainer", "Trainer", _patch_trainer)


def _patch_trainer(module: ModuleType) -> None:
    from disco_accel.integrate.accelerate.patches import patch_trainer
    from disco_accel.integrate.accelerate.trainer_runs import follow_trainers

    patch_trainer(module)
    follow_trainers(module)


def patch_launcher() -> None:
    """Teach this process's ``accelerate launch`` the option ``--config`` and the ``disco_config`` section."""
    from disco_accel.integrate.launch import exit_status, launcher

    exit_status.install()
    _after_import.add("accelerate.commands.utils", "CustomArgumentParser", launcher.alias_config_option)
    _after_import.add("accelerate.commands.config", "load_config_from_file", launcher.patch_config_reader)


def is_our_launch(argv: Sequence[str], orig_argv: Sequence[str] = ()) -> bool:
    """Whether this command line is an ``accelerate launch`` that concerns us.

    It is when a file given to ``--config`` or ``--config_file`` has a line that starts like our section or a key of it.
    It is when one given to ``--config`` (which accelerate does not know) is missing, or when it runs ``-m
    disco_accel.run``. Cheap and generous on purpose: accelerate's own parser then decides which options are its own.
    """
    program = os.path.basename(argv[0]) if argv else ""
    # Under ``python -m`` argv[0] is still "-m" while the package is imported.
    as_module = any(word.startswith("accelerate.commands.") for word in orig_argv[:4])
    if not as_module and program not in _LAUNCHERS:
        return False
    if program == "accelerate" and "launch" not in argv[1:2]:
        return False
    if "disco_accel.run" in argv:
        return True
    return any(_concerns_us(option, file) for option, file in _config_options(argv))


def _config_options(argv: Sequence[str]) -> list[tuple[str, str]]:
    options = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        option = option.replace("-", "_")
        if option in ("__config", "__config_file"):
            options.append((option, value if equals else following))
    return options


def _concerns_us(option: str, file: str) -> bool:
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return _SECTION_LINE.search(text.read(1 << 20)) is not None
    except OSError:
        return option == "__config"
