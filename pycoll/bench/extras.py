"""Libraries that some reports need, and pycoll does not: the extra ``bench``."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


class MissingExtra(RuntimeError):  # noqa: N818 (what is said to the user, no bug)
    """A library is missing; the message is one line with the command that installs it."""


def need(module: str, purpose: str) -> ModuleType:
    """Imports a module.

    Args:
        module: for example "matplotlib".
        purpose: what needs it, for example "--plot".

    Raises:
        MissingExtra: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingExtra(
            f"{purpose} needs {package}, which is not installed: pip install 'pycoll[bench]'"
        ) from None


def has_rich() -> bool:
    """Whether tables and progress can be drawn; without it they are plain text."""
    return importlib.util.find_spec("rich") is not None
