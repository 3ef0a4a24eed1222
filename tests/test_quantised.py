"""Collectives whose elements travel in fewer bits: bits, error bounds, bytes, disagreement, refusals.

The oracle is pycoll.reference for the bits, and float64 arithmetic for the bounds that
docs/quantisation.md states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import group_options, reduce_op
from checker import assert_same_bits
from quantisation_data import KINDS, hard_values
from torch import Tensor

import pycoll
from pycoll import reference
from pycoll.testing import RankPool, check_guards, guarded

Pool = Callable[[int], RankPool]
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIRES = (E4M3, E5M2, INT8, BF16, FP16)
# Beside the signal, in one staging slot, in several; no multiple of a block.
NUMELS = (0, 1, 127, 4099, 70_001, 300_007)


def bits(*tensors: Tensor) -> list[bytes]:
    return [bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors]


def values(numel: int, rank: int, storage: torch.dtype = FP32, kind: str = "random") -> Tensor:
    return hard_values(kind, numel, rank).to(storage)


# --- on ranks --------------------------------------------------------------------------------------


def check(got: Tensor, want: Tensor, what: object) -> None:
    assert_same_bits(got.contiguous(), want, str(what), nan_payload=False)


def all_reduced(numel: int, wire: torch.dtype, **options: Any) -> Tensor:
    """Of guarded input, compared with the reference."""
    block, storage = options.get("block", 128), options.get("storage", FP32)
    op, kind, group = options.get("op", "sum"), options.get("kind", "random"), options.get("group")
    n = dist.get_world_size()
    contributions = [values(numel, r, storage, kind) for r in range(n)]
    x = guarded(contributions[dist.get_rank()], offset_bytes=storage.itemsize)
    factor = 0.5 if op == "premul_sum" else None
    work = pycoll.all_reduce(
        x, reduce_op(op), group, options.get("async_op", False), wire_dtype=wire, block=block
    )
    if work is not None:
        work.wait()
    want = reference.all_reduce_on_wire(
        contributions, op, wire_dtype=wire, block=block, factor=factor
    )[0]
    check(x, want, (numel, wire, options))
    check_guards(x)
    return x.clone()


def every_all_reduce() -> list[list[bytes]]:
    results = []
    for wire, numel in itertools.product(WIRES, NUMELS):
        results.append(all_reduced(numel, wire))
    for wire, storage in itertools.product(WIRES, (BF16, FP16)):
        if wire != storage:
            results += [all_reduced(numel, wire, storage=storage) for numel in (4099, 70_001)]
    for wire, op in itertools.product(WIRES, ("avg", "min", "max", "product", "premul_sum")):
        results += [all_reduced(numel, wire, op=op) for numel in (127, 40_009)]
    for wire, block in itertools.product((E4M3, E5M2, INT8), (1, 37, 1000, 1024)):
        results += [all_reduced(numel, wire, block=block) for numel in (127, 70_001)]
    results.append(all_reduced(70_001, E4M3, async_op=True))
    return [bits(x) for x in results]


def every_gather_and_scatter() -> list[list[bytes]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered = []
    cases = [(wire, numel, FP32) for wire in WIRES for numel in NUMELS[:-1]]
    cases += [(wire, 4099, BF16) for wire in WIRES if wire != BF16] + [(E4M3, NUMELS[-1], FP32)]
    for wire, numel, storage in cases:
        # Lists, whose sizes differ with the rank, and tensors.
        inputs = [values(numel + 13 * r, r, storage) for r in range(n)]
        want = reference.all_gather_on_wire(inputs, wire_dtype=wire, block=64)[rank]
        outputs = [guarded(torch.zeros_like(x)) for x in inputs]
        pycoll.all_gather(outputs, inputs[rank], wire_dtype=wire, block=64)
        for got, w in zip(outputs, want, strict=True):
            check(got, w, ("all_gather", wire, numel, storage))
            check_guards(got)
        gathered.append(bits(*outputs))
        inputs = [values(numel, r, storage) for r in range(n)]
        want = reference.all_gather_on_wire(inputs, wire_dtype=wire)[rank]
        whole = guarded(torch.zeros(n * numel, dtype=storage))
        mine = whole[rank * numel : (rank + 1) * numel]  # in place
        mine.copy_(inputs[rank])
        pycoll.all_gather_into_tensor(whole, mine, wire_dtype=wire)
        check(whole, torch.cat(want), ("all_gather_into_tensor", wire, numel, storage))
        check_guards(whole)
        rows = [[values(numel + 13 * c, 7 * r + c, storage) for c in range(n)] for r in range(n)]
        output = guarded(torch.zeros(numel + 13 * rank, dtype=storage))
        pycoll.reduce_scatter(output, rows[rank], wire_dtype=wire, block=64)
        want_part = reference.reduce_scatter_on_wire(rows, wire_dtype=wire, block=64)[rank]
        check(output, want_part, ("reduce_scatter", wire, numel, storage))
        check_guards(output)
        rows = [[values(numel, 7 * r + c, storage) for c in range(n)] for r in range(n)]
        output = guarded(torch.zeros(numel, dtype=storage))
        pycoll.reduce_scatter_tensor(output, torch.cat(rows[rank]), "avg", wire_dtype=wire)
        want_part = reference.reduce_scatter_on_wire(rows, "avg", wire_dtype=wire)[rank]
        check(output, want_part, ("reduce_scatter_tensor", wire, numel, storage))
        check_guards(output)
    return gathered


def strided_results() -> None:
    """Tensors whose order in memory is not their order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [values(101 * 67, r).view(101, 67) for r in range(n)]
    x = guarded(rows[rank], strides=(2, 203))
    pycoll.all_reduce(x, wire_dtype=E4M3, block=50)
    want = reference.all_reduce_on_wire(rows, wire_dtype=E4M3, block=50)[rank]
    check(x, want, "strided")
    check_guards(x)


def errors_of_all_reduce(wire: torch.dtype, kind: str, storage: torch.dtype) -> float:
    """The largest error of a sum, as a share of its bound."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numel, block = 30_011, 128
    contributions = [values(numel, r, storage, kind) for r in range(n)]
    x = contributions[rank].clone()
    pycoll.all_reduce(x, wire_dtype=wire, block=block)
    exact = torch.stack([c.double() for c in contributions]).sum(0)
    bound = torch.zeros(numel, dtype=torch.float64)
    arrived = []
    for c in contributions:
        bound += change_on_wire(c, wire, block)
        arrived.append(reference.through_wire(c, wire, block).double())
    magnitudes = torch.stack(arrived).abs().sum(0)
    bound += (n - 1) * 2.0**-24 * magnitudes * (1 + 2.0**-20)  # the additions in float32
    total = reference.reduce_ranks([a.float() for a in arrived])
    bound += change_on_wire(total, wire, block)
    if storage != FP32:  # rounded once more when it is stored
        bound += unit_change(x.float(), storage)
    error = (x.double() - exact).abs()
    worst = (error > bound).nonzero()
    assert not len(worst), (wire, kind, storage, int(worst[0]), len(worst))
    return float((error / bound.clamp(min=2.0**-149)).max())


def change_on_wire(x: Tensor, wire: torch.dtype, block: int) -> Tensor:
    if wire not in reference.LARGEST_CODE:
        return unit_change(x, wire)
    _, scales = reference.quantise_blocks(x, block, wire)
    return reference.quantisation_bound(x, scales, block, wire)


def unit_change(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that rounding to a 16-bit float changes, where it does not overflow."""
    relative, least = (2.0**-8, 2.0**-134) if dtype == BF16 else (2.0**-11, 2.0**-25)
    return torch.maximum(x.double().abs() * relative * (1 + 2.0**-7), torch.tensor(least))


def groups_with_each_algorithm() -> Iterator[tuple[str, Any]]:
    for algorithm in ("one_shot", "two_shot", "ring", "direct"):
        group = dist.new_group(pg_options=group_options(algorithm))
        yield algorithm, group
        dist.destroy_process_group(group)


def the_same_by_every_algorithm() -> list[str]:
    """Names of the algorithms that ran."""
    used = []
    default = [all_reduced(numel, E4M3) for numel in (1009, 90_007)]
    for _, group in groups_with_each_algorithm():
        for numel, want in zip((1009, 90_007), default, strict=True):
            assert bits(all_reduced(numel, E4M3, group=group)) == bits(want)
            used.append(pycoll.events(group)[-1]["algorithm"])
    return used


def parts_and_whole() -> None:
    """What begins at a block of a longer tensor gets the bits that it has there."""
    x = values(90_007, dist.get_rank())
    whole = x.clone()
    pycoll.all_reduce(whole, wire_dtype=E4M3, block=100)
    for begin, end in ((0, 1000), (300, 90_007), (89_900, 90_007)):
        part = x[begin:end].clone()
        pycoll.all_reduce(part, wire_dtype=E4M3, block=100)
        # Only whole blocks: the last one of a part sees fewer elements.
        kept = (end - begin) // 100 * 100
        assert bits(part[:kept]) == bits(whole[begin : begin + kept])


def moved_bytes(wire: torch.dtype | None, numel: int) -> list[tuple[int, int]]:
    """Bytes written and read by an all_reduce, an all_gather and a reduce_scatter, with blocks of 128."""
    n = dist.get_world_size()
    x = values(numel, dist.get_rank())
    options = {} if wire is None else {"wire_dtype": wire}
    pycoll.all_reduce(x.clone(), **options)
    pycoll.all_gather_into_tensor(torch.empty(n * numel), x, **options)
    pycoll.reduce_scatter_tensor(torch.empty(numel), x.repeat(n), **options)
    events = pycoll.events()[-3:]
    name = str(wire or FP32)[6:]
    assert all(e["wire_dtype"] == name and e["dtype"] == "float32" for e in events)
    return [(e["bytes_written"], e["bytes_read"]) for e in events]


def spoilt(value: float) -> list[int]:
    """Where a sum is NaN when one rank holds `value` at 5000."""
    x = values(20_011, dist.get_rank())
    if dist.get_rank() == 1:
        x[5000] = value
    results = []
    for wire in (E4M3, E5M2, INT8):
        y = x.clone()
        pycoll.all_reduce(y, wire_dtype=wire, block=100)
        results.append(y.isnan().nonzero().flatten())
        assert torch.equal(results[-1], torch.arange(5000, 5100))
    return results[0].tolist()


def disagreement(calls: list[dict[str, Any]]) -> str:
    """What is said when ranks pass different options; the group is used again after it."""
    x = values(1009, dist.get_rank())
    before = x.clone()
    try:
        pycoll.all_reduce(x, **calls[dist.get_rank()])
        text = "nothing was raised"
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    assert torch.equal(x, before)
    y = torch.ones(3)
    pycoll.all_reduce(y)
    assert y.tolist() == [dist.get_world_size()] * 3
    return text


def plain_and_same_dtype() -> list[list[bytes]]:
    """wire_dtype equal to the tensor's dtype changes nothing."""
    x = values(5003, dist.get_rank(), BF16)
    plain, wired = x.clone(), x.clone()
    pycoll.all_reduce(plain)
    pycoll.all_reduce(wired, wire_dtype=BF16)
    return [bits(plain), bits(wired)]


# --- tests -----------------------------------------------------------------------------------------


def check_ranks_agree(results: list[list[list[bytes]]]) -> None:
    for other in results[1:]:
        assert other == results[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_has_the_bits_of_the_reference_on_all_ranks(pool: Pool, world_size: int) -> None:
    check_ranks_agree(pool(world_size).run(every_all_reduce))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_gather_and_reduce_scatter(pool: Pool, world_size: int) -> None:
    check_ranks_agree(pool(world_size).run(every_gather_and_scatter))


def test_strided_tensors(pool: Pool) -> None:
    pool(3).run(strided_results)


@pytest.mark.parametrize("wire", WIRES, ids=lambda d: str(d)[6:])
def test_errors_stay_within_their_bound(pool: Pool, wire: torch.dtype) -> None:
    largest = 0.0
    for kind, storage in itertools.product(KINDS, (FP32, BF16)):
        # Half precision ends at 65504.
        if (kind in ("huge", "outlier") and wire == FP16) or storage == wire:
            continue
        largest = max(largest, *pool(3).run(errors_of_all_reduce, wire, kind, storage))
    assert largest > 0.4  # the bound is one that errors come near to


def test_the_bits_do_not_depend_on_the_algorithm(pool: Pool) -> None:
    for used in pool(3).run(the_same_by_every_algorithm):
        # "ring" does not know wire formats, "direct" is no all_reduce: both take the default.
        assert used == ["one_shot"] * 2 + ["two_shot"] * 2 + ["one_shot", "two_shot"] * 2


def test_the_bits_of_a_block_do_not_depend_on_where_it_lies(pool: Pool) -> None:
    pool(3).run(parts_and_whole)


@pytest.mark.parametrize(("wire", "itemsize"), [(None, 4), (E4M3, 1), (INT8, 1), (BF16, 2)])
def test_bytes_on_the_wire(pool: Pool, wire: torch.dtype | None, itemsize: int) -> None:
    n, numel = 4, 128 * 4 * 3000
    scales = 4 / 128 if itemsize == 1 else 0
    run = int(numel * (itemsize + scales))  # of a whole tensor
    for reduced, gathered, scattered in pool(n).run(moved_bytes, wire, numel):
        if wire is None:  # tensors are reached directly
            assert reduced == (run * (n - 1) // n, run * (n - 1) // n)
            assert gathered == (0, (n - 1) * run)
        else:
            assert reduced == (run * (n - 1) // n + run // n, 2 * run * (n - 1) // n)
            assert gathered == (run, (n - 1) * run)
        assert scattered == ((n - 1) * run, (n - 1) * run)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_on_all_ranks(pool: Pool, value: float) -> None:
    for where in pool(3).run(spoilt, value):
        assert where == list(range(5000, 5100))


DISAGREEMENTS = [
    ({"wire_dtype": E4M3}, {"wire_dtype": E5M2}, "sent as float8_e5m2 in blocks of 128"),
    ({"wire_dtype": E4M3}, {"wire_dtype": E4M3, "block": 64}, "float8_e4m3fn in blocks of 64"),
    ({"wire_dtype": INT8}, {}, "called all_reduce(1009 x float32, SUM);"),
    ({"wire_dtype": BF16}, {"wire_dtype": FP16}, "sent as float16)"),
]


@pytest.mark.parametrize(("mine", "other", "said"), DISAGREEMENTS)
def test_disagreement_raises_on_all_ranks(
    pool: Pool, mine: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    texts = pool(3).run(disagreement, [mine, other, mine])
    assert len(set(texts)) == 1
    assert texts[0].startswith("DistBackendError")
    assert said in texts[0]
    assert "rank 1 called" in texts[0]


REFUSALS = [
    ({"wire_dtype": torch.int16}, "wire_dtype is int16, but elements travel as float8_e4m3fn"),
    ({"wire_dtype": torch.float8_e4m3fnuz}, "wire_dtype is float8_e4m3fnuz, but elements travel"),
    ({"wire_dtype": E4M3, "block": 0}, "block is 0; give a positive number"),
    ({"wire_dtype": E4M3, "block": 1025}, "block is 1025 with wire_dtype float8_e4m3fn; give 1 to"),
]


@pytest.mark.parametrize(("call", "said"), REFUSALS)
def test_refusals_reach_all_ranks(pool: Pool, call: dict[str, Any], said: str) -> None:
    zero, one = pool(2).run(disagreement, [call, {"wire_dtype": E4M3}])
    assert zero.startswith("ValueError")
    assert said in zero
    assert one.startswith("DistBackendError")
    assert "rank 0 refused its arguments" in one


def double_precision() -> str:
    try:
        pycoll.all_reduce(torch.ones(3, dtype=torch.float64), wire_dtype=E4M3)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_storage_that_is_not_encoded_is_refused(pool: Pool) -> None:
    for text in pool(2).run(double_precision):
        assert "wire_dtype is float8_e4m3fn, and the tensor float64, but only float32" in text


def test_the_dtype_of_the_tensor_is_no_wire_format(pool: Pool) -> None:
    for plain, wired in pool(2).run(plain_and_same_dtype):
        assert plain == wired
