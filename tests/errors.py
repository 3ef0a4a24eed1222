"""What a call raises, as text that ranks can send back."""

from __future__ import annotations

from collections.abc import Callable


def text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
