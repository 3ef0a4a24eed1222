"""Ranks for all tests, one pool of processes for each world size, and the switches of the suite.

PYCOLL_TEST_FULL=1, or --full, runs the full matrix. PYCOLL_TEST_BACKEND names another backend than
pycoll for the tests of collectives; most of what fails then is that backend's.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from case_runner import BACKEND
from simulated_kernels import simulated_kernels

from pycoll.testing import RankPool

FULL_VARIABLE = "PYCOLL_TEST_FULL"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help=f"the same as {FULL_VARIABLE}=1")


# Ranks of which two cores run but two at a time.
SLOW_WORLD_SIZE = 4


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C, and hand that on to what they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A table that was measured on this machine would choose other algorithms than the ones that tests are about.
    os.environ.setdefault("PYCOLL_TUNING", "off")
    if config.getoption("--full"):
        os.environ[FULL_VARIABLE] = "1"


# Before pytest leaves out what -m says.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("world_size", 0) >= SLOW_WORLD_SIZE:
            item.add_marker(pytest.mark.slow)
    if os.environ.get(FULL_VARIABLE) == "1":
        return
    skip = pytest.mark.skip(reason=f"part of the full run: {FULL_VARIABLE}=1 or --full")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """`pool(world_size)`: ranks that all tests share; they are started when first asked for.

    At the end of the session they must leave their groups and exit without an error.
    """
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, BACKEND)
        return pools[world_size]

    yield pool_of
    for opened in pools.values():
        opened.close()


@pytest.fixture(params=["cpu", pytest.param("simulated", marks=pytest.mark.slow)])
def operator_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test twice: with the CPU's kernels behind pycoll.ops, and with simulated CUDA kernels."""
    if request.param == "cpu":
        yield
        return
    with simulated_kernels():
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """In this process; what runs on ranks seeds itself."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
