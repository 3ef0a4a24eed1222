"""A matrix product that runs while a collective is measured: what a training step does meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import TracebackType

import torch

from pycoll.bench.engine import Effort, Peers, Work, measure
from pycoll.bench.results import Sample

# A product of so many rows and columns lasts milliseconds: the thread seldom asks for Python's lock.
ROWS = 768


class MatrixProducts:
    """Multiplies float32 matrices over and over on a thread of its own; a context manager.

    Args:
        device: where the matrices lie. On a GPU the products run on a stream of their own.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._left, self._right = (torch.rand(ROWS, ROWS, device=device) for _ in range(2))
        self._product = torch.empty(ROWS, ROWS, device=device)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="matrix products")
        self._count, self._seconds = 0, 0.0

    @property
    def seconds(self) -> float:
        """A product's duration, as an average; after the products have ended."""
        return self._seconds / max(1, self._count)

    def _run(self) -> None:
        start = time.perf_counter()
        while not self._stop.is_set():
            if self._stream is None:
                torch.mm(self._left, self._right, out=self._product)
            else:
                with torch.cuda.stream(self._stream):
                    torch.mm(self._left, self._right, out=self._product)
                self._stream.synchronize()
            self._count += 1
        self._seconds = time.perf_counter() - start

    def __enter__(self) -> MatrixProducts:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


def seconds_alone(device: str, duration: float = 0.2) -> float:
    """A product's duration when nothing else runs on this rank."""
    with MatrixProducts(device) as products:
        time.sleep(duration)
    return products.seconds


def measure_beside(
    work: Work, peers: Peers, effort: Effort, device: str, beside_products: bool
) -> Sample:
    """`engine.measure`, beside products if so told; then the sample says how much they were slowed down, too."""
    if not beside_products:
        return measure(work, peers, effort)
    alone = seconds_alone(device)
    with MatrixProducts(device) as products:
        sample = measure(work, peers, effort)
    return replace(sample, product_slowdown=products.seconds / alone)
