"""The checker is checked: collectives that are broken in known ways, each of which it must see.

Everything runs in this process. A *stub* is a collective over the trials of all ranks; `right` does
what the reference says, and each of the others is wrong in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import generator
import pytest
import torch
from case_data import contribution
from checker import Trial, assert_same_bits, build_trial, complement, place, verify
from generator import Case
from torch import Tensor

from pycoll import reference

Stub = Callable[[list[Trial]], None]
FORMS = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
# The smallest and a larger one at which every stub is wrong.
NUMELS = ("n+1", "1023")


def case_of(form: str, *, dtype: str = "float32", op: str = "sum", **others: str) -> Case:
    axes = {"layout": "contiguous", "group": "3", "algorithm": "auto", "numel": "17"}
    axes |= {"mode": "sync", **others}
    return Case(form=form, dtype=dtype, op=op if form in REDUCTIONS else "none", **axes)


REDUCTIONS = ("all_reduce", "reduce_scatter_tensor")


def run(case: Case, stub: Stub, *, exact: bool = False) -> None:
    """Build every rank's trial, let the stub work on them, verify them all."""
    ranks = range(len(case.members))
    trials = [build_trial(case, rank, exact=exact) for rank in ranks]
    stub(trials)
    for trial in trials:
        verify(trial)


def deliver(trials: list[Trial], change: Callable[[Trial, int], Tensor]) -> None:
    """Fill every output with what `change(trial, index)` makes of the expected one."""
    for trial in trials:
        for index, output in enumerate(trial.outputs):
            output.copy_(change(trial, index))


def right(trials: list[Trial]) -> None:
    deliver(trials, lambda trial, index: trial.expected[index])


def shifted_by_one(trials: list[Trial]) -> None:
    deliver(trials, lambda trial, index: rolled(trial.expected[index], 1))


def chunks_swapped(trials: list[Trial]) -> None:
    """Of a gathered tensor the ranks' parts, of any other its first and last elements."""

    def swap(trial: Trial, index: int) -> Tensor:
        if trial.case.form == "all_gather":
            return trial.expected[(index + 1) % len(trial.expected)]
        if trial.case.form == "all_gather_into_tensor":
            return rolled(trial.expected[index], trial.expected[index].numel() // trial.world_size)
        return rolled(trial.expected[index], trial.expected[index].numel() // 2)

    deliver(trials, swap)


def last_element_dropped(trials: list[Trial]) -> None:
    for trial in trials:
        for output, expected in zip(trial.outputs, trial.expected, strict=True):
            output[:-1].copy_(expected[:-1])


def only_even_ranks(trials: list[Trial]) -> None:
    """Odd ranks' contributions are forgotten; of a broadcast, they are not served."""
    case = trials[0].case
    if case.form == "broadcast":
        right(trials[::2])
        return
    if case.form == "all_gather":
        for trial in trials:
            for rank in range(0, trial.world_size, 2):
                trial.outputs[rank].copy_(trial.expected[rank])
        return
    if case.form == "all_gather_into_tensor":
        for trial in trials:
            rows = trial.outputs[0].view(trial.world_size, -1)
            rows[::2] = trial.expected[0].view(trial.world_size, -1)[::2]
        return
    sources = [trial.inputs[0] if trial.inputs else trial.outputs[0] for trial in trials]
    total = reference.reduce_ranks(sources[::2], case.op)
    scatter = case.form == "reduce_scatter_tensor"
    chunks = total.chunk(len(trials)) if scatter else [total] * len(trials)
    for trial, chunk in zip(trials, chunks, strict=True):
        trial.outputs[0].copy_(chunk)


def input_returned(trials: list[Trial]) -> None:
    """In place that is doing nothing; otherwise outputs hold the rank's own input."""
    for trial in trials:
        for output in trial.outputs:
            if trial.inputs:
                own = trial.inputs[0].flatten()
                output.copy_(own.repeat(trial.world_size)[: output.numel()].view_as(output))


def one_past_the_end(trials: list[Trial]) -> None:
    right(trials)
    output = trials[-1].outputs[-1]
    end = output.storage_offset() + output.numel()
    past = torch.as_strided(output, (1,), (1,), end)
    past.copy_(complement(past.clone()))


def one_before_the_start(trials: list[Trial]) -> None:
    right(trials)
    output = trials[0].outputs[0]
    before = torch.as_strided(output, (1,), (1,), output.storage_offset() - 1)
    before.copy_(complement(before.clone()))


def rounded_twice(trials: list[Trial]) -> None:
    """Every partial sum is rounded to the dtype of the tensors."""
    sources = [trial.inputs[0] if trial.inputs else trial.outputs[0] for trial in trials]
    total = sources[0].clone()
    for source in sources[1:]:
        total = reference.reduce_ranks([total, source])
    chunks = [total] * len(trials) if not trials[0].inputs else total.chunk(len(trials))
    for trial, chunk in zip(trials, chunks, strict=True):
        trial.outputs[0].copy_(chunk)


def summed_in_reverse(trials: list[Trial]) -> None:
    sources = [trial.inputs[0] if trial.inputs else trial.outputs[0] for trial in trials]
    total = reference.reduce_ranks(sources[::-1])
    chunks = [total] * len(trials) if not trials[0].inputs else total.chunk(len(trials))
    for trial, chunk in zip(trials, chunks, strict=True):
        trial.outputs[0].copy_(chunk)


def rolled(tensor: Tensor, places: int) -> Tensor:
    flat = tensor.flatten()
    return torch.cat([flat[-places:], flat[:-places]]).view_as(tensor)


BROKEN = (
    shifted_by_one,
    chunks_swapped,
    last_element_dropped,
    only_even_ranks,
    input_returned,
    one_past_the_end,
    one_before_the_start,
)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint64", "complex64", "bool"])
@pytest.mark.parametrize("exact", [True, False])
def test_broken_collectives_are_caught(form: str, dtype: str, numel: str, exact: bool) -> None:
    op = "bxor" if dtype == "bool" else "sum"
    case = case_of(form, dtype=dtype, numel=numel, op=op)
    run(case, right, exact=exact)
    for stub in BROKEN:
        with pytest.raises(AssertionError):
            run(case, stub, exact=exact)


def test_right_collectives_pass_in_every_case_of_the_sample() -> None:
    for case in generator.sample():
        large = len(case.numel) > 4
        small = replace(case, numel="1025") if large else case
        run(small, right, exact=case.algorithm == "ring")


@pytest.mark.parametrize("op", reference.OPS)
@pytest.mark.parametrize("form", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float64", "complex128", "int32"])
def test_every_op_tells_broken_reductions_apart(form: str, dtype: str, op: str) -> None:
    if not reference.is_valid(op, getattr(torch, dtype)):
        with pytest.raises(TypeError, match=f"{op} is not defined for torch.{dtype}"):
            run(case_of(form, dtype=dtype, op=op), right)
        return
    case = case_of(form, dtype=dtype, op=op, numel="1023")
    for exact in (True, False):
        run(case, right, exact=exact)
        for stub in (shifted_by_one, last_element_dropped, input_returned):
            with pytest.raises(AssertionError, match="elements differ"):
                run(case, stub, exact=exact)


@pytest.mark.parametrize("layout", ["offset", "transposed", "strided"])
@pytest.mark.parametrize("form", FORMS)
def test_layouts_do_not_hide_broken_collectives(form: str, layout: str) -> None:
    case = case_of(form, layout=layout, numel="1023")
    run(case, right)
    for stub in (last_element_dropped, input_returned, one_before_the_start):
        with pytest.raises(AssertionError):
            run(case, stub)


@pytest.mark.parametrize("form", REDUCTIONS)
def test_inexact_data_shows_the_order_and_the_rounding_and_exact_data_does_not(form: str) -> None:
    for dtype, broken in (("float32", summed_in_reverse), ("bfloat16", rounded_twice)):
        case = case_of(form, dtype=dtype, numel="1023")
        run(case, broken, exact=True)
        with pytest.raises(AssertionError, match="elements differ"):
            run(case, broken, exact=False)


def test_a_write_between_the_elements_of_a_strided_tensor_is_caught() -> None:
    def gaps_filled(trials: list[Trial]) -> None:
        right(trials)
        output = trials[1].outputs[0]
        start = output.storage_offset()
        torch.as_strided(output, (output.numel(),), (1,), start).copy_(trials[1].expected[0])
        output.copy_(trials[1].expected[0])

    with pytest.raises(AssertionError, match="bytes outside the tensor were written"):
        run(case_of("all_reduce", layout="strided"), gaps_filled)


@pytest.mark.parametrize("form", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_a_changed_input_is_caught(form: str) -> None:
    def input_used_as_scratch(trials: list[Trial]) -> None:
        right(trials)
        trials[2].inputs[0][3] += 1

    with pytest.raises(AssertionError, match="read-only tensor 0 of rank 2: 1 of"):
        run(case_of(form), input_used_as_scratch)


def test_in_place_reduce_scatter_must_leave_the_other_chunks() -> None:
    def other_chunk_reduced(trials: list[Trial]) -> None:
        right(trials)
        trials[0].inputs[0][-1] += 1

    case = case_of("reduce_scatter_tensor")
    in_place = replace(case, form="reduce_scatter_tensor_in_place")
    run(in_place, right)
    with pytest.raises(AssertionError, match="read-only tensor"):
        run(in_place, other_chunk_reduced)


def test_payloads_of_nan_count_where_data_is_moved_and_not_where_it_is_reduced() -> None:
    quiet = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert_same_bits(quiet, other, nan_payload=False)
    with pytest.raises(AssertionError, match="1 of 2 elements differ, the first at 0"):
        assert_same_bits(quiet, other)
    with pytest.raises(AssertionError):
        assert_same_bits(quiet, torch.tensor([0.0, 1.0]), nan_payload=False)
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), nan_payload=False)


def test_shape_and_dtype_count() -> None:
    with pytest.raises(AssertionError, match="instead of"):
        assert_same_bits(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="instead of"):
        assert_same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float32])
@pytest.mark.parametrize("op", ["min", "max"])
def test_data_for_min_and_max_holds_nan_and_infinities_in_different_places(
    dtype: torch.dtype, op: str
) -> None:
    rows = [contribution(dtype, op, 1023, rank=r, world_size=2).to(torch.float32) for r in (0, 1)]
    for row in rows:
        assert row.isnan().any()
        assert row.isposinf().any()
        assert row.isneginf().any()
        assert (row != 0).all()
    assert not torch.equal(rows[0].isnan(), rows[1].isnan())
    assert rows[1][-1].isnan()
    assert not rows[0][-1].isnan()


@pytest.mark.parametrize("dtype", [*reference.FLOAT_DTYPES, *reference.COMPLEX_DTYPES])
@pytest.mark.parametrize("op", ["sum", "product", "premul_sum", "avg"])
def test_exact_data_gives_the_same_bits_in_every_order(dtype: torch.dtype, op: str) -> None:
    factor = 0.5 if op == "premul_sum" else None
    rows = [contribution(dtype, op, 999, rank=r, world_size=8, exact=True) for r in range(8)]
    forwards = reference.reduce_ranks(rows, op, factor=factor)
    backwards = reference.reduce_ranks(rows[::-1], op, factor=factor)
    interleaved = reference.reduce_ranks([*rows[::2], *rows[1::2]], op, factor=factor)
    assert_same_bits(backwards, forwards)
    assert_same_bits(interleaved, forwards)
    assert len(forwards.view(torch.uint8).unique()) > 3, "and they are not all alike"


def test_layouts_are_what_they_are_called() -> None:
    values = torch.arange(12.0)
    assert place(values, "contiguous").data_ptr() % 64 == 0
    assert place(values, "offset").storage_offset() % 2 == 1
    assert place(values, "strided").stride() == (2,)
    assert place(values.view(3, 4), "transposed").t().is_contiguous()
    assert place(values[:3].unsqueeze(1).expand(3, 3), "expanded").stride() == (1, 0)
    assert place(values[0], "zero_dim").dim() == 0
