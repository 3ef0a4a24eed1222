"""pycoll.ops on a device: order in streams, tables, lifetime and graphs, on the simulator (docs/cuda_path.md).

The host code is that of CUDA tensors; CPU tensors stand for them. What kernels compute is compared, bit by bit, with
the CPU's operators. That all dtypes, casts and shapes come out right is tested in test_bucket_kernels.py and
test_ops.py with the same host code, on a device that runs kernels at once.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from checker import assert_same_bits
from simulated_device import SimulatedDevice
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pycoll import ops
from pycoll.testing import check_guards, guarded

pytestmark = pytest.mark.slow

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((7,), (0,), (13, 5), (), (1021,), (2, 3, 101), (2053,))
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(seed=7)
    with made.active():
        yield made
    made.synchronise()


def data(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def make_tensors(*dtypes: torch.dtype, strided: bool = False, seed: int = 0) -> list[Tensor]:
    """Of `dtypes` in turn, between guards; every other one, if asked, with its dimensions reversed in memory and gaps
    between its elements."""
    made = []
    for index, (shape, dtype) in enumerate(zip(SHAPES, itertools.cycle(dtypes), strict=False)):
        values = data(NUMELS[index], index + 10 * seed, dtype).view(shape)
        strides = None
        if strided and index % 2 == 0:
            reversed_strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
            strides = tuple(3 * stride for stride in reversed_strides)
        made.append(guarded(values, strides=strides, offset_bytes=dtype.itemsize))
    return made


# --- values ---------------------------------------------------------------------------------------

Call = Callable[[], list[Tensor]]


def calls(strided: bool, between_guards: list[Tensor]) -> dict[str, Call]:
    """Every operator, with all that it can be asked for. They return what they made or wrote."""

    def tensors_of(*dtypes: torch.dtype, seed: int = 0) -> list[Tensor]:
        tensors = make_tensors(*dtypes, strided=strided, seed=seed)
        between_guards.extend(tensors)
        return tensors

    def flatten() -> list[Tensor]:
        mixed = tensors_of(torch.float32, torch.bfloat16, E5M2)
        some = [None if i in (0, 4) else t for i, t in enumerate(mixed)]
        return [
            ops.flatten(mixed, dtype=torch.float16, scale=-0.37),
            ops.flatten(some, numels=NUMELS, dtype=torch.float32, scale=-2.0),
            ops.flatten(tensors_of(torch.int64)),
            ops.flatten(tensors_of(torch.float64), scale=0.1),
        ]

    def flatten_into() -> list[Tensor]:
        bucket = guarded(data(sum(NUMELS), 3, torch.bfloat16), offset_bytes=2)
        between_guards.append(bucket)
        tensors = tensors_of(torch.float32, E4M3, torch.bfloat16)
        some = [None if i == 5 else t for i, t in enumerate(tensors)]
        ops.flatten_into(bucket, some, numels=NUMELS, scale=0.5, accumulate=True)
        return [bucket]

    def unflatten() -> list[Tensor]:
        bucket = data(sum(NUMELS), 4)
        return [
            *ops.unflatten(bucket, SHAPES, dtype=E4M3, scale=3.0),
            *ops.unflatten(bucket.to(torch.int16), SHAPES),
        ]

    def unflatten_into() -> list[Tensor]:
        outputs = tensors_of(torch.bfloat16, torch.float32)
        ops.unflatten_into(data(sum(NUMELS), 5), outputs, scale=0.25, accumulate=True)
        replaced = tensors_of(torch.float16)
        ops.unflatten_into(data(sum(NUMELS), 6), replaced)
        return [*outputs, *replaced]

    def blocks() -> list[Tensor]:
        found = []
        for dtype, code in ((torch.float32, torch.int8), (torch.bfloat16, E4M3), (E5M2, E5M2)):
            x = data(2 * 1031, 8, dtype).view(2, 1031)
            codes, scales = ops.quantise_blocks(x.t() if strided else x, 37, code)
            found += [codes, scales, ops.dequantise_blocks(codes, scales, 37, dtype)]
            spread = torch.linspace(0.1, 2.0, len(scales))
            spread = spread.repeat_interleave(2)[::2] if strided else spread
            values = data(2062, 9).to(code).view(2, 1031)
            shape = values.t() if strided else values
            found.append(ops.dequantise_blocks(shape, spread, 37, torch.float16))
        return found

    def quantised() -> list[Tensor]:
        found = []
        for block in (128, 2500, None):
            tensors: list[Tensor | None] = [*tensors_of(torch.float32)]
            tensors[2] = None
            codes, scales = ops.flatten_quantised(
                tensors, numels=NUMELS, block=block, dtype=torch.int8, scale=-0.5
            )
            outputs = tensors_of(torch.bfloat16, torch.float32, seed=1)
            codes_in, scales_in = data(sum(NUMELS), 11, torch.int8), data(len(scales), 12)
            ops.unflatten_quantised_into(
                codes_in, scales_in, outputs, block=block, scale=0.3, accumulate=True
            )
            found += [codes, scales, *outputs]
        return found

    made = (flatten, flatten_into, unflatten, unflatten_into, blocks, quantised)
    return {call.__name__: call for call in made}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", calls(False, []))
def test_every_operator(device: SimulatedDevice, name: str, strided: bool) -> None:
    between_guards: list[Tensor] = []
    call = calls(strided, between_guards)[name]
    got = call()
    assert device.num_launches == 0, "nothing runs before the host synchronises"
    device.synchronise()
    assert device.num_launches > 0
    with SimulatedDevice.nothing_active():
        want = call()
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x.contiguous(), y.contiguous(), name)
    for x in between_guards:
        check_guards(x)


def test_one_launch_a_dtype(device: SimulatedDevice) -> None:
    def launches(call: Callable[[], object]) -> int:
        before = device.num_launches
        call()
        device.synchronise()
        return device.num_launches - before

    ones = [torch.ones(numel) for numel in (3, 0, 5, 7) for _ in range(100)]
    halves = [x.half() for x in ones]
    mixed = list(itertools.chain(*zip(ones, halves, strict=True)))
    total = sum(x.numel() for x in mixed)
    assert launches(lambda: ops.flatten(ones)) == 1
    assert launches(lambda: ops.flatten(mixed)) == 2
    assert launches(lambda: ops.unflatten_into(torch.ones(total), mixed)) == 2
    assert launches(lambda: ops.flatten_quantised(ones)) == 2
    assert launches(lambda: ops.quantise_blocks(torch.ones(300))) == 1
    assert launches(lambda: ops.quantise_blocks(torch.ones(300).to(E5M2))) == 2
    assert launches(lambda: ops.flatten([torch.ones(0)])) == 0
    assert launches(lambda: ops.quantise_blocks(torch.ones(0))) == 0


# --- order and lifetime ---------------------------------------------------------------------------


def test_kernels_come_between_what_is_before_and_behind(device: SimulatedDevice) -> None:
    x, y = torch.zeros(5, 7).t(), torch.zeros(31)  # the first one needs a stand-in
    outputs = [torch.zeros(5, 7).t(), torch.zeros(31)]
    for step in range(3):
        device.call(lambda step=step: (x.fill_(step + 1.0), y.fill_(step + 2.0)))
        bucket = ops.flatten([x, y], scale=2.0)
        device.call(lambda: (x.fill_(-1.0), y.fill_(-1.0)))
        ops.unflatten_into(bucket, outputs, accumulate=True)
        device.call(lambda: [out.mul_(10.0) for out in outputs])
    device.synchronise()
    wanted = ((2.0 * 10 + 4.0) * 10 + 6.0) * 10, ((4.0 * 10 + 6.0) * 10 + 8.0) * 10
    for out, want in zip(outputs, wanted, strict=True):
        assert_same_bits(out.contiguous(), torch.full(out.shape, want), "unflatten_into")


def test_nobody_keeps_tensors_or_lists(device: SimulatedDevice) -> None:
    buckets = []
    for step in range(20):
        tensors = [torch.full((numel,), float(step))[: numel // 2 * 2] for numel in (40, 4096)]
        tensors.append(torch.full((30, 20), float(step)).t())
        buckets.append(ops.flatten(tensors, scale=0.5))
        del tensors
        gc.collect()
        # Would be given the memory of what has gone.
        _ = [torch.full((numel,), -1.0) for numel in (40, 4096, 600) for _ in range(4)]
    device.synchronise()
    for step, bucket in enumerate(buckets):
        assert_same_bits(bucket, torch.full((4736,), 0.5 * step), "flatten")


def test_streams_do_not_share_tables_that_are_in_use(device: SimulatedDevice) -> None:
    streams = [0, device.new_stream(), device.new_stream()]
    found = []
    for step in range(60):
        with device.stream(streams[step % 3]):
            tensors = [torch.full((11 + i,), float(step * 100 + i)) for i in range(9)]
            found.append((tensors, ops.flatten(tensors)))
        # Some streams are behind others when the next table is written.
        device.run_a_little()
    device.synchronise()
    for tensors, bucket in found:
        assert_same_bits(bucket, torch.cat(tensors), "flatten")


def test_pinned_memory_is_used_again(device: SimulatedDevice) -> None:
    tensors = [torch.ones(3) for _ in range(300)]
    ops.flatten(tensors)
    device.synchronise()
    before = device.num_allocations
    for _ in range(5):
        ops.flatten(tensors)
        ops.flatten(tensors[:10])
        device.synchronise()
    # One more: the first block is not free when the second is asked for.
    assert device.num_allocations <= before + 1


# --- graphs ---------------------------------------------------------------------------------------


def capture_one(device: SimulatedDevice, x: Tensor, out: Tensor) -> int:
    """A graph that takes x (7, 5), strided, and its block scales to `out`; no list and no tensor between is kept."""
    with device.capture() as graph:
        bucket = ops.flatten([x, x.half()[:0], x], scale=2.0)
        codes, scales = ops.flatten_quantised([bucket], block=None, dtype=torch.int8)
        ops.unflatten_quantised_into(codes, scales, [out], block=None, accumulate=True)
    return graph[0]


def test_a_graph_has_its_own_tables(device: SimulatedDevice) -> None:
    x, out = torch.zeros(5, 7).t(), torch.zeros(70)
    ops.flatten([x])
    device.synchronise()
    graph = capture_one(device, x, out)
    gc.collect()
    want = torch.zeros(70)
    for step in range(3):
        values = data(35, step).view(7, 5)
        device.call(lambda values=values: x.copy_(values))
        device.replay(graph)
        # Others, whose tables must not take the place of the graph's, and of the same sizes.
        y = torch.full((2, 40), float(step)).t()
        other = ops.flatten([y, y, y])
        ops.flatten_quantised([y], block=None)
        device.synchronise()
        assert_same_bits(other, torch.full((240,), float(step)), "flatten beside a graph")
        with SimulatedDevice.nothing_active():
            bucket = ops.flatten([values, values], scale=2.0)
            codes, scales = ops.flatten_quantised([bucket], block=None, dtype=torch.int8)
            ops.unflatten_quantised_into(codes, scales, [want], block=None, accumulate=True)
        assert_same_bits(out, want, "a replay")


def test_tables_of_a_graph_come_back_with_its_end(device: SimulatedDevice) -> None:
    x, out = torch.zeros(5, 7).t(), torch.zeros(70)
    device.delete_graph(capture_one(device, x, out))
    before = device.num_allocations
    for _ in range(5):
        device.delete_graph(capture_one(device, x, out))
    assert device.num_allocations == before
    kept = [capture_one(device, x, out) for _ in range(3)]
    assert device.num_allocations > before
    for graph in kept:
        device.replay(graph)
    for graph in kept:
        device.delete_graph(graph)  # what stands in a stream still runs
    device.synchronise()


# --- devices --------------------------------------------------------------------------------------


def test_fakes_stay_on_their_device() -> None:
    with FakeTensorMode():
        tensors = [torch.empty(5, device="cuda:1"), torch.empty(3, 7, device="cuda:1")]
        bucket = ops.flatten(tensors, dtype=torch.float16)
        codes, scales = ops.flatten_quantised([tensors[0], None], numels=[5, 3], block=None)
        found = [
            bucket,
            codes,
            scales,
            *ops.unflatten(bucket, [(26,)]),
            ops.dequantise_blocks(*ops.quantise_blocks(tensors[1], 8), 8),
            ops.flatten([None], numels=[4], dtype=torch.float32, device="cuda:1"),
        ]
        assert all(x.device == torch.device("cuda", 1) for x in found)


def on_cuda(name: str, *arguments: object) -> None:
    """What the dispatcher does with CUDA tensors, of which fakes show everything but their data."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    getattr(torch.ops.pycoll, name).default.redispatch(keys, *arguments)


def test_tensors_of_several_devices_are_refused() -> None:
    with FakeTensorMode():
        near, far, cpu = (torch.empty(5, device=d) for d in ("cuda:0", "cuda:1", "cpu"))
        codes = torch.empty(5, device="cuda:0", dtype=torch.int8)
    for name, arguments, message in (
        ("flatten", ([near, far], [0, 5], 10, torch.float32, 1.0), "0] on cuda:0"),
        ("flatten_into", (near, [cpu], [0], 1.0, False), "bucket on cuda:0"),
        ("unflatten_into", (near, [far], [0], 1.0, False), "bucket on cuda:0"),
        ("flatten_quantised", ([near, cpu], [0, 5], 10, 5, torch.int8, 1.0), "0] on cuda:0"),
        ("unflatten_quantised_into", (codes, near, [far], [0], 1, 1.0, False), "codes on cuda:0"),
        ("dequantise_blocks", (codes, far, 1, torch.float32), "codes on cuda:0"),
    ):
        with pytest.raises(ValueError, match=r"is on (cuda:1|cpu) but") as raised:
            on_cuda(name, *arguments)
        assert message in str(raised.value)
        assert "; move one of them with .to()" in str(raised.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may have CUDA kernels")
def test_without_kernels_the_error_says_how_to_get_them() -> None:
    with FakeTensorMode():
        x = torch.empty(5, device="cuda:0")
        codes = torch.empty(5, device="cuda:0", dtype=torch.int8)
    for name, arguments in (
        ("flatten", ([x], [0], 5, torch.float32, 1.0)),
        ("flatten_into", (x, [x], [0], 1.0, False)),
        ("unflatten", (x, [5], torch.float32, 1.0)),
        ("unflatten_into", (x, [x], [0], 1.0, False)),
        ("flatten_quantised", ([x], [0], 5, 5, torch.int8, 1.0)),
        ("unflatten_quantised_into", (codes, x, [x], [0], 1, 1.0, False)),
        ("quantise_blocks", (x, 5, torch.int8)),
        ("dequantise_blocks", (codes, x, 1, torch.float32)),
    ):
        with pytest.raises(
            ValueError, match=r"on cuda:0, and this build.*build it with PYCOLL_CUDA"
        ):
            on_cuda(name, *arguments)
