"""The measuring engine: its arithmetic, its clock (a false one), its checks and its reports."""

from __future__ import annotations

import gc
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pycoll.bench import formulas, units
from pycoll.bench.buffers import Buffers
from pycoll.bench.cases import (
    DTYPES,
    EXACT_UP_TO,
    OPS,
    REDUCE_OPS,
    REDUCING,
    Case,
    places,
    total_nbytes,
    total_numel,
)
from pycoll.bench.engine import Effort, measure, percentile
from pycoll.bench.exact_data import exact_modulus
from pycoll.bench.steps import Laps, exposed_communication

GIB = 1 << 30
QUICK = Effort(warmup_calls=1, repetitions=1, repetition_seconds=0.001)


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "total_bytes", "algorithm", "bus"),
    [
        ("all_reduce", GIB, 107.374, 161.061),
        ("reduce_scatter", 4 * (256 << 20), 107.374, 80.531),
        ("all_gather", 4 * (256 << 20), 107.374, 80.531),
        ("broadcast", GIB, 107.374, 107.374),
        ("all_to_all", GIB, 107.374, 80.531),
        ("reduce", GIB, 107.374, 107.374),
        ("gather", GIB, 107.374, 80.531),
        ("scatter", GIB, 107.374, 80.531),
        ("send_recv", GIB, 107.374, 107.374),
        ("barrier", GIB, 107.374, 0.0),
    ],
)
def test_bandwidth_of_four_ranks_in_ten_milliseconds(op, total_bytes, algorithm, bus):
    assert formulas.algorithm_bandwidth(total_bytes, 0.01) == pytest.approx(algorithm, abs=5e-4)
    assert formulas.bus_bandwidth(op, total_bytes, 4, 0.01) == pytest.approx(bus, abs=5e-4)


@pytest.mark.parametrize("op", OPS)
def test_one_rank_has_no_bus(op):
    assert formulas.bus_bandwidth(op, GIB, 1, 0.01) == 0.0


def test_formulas_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match="no bus bandwidth formula for 'allreduce'"):
        formulas.bus_factor("allreduce", 4)
    with pytest.raises(ValueError, match="world_size"):
        formulas.bus_factor("all_reduce", 0)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            formulas.algorithm_bandwidth(1, seconds)


def test_uneven_all_to_all_is_as_fast_as_its_busiest_rank():
    even = [[GIB // 4] * 4] * 4
    assert formulas.uneven_all_to_all_bus_bandwidth(even, 0.01) == pytest.approx(80.531, abs=5e-4)
    # Rank 0 sends 5 bytes to others, rank 2 receives 9 from others; what a rank keeps is free.
    uneven = [[100, 2, 3], [0, 50, 6], [1, 1, 70]]
    assert formulas.uneven_all_to_all_bus_bandwidth(uneven, 1e-9) == pytest.approx(9.0)
    assert formulas.uneven_all_to_all_bus_bandwidth([[7]], 1.0) == 0.0
    with pytest.raises(ValueError, match="n × n"):
        formulas.uneven_all_to_all_bus_bandwidth([[1, 2], [3]], 1.0)


def test_sizes_are_read_and_written():
    assert [units.parse_nbytes(text) for text in ("8", "64K", "16 MiB", "1gb")] == [
        8,
        64 << 10,
        16 << 20,
        GIB,
    ]
    for nbytes in (1, 1000, 1024, 1536, 3 << 20, GIB, (1 << 20) + 8):
        assert units.parse_nbytes(units.format_nbytes(nbytes)) == nbytes
    for text in ("", "0", "-8", "8T", "1.5K", "K"):
        with pytest.raises(ValueError, match="is not a size"):
            units.parse_nbytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-6, "1.23 µs"),
        (0.000321, "321 µs"),
        (0.0009996, "1.00 ms"),
        (0.01427, "14.3 ms"),
        (2.5, "2.50 s"),
        (5e-8, "0.05 µs"),
    ],
)
def test_durations_have_three_digits(seconds, text):
    assert units.format_seconds(seconds) == text


# --- buffers and the check ------------------------------------------------------------------------


def test_sizes_are_rounded_to_whole_parts():
    assert total_numel(Case("all_reduce", 8), 4) == 2
    assert total_numel(Case("all_reduce", 1), 4) == 1
    assert total_numel(Case("all_gather", 8), 4) == 4
    assert total_numel(Case("reduce_scatter", 44), 4) == 8
    assert total_nbytes(Case("all_to_all", 1000, "bfloat16"), 3) == 996


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 64])
def test_sums_are_exact_in_the_dtype(dtype, world_size):
    modulus = exact_modulus(dtype, world_size)
    assert all(modulus % divisor for divisor in range(2, modulus))
    largest = world_size * (modulus - 1)
    assert largest <= EXACT_UP_TO[dtype]
    assert int(torch.tensor(largest, dtype=torch.int64).to(dtype)) == largest


def test_too_many_ranks_for_a_dtype_are_refused():
    with pytest.raises(ValueError, match="not exact"):
        exact_modulus(torch.uint8, 256)


class PlainRanks:
    """Stands for torch.distributed on one of n ranks, whose inputs it knows, without any other
    process: results come from the definitions, element by element. `spoil` breaks them.
    """

    P2POp = staticmethod(lambda function, tensor, peer: (function, tensor, peer))
    isend, irecv = "send", "receive"

    def __init__(self, case, rank, world_size, spoil=lambda result, inputs: result):
        self.case, self.rank, self.world_size, self.spoil = case, rank, world_size, spoil
        self.modulus = exact_modulus(DTYPES[case.dtype], world_size, case.reduce_op)

    def inputs(self, numel):
        def element(i, rank):
            value = (7 * i + 13 * rank) % self.modulus
            if self.case.reduce_op == "avg":
                return value * self.world_size
            return 1 + value % 2 if self.case.reduce_op == "product" else value

        return [[element(i, rank) for i in range(numel)] for rank in range(self.world_size)]

    def write(self, output, values, inputs):
        output.copy_(torch.tensor(self.spoil(values, inputs), dtype=torch.int64))
        return SimpleNamespace(wait=lambda: None)

    def reduced(self, inputs):
        functions = {"sum": sum, "min": min, "max": max, "product": math.prod}
        functions["avg"] = lambda column: sum(column) // self.world_size
        return [functions[self.case.reduce_op](column) for column in zip(*inputs, strict=True)]

    def all_reduce(self, tensor, op, async_op=False):
        assert op == getattr(dist.ReduceOp, self.case.reduce_op.upper())
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        return self.write(tensor, self.reduced(inputs), inputs)

    def reduce(self, tensor, root, op, async_op=False):
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        return self.write(tensor, self.reduced(inputs), inputs) if self.rank == root else None

    def check(self, tensor):
        """What is handed in is this rank's input."""
        assert tensor.tolist() == self.inputs(len(tensor))[self.rank]

    def broadcast(self, tensor, root, async_op=False):
        inputs = self.inputs(len(tensor))
        return self.write(tensor, inputs[root], inputs)

    def all_gather_into_tensor(self, output, tensor, async_op=False):
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        return self.write(output, list(itertools.chain(*inputs)), inputs)

    def reduce_scatter_tensor(self, output, tensor, op, async_op=False):
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        start = self.rank * len(output)
        return self.write(output, self.reduced(inputs)[start : start + len(output)], inputs)

    def gather(self, tensor, gather_list, dst, async_op=False):
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        if self.rank != dst:
            assert gather_list is None
            return None
        values = self.spoil(list(itertools.chain(*inputs)), inputs)
        for position, part in enumerate(gather_list):
            begin = position * len(part)
            part.copy_(torch.tensor(values[begin : begin + len(part)], dtype=torch.int64))
        return SimpleNamespace(wait=lambda: None)

    def scatter(self, output, scatter_list, src, async_op=False):
        inputs = self.inputs(len(output) * self.world_size)
        if self.rank == src:
            assert torch.cat(list(scatter_list)).tolist() == inputs[src]
        begin = self.rank * len(output)
        return self.write(output, inputs[src][begin : begin + len(output)], inputs)

    def all_to_all_single(self, output, tensor, async_op=False):
        self.check(tensor)
        inputs = self.inputs(len(tensor))
        part = len(tensor) // self.world_size
        mine = slice(self.rank * part, (self.rank + 1) * part)
        return self.write(output, list(itertools.chain(*(row[mine] for row in inputs))), inputs)

    def barrier(self, async_op=False):
        return SimpleNamespace(wait=lambda: None)

    def batch_isend_irecv(self, pair):
        (_, sent, after), (_, output, before) = pair
        assert (after, before) == (
            (self.rank + 1) % self.world_size,
            (self.rank - 1) % self.world_size,
        )
        self.check(sent)
        inputs = self.inputs(len(output))
        return [self.write(output, inputs[before], inputs)]


def wrong_elements(case, rank, world_size, **broken):
    buffers = Buffers(case, rank, world_size, PlainRanks(case, rank, world_size, **broken))
    buffers.load()
    buffers.call()
    return buffers.count_wrong()


FORMS = [(op, in_place) for op in OPS for in_place in places(op)]


@pytest.mark.parametrize(("op", "in_place"), FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass(op, in_place, world_size, dtype):
    if op == "send_recv" and world_size == 1:
        with pytest.raises(ValueError, match="world_size is 1"):
            Buffers(Case(op, 8), 0, 1)
        return
    # 257 elements wrap around the narrow dtypes' periods.
    case = Case(op, 257 * DTYPES[dtype].itemsize, dtype, world_size == 3, in_place)
    assert [wrong_elements(case, rank, world_size) for rank in range(world_size)] == [
        0
    ] * world_size


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_every_operator_has_a_right_result(op, reduce_op, dtype):
    case = Case(op, 257 * DTYPES[dtype].itemsize, dtype, reduce_op=reduce_op)
    assert [wrong_elements(case, rank, 3) for rank in range(3)] == [0, 0, 0]
    one_off = BROKEN["off by one in one element"]
    assert wrong_elements(case, 0, 3, spoil=one_off) == 1


def swap_halves(result, inputs):
    half = len(result) // 2
    return result[half : 2 * half] + result[:half] + result[2 * half :]


BROKEN = {
    "shifted by one": lambda result, inputs: result[1:] + result[:1],
    "chunks swapped": swap_halves,
    "last element dropped": lambda result, inputs: [*result[:-1], 0],
    "off by one in one element": lambda result, inputs: [*result[:5], result[5] + 1, *result[6:]],
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("op", "in_place"), FORMS)
def test_broken_results_are_seen(op, in_place, broken):
    if op == "barrier":
        return  # it has no result
    case = Case(op, 4 * 106, in_place=in_place)
    # The root is the one with a result, where only one has.
    rank = 0 if op in ("reduce", "gather") else 1
    assert wrong_elements(case, rank, 2, spoil=BROKEN[broken]) > 0


def test_missing_ranks_and_returned_inputs_are_seen():
    def even_ranks_only(result, inputs):
        return [sum(column) for column in zip(*inputs[::2], strict=True)]

    def input_returned(result, inputs):
        return inputs[1]

    for spoil in (even_ranks_only, input_returned):
        assert wrong_elements(Case("all_reduce", 4 * 101), 1, 4, spoil=spoil) > 90
    assert wrong_elements(Case("broadcast", 4 * 101), 1, 4, spoil=input_returned) > 90


def test_an_output_that_is_never_written_is_seen():
    class Idle(PlainRanks):
        def write(self, output, values, inputs):
            return SimpleNamespace(wait=lambda: None)

    for op in ("all_gather", "reduce_scatter", "all_to_all", "scatter", "send_recv"):
        case = Case(op, 4 * 106)
        buffers = Buffers(case, 0, 2, Idle(case, 0, 2))
        for _ in range(2):
            buffers.load()
            buffers.call()
            assert buffers.count_wrong() == len(buffers.result)


def test_in_place_means_that_input_and_output_share_memory():
    for op in OPS:
        for in_place in places(op):
            for rank in range(2):
                case = Case(op, 4 * 64, in_place=in_place)
                buffers = Buffers(case, rank, 2, PlainRanks(case, rank, 2))
                storages = [t.untyped_storage() for t in (buffers.source, buffers.result)]
                if all(storage.nbytes() for storage in storages):
                    same = storages[0].data_ptr() == storages[1].data_ptr()
                    assert same == in_place, (op, rank)


def test_what_is_unknown_or_impossible_is_named():
    for arguments, message in (
        ({"op": "allreduce"}, "unknown op 'allreduce'; known: all_reduce"),
        ({"dtype": "int7"}, "unknown dtype 'int7'"),
        ({"reduce_op": "mean"}, "unknown reduce_op 'mean'; known: sum, avg"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"op": "all_to_all", "in_place": True}, "all_to_all has no in-place form"),
        ({"nbytes": 0}, "nbytes must be positive, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Case(**{"op": "all_reduce", "nbytes": 8, **arguments})


# --- the clock ------------------------------------------------------------------------------------


class FalseWork:
    """A collective on a false clock: call number k takes durations[k] ticks, then the last."""

    def __init__(self, durations, wrong=(0, 0)):
        self.now, self.calls, self.barriers = 0.0, 0, []
        self.durations, self.wrong, self.checks = list(durations), list(wrong), 0
        self.cleared_at, self.finished = None, []

    def clock(self):
        return self.now

    def call(self):
        self.now += self.durations[min(self.calls, len(self.durations) - 1)]
        self.calls += 1

    def load(self):
        self.now += 1000.0

    def clear(self):
        self.cleared_at = self.calls

    def finish(self):
        self.finished.append(self.calls)

    def count_wrong(self):
        self.checks += 1
        return self.wrong[self.checks - 1]

    # As peers: another rank that takes twice as long for every second figure.
    def barrier(self):
        self.barriers.append(self.calls)

    def maxima(self, values):
        return [value * (2 if position % 2 else 1) for position, value in enumerate(values)]


def test_a_block_is_time_over_calls_and_the_slowest_rank_counts():
    effort = Effort(warmup_calls=3, repetitions=3, repetition_seconds=8.0, min_calls=2, max_calls=9)
    # One checked call, three of warm-up, two to estimate (1 tick each): K = 8. Then three blocks.
    durations = [99.0] + [50.0] * 3 + [1.0] * 2 + [1.0] * 8 + [2.0] * 8 + [3.0] * 8 + [1.0] * 8
    work = FalseWork(durations)
    sample = measure(work, work, effort, work.clock)
    assert sample.calls == 8
    # Blocks 1, 2, 3; with the slowest rank 1, 4, 3.
    assert sample.seconds == 3.0
    # Single calls: 1 and, where the other rank is slower, 2.
    assert (sample.p50, sample.p99) == (1.0, None)
    assert work.barriers == [4, 6, 14, 22, 30]
    assert work.cleared_at == 1
    assert sample.wrong == 0


def test_results_are_checked_before_and_after_the_timing():
    effort = Effort(repetition_seconds=3.0)
    for wrong in ((3, 0), (0, 3), (1, 2)):
        work = FalseWork([1.0], wrong)
        assert measure(work, work, effort, work.clock).wrong == 3
        assert work.checks == 2
    work = FalseWork([1.0], (3, 3))
    assert (
        measure(work, work, Effort(repetition_seconds=3.0, checks=False), work.clock).wrong is None
    )
    assert work.checks == 0


def test_blocks_end_when_the_device_has_finished():
    effort = Effort(warmup_calls=3, repetitions=2, repetition_seconds=4.0, min_calls=2, max_calls=4)
    work = FalseWork([1.0])
    assert measure(work, work, effort, work.clock).calls == 4
    # After the warm-up, the estimate, two blocks, and each of the single calls; before the last check there is none.
    assert work.finished == [4, 6, 10, 14, 15, 16, 17, 18]


def test_garbage_collection_is_off_while_timing_and_restored_after():
    class Observing(FalseWork):
        def barrier(self):
            assert not gc.isenabled()

    work = Observing([1.0])
    assert gc.isenabled()
    measure(work, work, QUICK, work.clock)
    assert gc.isenabled()


def test_effort_bounds_the_calls():
    effort = Effort(repetition_seconds=0.05, min_calls=2, max_calls=2000)
    assert [effort.calls(seconds) for seconds in (1.0, 0.01, 1e-9, 0.0)] == [2, 5, 2000, 2000]
    with pytest.raises(ValueError, match="repetitions"):
        Effort(repetitions=0)


def test_percentiles_are_measured_values():
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, p) for p in (50, 99, 100, 0.1)] == [100.0, 198.0, 200.0, 1.0]
    with pytest.raises(ValueError, match="not defined"):
        percentile([], 50)


def test_exposed_communication_is_the_time_that_sync_adds():
    work = FalseWork([0.0])
    order = []

    def step(synchronise):
        order.append(synchronise)
        work.now += 10.0 if synchronise else 7.5

    class Alone:
        barrier = staticmethod(lambda: None)
        maxima = staticmethod(list)

    measured = exposed_communication(step, Alone(), pairs=3, clock=work.clock)
    assert order == [True, False, False, True, True, False]
    assert (measured.with_sync, measured.without_sync, measured.share) == (10.0, 7.5, 0.25)


def test_laps():
    times = iter([1.0, 2.0, 4.0, 7.0])
    laps = Laps(lambda: next(times))
    laps.start()
    assert [laps.lap(), laps.lap(), laps.lap()] == [1.0, 2.0, 3.0]
    assert (laps.median(), laps.median(skip=1), laps.median(skip=5)) == (2.0, 2.5, 2.0)
