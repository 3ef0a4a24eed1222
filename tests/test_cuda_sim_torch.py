"""Simulated CUDA kernels on torch's tensors, compared bit by bit with pycoll.reference.

Collectives are here, the kernels behind pycoll.ops in test_ops.py and test_bucket_kernels.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_kernels
import torch
from checker import assert_same_bits
from quantisation_data import hard_values
from simulated_kernels import ALGORITHMS, DTYPES, OPS
from torch import Tensor

from pycoll import ops, reference

pytestmark = pytest.mark.slow

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def test_dtypes_and_ops_are_numbered_as_in_the_code() -> None:
    csrc = Path(__file__).resolve().parents[1] / "csrc/base"
    dtypes = (csrc / "dtype.h").read_text(encoding="utf-8").split("kDTypeInfo[kNumDTypes] = {")[1]
    names = [line.split('"')[1] for line in dtypes.splitlines() if line.strip().startswith('{"')]
    for i, dtype in enumerate(DTYPES):
        assert dtype is None or str(dtype) == f"torch.{names[i]}"
    ops = (csrc / "reduce_op.h").read_text(encoding="utf-8").split("kNames[kNumReduceOps] = {")[1]
    found = [text for text in ops.split("}")[0].split('"') if text.replace("_", "").isalpha()]
    assert tuple(name.lower() for name in found) == OPS


def test_operators_run_simulated_kernels() -> None:
    """Or the tests that ask for them would test the CPU's."""
    tensors = [torch.arange(5.0), torch.arange(3).to(torch.bfloat16), torch.arange(300.0)]
    want = ops.flatten_quantised(tensors, block=64)
    before = simulated_kernels.num_launches()
    with simulated_kernels.simulated_kernels():
        got = ops.flatten_quantised(tensors, block=64)
        launched = simulated_kernels.num_launches() - before
    assert launched == 3  # one for each dtype, one for codes
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)
    ops.flatten(tensors)
    assert simulated_kernels.num_launches() == before + launched


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Bit by bit, but for kinds of NaN."""
    assert_same_bits(actual, expected, what, nan_payload=False)


def make_inputs(dtype: torch.dtype, numel: int, world_size: int) -> list[Tensor]:
    """Of bytes that depend on rank and position; floats of which most are finite."""
    inputs = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(numel * 31 + rank)
        if dtype.is_floating_point:
            x = (torch.randn(numel, generator=generator) * 4).to(dtype)
            x[rank + 5] = torch.nan
        elif dtype.is_complex:
            x = torch.randn(numel, generator=generator, dtype=torch.complex64).to(dtype)
        else:
            high = 2 if dtype == torch.bool else 256
            shape = (numel * dtype.itemsize,)
            x = torch.randint(0, high, shape, generator=generator).to(torch.uint8).view(dtype)
        inputs.append(x)
    return inputs


CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in OPS
    if dtype is not None
    and not (op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex))
    and not (op in ("min", "max") and dtype.is_complex)
    and not (op == "avg" and dtype == torch.bool)
    and not (op == "premul_sum" and not (dtype.is_floating_point or dtype.is_complex))
]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not None], ids=lambda d: str(d)[6:])
def test_all_reduce(dtype: torch.dtype) -> None:
    for algorithm in ALGORITHMS:
        for op in [op for of, op in CASES if of is dtype]:
            # A ring adds in another order: with two ranks the order does not matter.
            world_size, numel = (2 if "ring" in algorithm else 3), 317
            inputs = make_inputs(dtype, numel, world_size)
            before = [x.clone() for x in inputs]
            factors = [0.5 + rank / 3 for rank in range(world_size)]
            want = reference.all_reduce(before, op, factor=factors if op == "premul_sum" else None)
            got = simulated_kernels.all_reduce(inputs, algorithm, op=op, factors=factors)
            for rank in range(world_size):
                assert_same(got[rank], want[rank], f"{algorithm} {op}, rank {rank}")
                assert torch.equal(inputs[rank].view(torch.uint8), before[rank].view(torch.uint8))


@pytest.mark.parametrize("codes", CODES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", ["random", "outlier", "subnormal", "huge"])
def test_quantised_collectives(codes: torch.dtype, kind: str) -> None:
    """The same bits as the CPU's collectives, which are compared with the same reference."""
    world_size, numel, block = 3, 421, 64
    dtype = torch.bfloat16 if kind == "outlier" else torch.float32
    inputs = [hard_values(kind, numel, rank).to(dtype) for rank in range(world_size)]
    for op in ("sum", "avg", "max"):
        want = reference.all_reduce_on_wire(inputs, op, wire_dtype=codes, block=block)
        for algorithm in ("one_shot", "two_shot"):
            got = simulated_kernels.all_reduce(
                inputs, algorithm, op=op, wire_dtype=codes, block=block
            )
            for rank in range(world_size):
                assert_same(got[rank], want[rank], f"{algorithm} {op}, rank {rank}")
    rows = [torch.stack([x.roll(i) for i in range(world_size)]) for x in inputs]
    want = reference.reduce_scatter_on_wire(
        [list(row) for row in rows], wire_dtype=codes, block=block
    )
    got = simulated_kernels.reduce_scatter(rows, wire_dtype=codes, block=block)
    for rank in range(world_size):
        assert_same(got[rank], want[rank], f"reduce_scatter, rank {rank}")
    gathered = reference.all_gather_on_wire(inputs, wire_dtype=codes, block=block)
    for output, wanted in zip(
        simulated_kernels.all_gather(inputs, wire_dtype=codes, block=block), gathered, strict=True
    ):
        for x, y in zip(output, wanted, strict=True):
            assert_same(x, y, "all_gather")
