"""The compiled part, loaded when it is first needed."""

from __future__ import annotations

from types import ModuleType


def load() -> ModuleType:
    """``pycoll._C``.

    Raises:
        ImportError: it was built for another minor version of torch, or not at all.
    """
    import torch

    from pycoll import _version

    try:
        from pycoll import _build
    except ImportError:
        raise ImportError(
            "pycoll has not been built; run: pip install --no-build-isolation . "
            "in its source folder, in this environment"
        ) from None
    _version.check_torch_version(_build.TORCH_VERSION, torch.__version__)
    from pycoll import _C

    return _C
