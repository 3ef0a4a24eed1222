"""The reference against results worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pycoll import reference
from pycoll.reference import all_reduce, is_valid, reduce_ranks

NAN, INF = math.nan, math.inf
LOW_PRECISION = (torch.float16, torch.bfloat16, *reference.FLOAT8_DTYPES)


def rows(*values: list, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor(row, dtype=dtype) for row in values]


# --- reductions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [111.0, -4.0]),
        ("avg", [37.0, -4.0 / 3]),
        ("min", [1.0, -9.0]),
        ("max", [100.0, 3.0]),
        ("product", [1000.0, -54.0]),
    ],
)
def test_floats(op: str, expected: list[float]) -> None:
    outputs = all_reduce(rows([1.0, 2.0], [10.0, 3.0], [100.0, -9.0]), op)
    assert len(outputs) == 3
    for output in outputs:
        assert torch.equal(output, torch.tensor(expected))
    outputs[0].zero_()
    assert torch.equal(outputs[1], torch.tensor(expected)), "outputs do not share memory"


def test_the_divisor_of_an_average_is_the_number_of_ranks_not_of_elements() -> None:
    inputs = [torch.full((5,), rank + 1.0) for rank in range(3)]
    assert all_reduce(inputs, "avg")[0].tolist() == [2.0] * 5
    assert all_reduce(inputs[1:], "avg")[0].tolist() == [2.5] * 5


def test_float16_averages_do_not_overflow_and_keep_small_values() -> None:
    half = torch.float16
    assert all_reduce(rows([40000.0], [40000.0], dtype=half), "avg")[1].item() == 40000.0
    assert all_reduce(rows([40000.0], [40000.0], dtype=half), "sum")[0].item() == INF
    smallest = 2.0**-24
    for world_size in (2, 4):
        inputs = rows(*[[smallest]] * world_size, dtype=half)
        assert all_reduce(inputs, "avg")[0].item() == smallest


def test_bfloat16_accumulates_in_float32_and_rounds_once() -> None:
    inputs = rows([256.0], [1.0], [1.0], [1.0], dtype=torch.bfloat16)
    assert [output.item() for output in all_reduce(inputs)] == [260.0] * 4
    assert (inputs[0] + inputs[1]).item() == 256.0, "in bfloat16 itself every 1 is lost"


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_low_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    # The number after 1 has the next bit pattern; torch.finfo does not know it for every float8.
    bits = torch.int16 if dtype.itemsize == 2 else torch.uint8
    one = torch.tensor([1.0]).to(dtype)
    after_one = (one.view(bits) + 1).view(dtype).to(torch.float32)
    half_a_step = ((after_one - 1.0) / 2).to(dtype)
    total = reduce_ranks([one, half_a_step, half_a_step])
    assert torch.equal(total.to(torch.float32), after_one)
    twice = reduce_ranks([reduce_ranks([one, half_a_step]), half_a_step])
    assert twice.to(torch.float32).item() == 1.0, "every half step alone is rounded away"


def test_ranks_are_added_in_order() -> None:
    in_order = {
        (1e8, 1.0, -1e8, 1.0): 1.0,
        (1e8, -1e8, 1.0, 1.0): 2.0,
        (1.0, 1.0, 1e8, -1e8): 0.0,
    }
    for values, expected in in_order.items():
        assert all_reduce(rows(*[[value] for value in values]))[2].item() == expected


def test_float64_keeps_its_precision() -> None:
    inputs = rows([1.0], [2.0**-52], dtype=torch.float64)
    assert all_reduce(inputs)[0].item() == 1.0 + 2.0**-52


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW_PRECISION])
def test_nan_wins_whichever_rank_holds_it(dtype: torch.dtype) -> None:
    for op, extreme in (("min", 1.0), ("max", 4.0)):
        inputs = rows([NAN, 2.0, 1.0], [1.0, NAN, 4.0], [2.0, 4.0, 2.0])
        result = reduce_ranks([x.to(dtype) for x in inputs], op).to(torch.float32)
        assert result[:2].isnan().all()
        assert result[2].item() == extreme
        last = reduce_ranks([x.to(dtype) for x in inputs[::-1]], op).to(torch.float32)
        assert torch.equal(last.isnan(), result.isnan())


def test_infinities_are_ordinary_values() -> None:
    inputs = rows([INF, -INF, INF], [1.0, 2.0, -INF])
    assert reduce_ranks(inputs, "min").tolist() == [1.0, -INF, -INF]
    assert reduce_ranks(inputs, "max").tolist() == [INF, 2.0, INF]
    assert reduce_ranks(inputs, "sum").isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        *[(op, [True, True, True, False]) for op in ("sum", "max", "bor")],
        *[(op, [True, False, False, False]) for op in ("product", "min", "band")],
        ("bxor", [False, True, True, False]),
    ],
)
def test_bool(op: str, expected: list[bool]) -> None:
    inputs = rows([True, False, True, False], [True, True, False, False], dtype=torch.bool)
    assert all_reduce(inputs, op)[0].tolist() == expected


def test_any_nonzero_byte_is_true_and_results_are_bytes_0_and_1() -> None:
    odd = torch.tensor([2, 0, 128], dtype=torch.uint8).view(torch.bool)
    inputs = [odd, torch.zeros(3, dtype=torch.bool)]
    assert reduce_ranks(inputs, "sum").view(torch.uint8).tolist() == [1, 0, 1]
    assert reduce_ranks(inputs[:1], "bxor").view(torch.uint8).tolist() == [1, 0, 1]
    many = [torch.ones(1, dtype=torch.bool)] * 256
    assert reduce_ranks(many, "sum").item() is True, "a sum of bytes would wrap to 0"


@pytest.mark.parametrize("dtype", reference.COMPLEX_DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex(dtype: torch.dtype) -> None:
    inputs = [torch.tensor([1 + 2j]).to(dtype), torch.tensor([2 + 4j]).to(dtype)]
    assert reduce_ranks(inputs, "sum").item() == 3 + 6j
    assert reduce_ranks(inputs, "avg").item() == 1.5 + 3j
    assert reduce_ranks(inputs, "product").item() == -6 + 8j
    assert reduce_ranks(inputs, "premul_sum", factor=0.5).item() == 1.5 + 3j
    for op in ("min", "max", "band"):
        with pytest.raises(TypeError, match=f"{op} is not defined for {dtype}"):
            reduce_ranks(inputs, op)


def test_lazy_conjugation_and_negation_are_carried_out() -> None:
    z = [torch.tensor([1 + 2j]) * (rank + 1) for rank in range(2)]
    assert reduce_ranks([x.conj() for x in z]).item() == 3 - 6j
    negated = [x.conj().imag for x in z]
    assert negated[0].is_neg()
    assert reduce_ranks(negated).item() == -6.0
    assert reference.all_gather([x.conj() for x in z])[0][1].item() == 2 - 4j


def test_float8_is_reduced_by_value_and_not_by_bytes() -> None:
    for dtype in reference.FLOAT8_DTYPES:
        inputs = [torch.tensor([rank + 1.0, -0.0, NAN]).to(dtype) for rank in range(2)]
        total = reduce_ranks(inputs).to(torch.float32)
        assert total[0].item() == 3.0
        assert total[2].isnan()


def test_bitwise_ops() -> None:
    inputs = rows([6], [3], dtype=torch.int32)
    assert [reduce_ranks(inputs, op).item() for op in ("band", "bor", "bxor")] == [2, 7, 5]
    with pytest.raises(TypeError, match=r"band is not defined for torch\.float32"):
        reduce_ranks(rows([3.0], [3.0]), "band")


def test_premul_sum_multiplies_before_it_adds() -> None:
    assert reduce_ranks(rows([3.0], [3.0]), "premul_sum", factor=0.5).item() == 3.0
    halves = rows([40000.0], [40000.0], dtype=torch.float16)
    assert reduce_ranks(halves, "premul_sum", factor=0.5).item() == 40000.0
    inputs = rows([3.0], [5.0])
    assert reduce_ranks(inputs, "premul_sum", factor=[0.5, -2.0]).item() == -8.5
    with pytest.raises(ValueError, match="premul_sum takes a factor"):
        reduce_ranks(halves, "premul_sum")
    with pytest.raises(ValueError, match="no other op does"):
        reduce_ranks(halves, "sum", factor=0.5)


@pytest.mark.parametrize("dtype", reference.INTEGER_DTYPES)
def test_integers_wrap_and_compare_by_their_own_sign(dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    inputs = rows([high, low, 7], [1, high, 3], dtype=dtype)
    wrapped = [low, (low + high) if low else high, 10]
    assert reduce_ranks(inputs, "sum").tolist() == wrapped
    assert reduce_ranks(inputs, "min").tolist() == [1, low, 3]
    assert reduce_ranks(inputs, "max").tolist() == [high, high, 7]
    assert reduce_ranks([inputs[0], inputs[0]], "product").tolist() == [1, 0, 49]


@pytest.mark.parametrize("dtype", reference.INTEGER_DTYPES)
def test_averages_of_integers_are_exact_and_truncate_toward_zero(dtype: torch.dtype) -> None:
    high = torch.iinfo(dtype).max
    inputs = rows([high, high, 5], [high, high - 2, 2], dtype=dtype)
    assert reduce_ranks(inputs, "avg").tolist() == [high, high - 1, 3]
    if torch.iinfo(dtype).min < 0:
        low = torch.iinfo(dtype).min
        inputs = rows([low, -5, -1], [low, -2, 0], dtype=dtype)
        assert reduce_ranks(inputs, "avg").tolist() == [low, -3, 0]


def test_what_is_valid() -> None:
    everything = {
        (op, dtype)
        for op in reference.OPS
        for dtype in (
            *reference.FLOAT_DTYPES,
            *reference.COMPLEX_DTYPES,
            *reference.INTEGER_DTYPES,
            torch.bool,
        )
        if is_valid(op, dtype)
    }
    # Floats: all but three bitwise. Complex: sum, avg, product, premul_sum. Integers: all but
    # premul_sum. bool: all but avg and premul_sum.
    assert len(everything) == 8 * 6 + 3 * 4 + 8 * 8 + 7
    assert not is_valid("avg", torch.bool)
    assert not is_valid("max", torch.complex64)
    assert not is_valid("sum", torch.qint8)
    with pytest.raises(ValueError, match=r"op must be one of sum, avg, .*; got 'SUM'"):
        is_valid("SUM", torch.float32)


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 holds \(3,\) torch.float32, rank 0 holds \(2,\)"):
        reduce_ranks([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match=r"rank 1 holds \(2,\) torch.int32"):
        reduce_ranks([torch.zeros(2), torch.zeros(2, dtype=torch.int32)])


# --- who gets what ---------------------------------------------------------------------------------


def test_reduce_leaves_other_ranks_alone() -> None:
    inputs = [torch.full((2,), rank + 1.0) for rank in range(3)]
    once = reference.reduce(inputs, 0)
    assert [x[0].item() for x in once] == [6.0, 2.0, 3.0]
    assert [x[0].item() for x in reference.reduce(once, 0)] == [11.0, 2.0, 3.0]


def test_reduce_scatter() -> None:
    lists = [[torch.tensor([10.0 * s + r] * (r + 1)) for r in range(2)] for s in range(2)]
    first, second = reference.reduce_scatter(lists)
    assert first.tolist() == [10.0]
    assert second.tolist() == [12.0, 12.0]
    tensors = rows([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])
    assert [x.tolist() for x in reference.reduce_scatter_tensor(tensors, "avg")] == [
        [5.5, 11.0],
        [16.5, 22.0],
    ]
    with pytest.raises(ValueError, match="dim 0 of size 3 does not divide into 2 equal chunks"):
        reference.reduce_scatter_tensor([torch.zeros(3)] * 2)
    with pytest.raises(ValueError, match="rank 1 must hold one tensor per rank, 2; got 1"):
        reference.reduce_scatter([lists[0], lists[1][:1]])


def test_all_gather() -> None:
    inputs = [torch.arange(rank + 1) for rank in range(3)]
    for gathered in reference.all_gather(inputs):
        assert [x.tolist() for x in gathered] == [[0], [0, 1], [0, 1, 2]]
    matrices = [torch.full((1, 2), rank) for rank in range(2)]
    assert reference.all_gather_into_tensor(matrices)[1].tolist() == [[0, 0], [1, 1]]
    scalars = [torch.tensor(rank, dtype=torch.uint16) for rank in range(3)]
    assert reference.all_gather_into_tensor(scalars)[0].tolist() == [0, 1, 2]


def test_rooted_movements() -> None:
    inputs = rows([1.0], [2.0], [3.0])
    assert [x.item() for x in reference.broadcast(inputs, 1)] == [2.0, 2.0, 2.0]
    gathered = reference.gather(inputs, 2)
    assert gathered[:2] == [None, None]
    assert [x.item() for x in gathered[2]] == [1.0, 2.0, 3.0]
    scattered = reference.scatter([None, inputs, None], 1)
    assert [x.item() for x in scattered] == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="rank 0 must hold one tensor for each of 3 ranks"):
        reference.scatter([inputs[:2], None, None], 0)


def test_all_to_all() -> None:
    lists = [[torch.tensor([10 * s + r] * (s + 1)) for r in range(2)] for s in range(2)]
    assert [[x.tolist() for x in row] for row in reference.all_to_all(lists)] == [
        [[0], [10, 10]],
        [[1], [11, 11]],
    ]
    inputs = [torch.arange(3.0) + 10 * rank for rank in range(2)]
    uneven = reference.all_to_all_single(inputs, [[1, 2], [2, 1]])
    assert [x.tolist() for x in uneven] == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]
    even = reference.all_to_all_single(rows([1.0, 2.0], [3.0, 4.0]))
    assert [x.tolist() for x in even] == [[1.0, 3.0], [2.0, 4.0]]
    with pytest.raises(ValueError, match="dim 0 of rank 0's input, 3, is no multiple of 2"):
        reference.all_to_all_single(inputs)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (4, 1)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    inputs = [torch.zeros(shape, dtype=torch.int32) for _ in range(2)]
    assert reduce_ranks(inputs).shape == shape
    assert reduce_ranks(inputs, "avg").shape == shape
    assert reference.all_gather(inputs)[1][0].shape == shape
    assert reference.broadcast(inputs, 0)[1].shape == shape


def test_inputs_in_any_layout_are_read_right_and_left_alone() -> None:
    base = torch.arange(6.0).reshape(3, 2)
    column, expanded = base[:, 1], torch.tensor([7.0]).expand(3)
    assert reduce_ranks([column, expanded]).tolist() == [8.0, 10.0, 12.0]
    assert base.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    gathered = reference.all_gather_into_tensor([base.t(), base.t()])[0]
    assert gathered.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]] * 2
    assert gathered.is_contiguous()
