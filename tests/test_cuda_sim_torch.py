"""Simulated CUDA kernels on torch's tensors, compared with torch's arithmetic."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from cuda_sim_programs import FOLDER, build

pytestmark = pytest.mark.slow

# In the order of csrc/base/dtype.h and reduce_op.h; None: no dtype of torch that kernels reduce.
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    None,
    None,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
OPS = {"SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "BAND": 5, "BOR": 6, "BXOR": 7}
ALGORITHMS = ("one_shot", "two_shot", "ring", "ring_ll128")
MESSAGE_BYTES = 10_000


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    build("none", ["libpycoll_sim.so"])
    return ctypes.CDLL(str(FOLDER / "build/none/libpycoll_sim.so"))


def test_dtypes_and_ops_are_numbered_as_in_the_code() -> None:
    csrc = Path(__file__).resolve().parents[1] / "csrc/base"
    dtypes = (csrc / "dtype.h").read_text(encoding="utf-8").split("kDTypeInfo[kNumDTypes] = {")[1]
    names = [line.split('"')[1] for line in dtypes.splitlines() if line.strip().startswith('{"')]
    for i, dtype in enumerate(DTYPES):
        assert dtype is None or str(dtype) == f"torch.{names[i]}"
    ops = (csrc / "reduce_op.h").read_text(encoding="utf-8").split("kNames[kNumReduceOps] = {")[1]
    found = [text for text in ops.split("}")[0].split('"') if text.isalpha()]
    assert {name: i for i, name in enumerate(found)} == OPS


def call(function: ctypes._CFuncPtr, *arguments: object) -> None:
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = function(*arguments, message, ctypes.c_size_t(MESSAGE_BYTES))
    assert status == 0, message.value.decode()


def pointers(tensors: list[torch.Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def random_tensors(dtype: torch.dtype, numel: int, world_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel * 31 + world_size)
    if not dtype.is_floating_point:
        return [
            torch.randint(0, 100, (numel,), generator=generator).to(dtype)
            for _ in range(world_size)
        ]
    return [(torch.randn(numel, generator=generator) * 4).to(dtype) for _ in range(world_size)]


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, small floats in float32 and rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    result = tensors[0].to(wide)
    for tensor in tensors[1:]:
        term = tensor.to(wide)
        match op:
            case "SUM" | "AVG":
                result = result + term
            case "PRODUCT":
                result = result * term
            case "MIN":
                result = torch.minimum(result, term)
            case "MAX":
                result = torch.maximum(result, term)
            case "BXOR":
                result = result ^ term
    if op == "AVG":
        result = result / len(tensors)
    return result.to(dtype)


CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BXOR")
    if dtype is not None
    and (op == "BXOR") <= (not dtype.is_floating_point)
    # Torch's sum of small integers wraps, the kernels' average does not.
    and not (op == "AVG" and not dtype.is_floating_point)
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=[f"{dtype}-{op}"[6:] for dtype, op in CASES])
def test_all_reduce(library: ctypes.CDLL, algorithm: str, dtype: torch.dtype, op: str) -> None:
    # A ring adds in another order: with two ranks the order does not matter.
    world_size, numel = (2 if "ring" in algorithm else 3), 613
    inputs = random_tensors(dtype, numel, world_size)
    before = [tensor.clone() for tensor in inputs]
    outputs = [torch.zeros_like(tensor) for tensor in inputs]
    call(
        library.pycoll_sim_all_reduce,
        ALGORITHMS.index(algorithm),
        DTYPES.index(dtype),
        OPS[op],
        world_size,
        ctypes.c_size_t(numel),
        pointers(inputs),
        pointers(outputs),
        (ctypes.c_double * world_size)(*[1.0] * world_size),
        ctypes.c_uint64(7),
    )
    expected = reduced(before, op).double()
    for rank in range(world_size):
        torch.testing.assert_close(outputs[rank].double(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(inputs[rank].view(torch.uint8), before[rank].view(torch.uint8))


@pytest.mark.parametrize("bucket", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_flatten_and_unflatten(library: ctypes.CDLL, bucket: torch.dtype) -> None:
    tensors = [random_tensors(torch.float32, n, 1)[0] for n in (13, 500, 1, 4099)]
    begins = [0, 16, 516, 528]
    numel = begins[-1] + tensors[-1].numel()
    flat = torch.zeros(numel, dtype=bucket)
    amax = torch.zeros(1)
    words = [w for t, b in zip(tensors, begins, strict=True) for w in (t.data_ptr(), t.numel(), b)]

    def move(unflatten: int, scale: float) -> None:
        call(
            library.pycoll_sim_flatten,
            unflatten,
            DTYPES.index(torch.float32),
            DTYPES.index(bucket),
            (ctypes.c_uint64 * len(words))(*words),
            ctypes.c_size_t(len(tensors)),
            ctypes.c_void_p(flat.data_ptr()),
            ctypes.c_size_t(numel),
            ctypes.c_float(scale),
            0,
            ctypes.c_void_p(amax.data_ptr()),
        )

    before = [tensor.clone() for tensor in tensors]
    move(0, 0.5)
    for tensor, begin in zip(before, begins, strict=True):
        expected = (tensor * 0.5).to(bucket)
        assert torch.equal(flat[begin : begin + tensor.numel()].float(), expected.float())
    assert amax.item() == max(tensor.abs().max().item() for tensor in before)
    move(1, 2.0)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, (old * 0.5).to(bucket).float() * 2)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantise(library: ctypes.CDLL, code: torch.dtype) -> None:
    numel, block = 1000, 128
    data = random_tensors(torch.float32, numel, 1)[0]
    codes = torch.zeros(numel, dtype=torch.uint8)
    scales = torch.zeros(-(-numel // block))
    back = torch.zeros_like(data)
    for dequantise, tensor in ((0, data), (1, back)):
        call(
            library.pycoll_sim_quantise,
            dequantise,
            DTYPES.index(torch.float32),
            DTYPES.index(code),
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_void_p(codes.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
            ctypes.c_size_t(numel),
            ctypes.c_size_t(block),
        )
    largest = 127.0 if code == torch.int8 else torch.finfo(code).max
    for i, chunk in enumerate(data.split(block)):
        scale = chunk.abs().max() * torch.tensor(1 / largest, dtype=torch.float32)
        assert scales[i] == scale
        scaled = chunk * (1 / scale)
        wire = scaled.round().to(code) if code == torch.int8 else scaled.to(code)
        assert torch.equal(back[i * block : (i + 1) * block], wire.float() * scale)


@pytest.mark.parametrize("wire", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_all_reduce_is_close(library: ctypes.CDLL, wire: torch.dtype) -> None:
    world_size, numel = 4, 2000
    inputs = random_tensors(torch.float32, numel, world_size)
    outputs = [torch.zeros_like(tensor) for tensor in inputs]
    call(
        library.pycoll_sim_all_reduce_quantised,
        DTYPES.index(torch.float32),
        DTYPES.index(wire),
        ctypes.c_size_t(128),
        world_size,
        world_size,
        ctypes.c_size_t(numel),
        pointers(inputs),
        pointers(outputs),
        ctypes.c_uint64(3),
    )
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    exact = torch.stack(inputs).double().mean(0)
    relative, absolute = {
        torch.float8_e4m3fn: (2**-4, 0.0),
        torch.float8_e5m2: (2**-3, 0.0),
        torch.int8: (0.0, 16.0 / 254),
    }[wire]
    magnitude = torch.stack(inputs).double().abs().mean(0)
    bound = 2.2 * relative * magnitude + 2.2 * absolute + 1e-3
    assert bool(((outputs[0].double() - exact).abs() <= bound).all())
