"""A device that the simulator of CUDA kernels plays: CPU tensors stand for its tensors, and pycoll's backend treats
them as it treats those of a GPU (tests/sim/device.h).

    device = SimulatedDevice(seed=rank)
    with device.active():
        dist.all_reduce(x)          # x is not summed yet: the kernel stands in a stream
        device.call(lambda: y.copy_(2 * x))
    device.synchronise()            # now both have run, one after the other

Streams run in a random order that their events allow, so a missing event is found.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from simulated_kernels import library

from pycoll import _core
from pycoll.backend import extension

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def _functions() -> ctypes.CDLL:
    loaded = library()
    for name in ("new", "base"):
        getattr(loaded, f"pycoll_sim_device_{name}").restype = ctypes.c_void_p
    for name in ("synchronise", "run_a_little", "begin_capture", "end_capture"):
        getattr(loaded, f"pycoll_sim_device_{name}").restype = ctypes.c_char_p
    loaded.pycoll_sim_device_new_stream.restype = ctypes.c_int64
    loaded.pycoll_sim_device_num_launches.restype = ctypes.c_uint64
    loaded.pycoll_sim_device_num_allocations.restype = ctypes.c_size_t
    return loaded


class SimulatedDevice:
    """One rank's. It must live longer than the groups that use it, so it is never freed."""

    def __init__(self, seed: int = 1, num_multiprocessors: int = 4) -> None:
        self._library = _functions()
        self._address = ctypes.c_void_p(
            self._library.pycoll_sim_device_new(ctypes.c_uint64(seed), num_multiprocessors)
        )
        self._calls: list[Callable[[], Any]] = []
        self._errors: list[BaseException] = []
        self._trampoline = _CALL(self._run_call)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it collectives that this thread calls on CPU tensors run on the device."""
        extension()
        core = _core.load()
        base = self._library.pycoll_sim_device_base(self._address)
        before = core.set_simulated_device(base)
        try:
            yield
        finally:
            core.set_simulated_device(before)

    @staticmethod
    @contextlib.contextmanager
    def nothing_active() -> Iterator[None]:
        """Within it CPU tensors are what they are, also inside of `active`."""
        core = _core.load()
        before = core.set_simulated_device(0)
        try:
            yield
        finally:
            core.set_simulated_device(before)

    @property
    def num_launches(self) -> int:
        """Of kernels that have run."""
        return int(self._library.pycoll_sim_device_num_launches(self._address))

    @property
    def num_allocations(self) -> int:
        """Of memory, the host's included, that has not been given back."""
        return int(self._library.pycoll_sim_device_num_allocations(self._address))

    def limit_memory(self, nbytes: int) -> None:
        """From now on it has no room for more than this at once."""
        self._library.pycoll_sim_device_limit_memory(self._address, ctypes.c_size_t(nbytes))

    def new_stream(self) -> int:
        return int(self._library.pycoll_sim_device_new_stream(self._address))

    @contextlib.contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        """Within it `stream` is the current one; 0 is, elsewhere."""
        self._library.pycoll_sim_device_set_stream(self._address, ctypes.c_int64(stream))
        try:
            yield
        finally:
            self._library.pycoll_sim_device_set_stream(self._address, ctypes.c_int64(0))

    def call(self, fn: Callable[[], Any]) -> None:
        """Puts `fn` into the current stream, as if it were a kernel of torch."""
        self._calls.append(fn)
        index = ctypes.c_int64(len(self._calls) - 1)
        self._library.pycoll_sim_device_call(self._address, self._trampoline, index)

    def _run_call(self, index: int) -> None:
        try:
            self._calls[index]()
        except BaseException as error:
            self._errors.append(error)

    def synchronise(self) -> None:
        """Runs all that stands in streams.

        Raises:
            RuntimeError: what the simulator found.
        """
        _check(self._library.pycoll_sim_device_synchronise(self._address))
        if self._errors:
            raise self._errors.pop()

    def run_a_little(self) -> None:
        """Runs one of the things that stand first in streams."""
        _check(self._library.pycoll_sim_device_run_a_little(self._address))

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[int]]:
        """What is put into the current stream meanwhile becomes a graph, whose number the list gets."""
        numbers: list[int] = []
        _check(self._library.pycoll_sim_device_begin_capture(self._address))
        graph = ctypes.c_size_t()
        try:
            yield numbers
        except BaseException:
            self._library.pycoll_sim_device_end_capture(self._address, ctypes.byref(graph))
            raise
        _check(self._library.pycoll_sim_device_end_capture(self._address, ctypes.byref(graph)))
        numbers.append(graph.value)

    def replay(self, graph: int) -> None:
        self._library.pycoll_sim_device_replay(self._address, ctypes.c_size_t(graph))

    def delete_graph(self, graph: int) -> None:
        self._library.pycoll_sim_device_delete_graph(self._address, ctypes.c_size_t(graph))


def _check(text: bytes | None) -> None:
    if text is not None:
        raise RuntimeError(text.decode())
