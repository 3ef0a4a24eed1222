"""The checker is checked: collectives that are broken in known ways, each of which it must see.

Everything runs in this process. A *stub* is a collective over the trials of all ranks; `right` does
what the reference says, and each of the others is wrong in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import generator
import pytest
import torch
from case_data import contribution, premul_factors
from checker import Trial, assert_same_bits, build_trial, complement, place, verify
from generator import Case
from torch import Tensor

from pycoll import reference

Stub = Callable[[list[Trial]], None]
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_uneven")
MOVEMENTS = (
    *("all_gather", "all_gather_uneven", "all_gather_into_tensor", "broadcast", "gather"),
    *("scatter", "all_to_all", "all_to_all_single", "all_to_all_single_uneven"),
)
FORMS = (*REDUCTIONS, *MOVEMENTS)
# The smallest and a larger one at which every stub is wrong.
NUMELS = ("n+1", "1023")


def case_of(form: str, *, dtype: str = "float32", op: str = "sum", **others: str) -> Case:
    axes = {"layout": "contiguous", "group": "3", "algorithm": "auto", "numel": "17"}
    axes |= {"mode": "sync", **others}
    return Case(form=form, dtype=dtype, op=op if form in REDUCTIONS else "none", **axes)


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
    """Everything that a rank gets is one chunk too far on, and its last chunk is the first."""
    for trial in trials:
        if not trial.outputs:
            continue
        whole = torch.cat([expected.flatten() for expected in trial.expected])
        whole = rolled(whole, max(1, whole.numel() // trial.world_size))
        parts = whole.split([output.numel() for output in trial.outputs])
        for output, part in zip(trial.outputs, parts, strict=True):
            output.copy_(part.view(output.shape))


def last_element_dropped(trials: list[Trial]) -> None:
    for trial in trials:
        for output, expected in zip(trial.outputs, trial.expected, strict=True):
            output[:-1].copy_(expected[:-1])


def only_even_ranks(trials: list[Trial]) -> None:
    """Odd ranks' contributions are forgotten; where one rank sends to all, odd ones get nothing."""
    form = trials[0].case.form
    if form in ("broadcast", "scatter"):
        right(trials[::2])
    elif form in REDUCTIONS:
        deliver_reduced(trials, lambda rows: reference.reduce_ranks(rows[::2], trials[0].case.op))
    else:
        for trial in trials:
            outputs, expected = by_source(trial, trial.outputs), by_source(trial, trial.expected)
            for output, part in list(zip(outputs, expected, strict=True))[::2]:
                output.copy_(part)


def by_source(trial: Trial, tensors: list[Tensor]) -> list[Tensor]:
    """Of what a rank got, one part for each rank that it came from."""
    if len(tensors) != 1:
        return tensors
    return list(tensors[0].split(trial.output_splits or len(tensors[0]) // trial.world_size))


def deliver_reduced(trials: list[Trial], reduce: Callable[[list[Tensor]], Tensor]) -> None:
    """Fill every output with what `reduce` makes of the contributions to it, in rank order."""
    getters = [trial for trial in trials if trial.outputs]
    results = [reduce([contribution_to(getter, trial) for trial in trials]) for getter in getters]
    for getter, result in zip(getters, results, strict=True):
        getter.outputs[0].copy_(result)


def contribution_to(getter: Trial, trial: Trial) -> Tensor:
    """What `trial` puts into the result that `getter` gets."""
    if len(trial.inputs) > 1:
        return trial.inputs[getter.rank]
    (tensor,) = trial.inputs or trial.outputs
    scattered = trial.case.form == "reduce_scatter_tensor"
    return tensor.chunk(trial.world_size)[getter.rank] if scattered else tensor


def input_returned(trials: list[Trial]) -> None:
    """In place that is doing nothing; otherwise outputs hold the rank's own inputs."""
    for trial in trials:
        own = torch.cat([tensor.flatten() for tensor in trial.inputs]) if trial.inputs else None
        if own is None or not own.numel():
            continue
        for output in trial.outputs:
            times = 1 + output.numel() // own.numel()
            output.copy_(own.repeat(times)[: output.numel()].view_as(output))


def one_past_the_end(trials: list[Trial]) -> None:
    right(trials)
    output = [output for trial in trials for output in trial.outputs][-1]
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

    def summed(rows: list[Tensor]) -> Tensor:
        total = rows[0].clone()
        for row in rows[1:]:
            total = reference.reduce_ranks([total, row])
        return total

    deliver_reduced(trials, summed)


def summed_in_reverse(trials: list[Trial]) -> None:
    deliver_reduced(trials, lambda rows: reference.reduce_ranks(rows[::-1]))


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


def test_reduce_must_leave_the_tensors_of_other_ranks() -> None:
    def partial_sums_left_behind(trials: list[Trial]) -> None:
        right(trials)
        trials[2].inputs[0].add_(trials[1].inputs[0])

    with pytest.raises(AssertionError, match="read-only tensor 0 of rank 2: 17 of"):
        run(case_of("reduce"), partial_sums_left_behind)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", REDUCTIONS)
def test_every_rank_has_a_factor_of_its_own(form: str, exact: bool) -> None:
    def first_factor_for_all(trials: list[Trial]) -> None:
        factor = trials[0].factor
        deliver_reduced(
            trials, lambda rows: reference.reduce_ranks(rows, "premul_sum", factor=factor)
        )

    def own_factors(trials: list[Trial]) -> None:
        factors = [trial.factor for trial in trials]
        deliver_reduced(
            trials, lambda rows: reference.reduce_ranks(rows, "premul_sum", factor=factors)
        )

    case = case_of(form, op="premul_sum")
    run(case, own_factors, exact=exact)
    with pytest.raises(AssertionError, match="elements differ"):
        run(case, first_factor_for_all, exact=exact)


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
    rows = [contribution(dtype, op, 999, rank=r, world_size=8, exact=True) for r in range(8)]
    factors = premul_factors(8, exact=True)

    def reduced(order: Sequence[int]) -> Tensor:
        factor = [factors[rank] for rank in order] if op == "premul_sum" else None
        return reference.reduce_ranks([rows[rank] for rank in order], op, factor=factor)

    forwards, backwards = reduced(range(8)), reduced(range(7, -1, -1))
    interleaved = reduced([*range(0, 8, 2), *range(1, 8, 2)])
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
