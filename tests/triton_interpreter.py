"""Triton's interpreter, for ranks that are processes: TRITON_INTERPRET=1 in their environment, and two remedies.

The interpreter replaces the names of its language anew at every call of a device function, which takes 10 ms; that is
a hundred times what the function itself does. Within a launch the first time for each module is enough. And who polls
sleeps a little, so that more ranks than cores do not take them from one another.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 1e-4


@functools.cache
def make_interpreter_fast() -> None:
    from triton import language
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    patched: set[str] = set()

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[str]:
        modules = {"language": language, "core": language.core}
        known = function.__globals__.values()
        return frozenset(name for name, it in modules.items() if any(it is x for x in known))

    def patch_once(function: Callable[..., Any]) -> Any:
        names = languages(function)
        if patched.issuperset(names):
            return None
        is_outermost = not patched
        patched.update(names)
        scope = patch_language(function)
        restore = scope.restore

        def restore_all() -> None:
            restore()
            patched.clear()

        if is_outermost:
            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    update = builder.create_atomic_rmw

    def update_and_rest(
        operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if sem == interpreter._ir.MEM_SEMANTIC.ACQUIRE:
            time.sleep(POLL_SECONDS)
        return update(operation, pointer, value, mask, sem, scope)

    builder.create_atomic_rmw = update_and_rest
