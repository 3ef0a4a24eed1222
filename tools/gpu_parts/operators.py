"""pycoll.ops on a GPU, against the same operators on the CPU: the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from where import DEVICE, SIMULATES, Rank

from pycoll import ops

E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
SHAPES = ((7,), (0,), (13, 5), (), (1021,), (2, 3, 101), (20011,))
SMALL_SHAPES = SHAPES[:-1]
BEYOND_INT32 = (1 << 31) + 19


def data(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype).to(DEVICE)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype).to(DEVICE)


def tensors_of(*dtypes: torch.dtype) -> list[Tensor]:
    """Of `dtypes` in turn, every other one transposed, none aligned to 16 bytes."""
    made = []
    for index, shape in enumerate(SMALL_SHAPES if SIMULATES else SHAPES):
        numel = torch.Size(shape).numel()
        values = data(numel + 1, index, dtypes[index % len(dtypes)])[1:].view(shape)
        made.append(values.permute(*reversed(range(len(shape)))) if index % 2 == 0 else values)
    return made


def results(device: str) -> dict[str, Tensor]:
    """What operators make of data on `device`."""

    def there(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

    found = {}
    mixed = there(tensors_of(torch.float32, torch.bfloat16, E5M2, torch.float16))
    numels = [tensor.numel() for tensor in mixed]
    total = sum(numels)
    some = [None if index in (0, 4) else tensor for index, tensor in enumerate(mixed)]
    for dtype in (torch.float32, torch.bfloat16, E4M3):
        found[f"flatten to {dtype}"] = ops.flatten(some, numels=numels, dtype=dtype, scale=-0.37)
        bucket = data(total, 1, dtype).to(device)
        ops.flatten_into(bucket, mixed, scale=0.5, accumulate=True)
        found[f"flatten_into {dtype}"] = bucket
    for dtype in (torch.int64, torch.float64, torch.uint8, torch.complex64):
        kind = torch.float32 if dtype.is_complex else dtype
        found[f"flatten of {dtype}"] = ops.flatten(
            [tensor.to(dtype) for tensor in there(tensors_of(kind))]
        )
    bucket = data(total, 2, torch.float32).to(device)
    for index, piece in enumerate(ops.unflatten(bucket, [t.shape for t in mixed], dtype=E4M3)):
        found[f"unflatten {index}"] = piece
    outputs = there(tensors_of(torch.bfloat16, torch.float32))
    ops.unflatten_into(bucket, outputs, scale=0.25, accumulate=True)
    for index, output in enumerate(outputs):
        found[f"unflatten_into {index}"] = output
    for code in (torch.int8, E4M3, E5M2):
        codes, scales = ops.quantise_blocks(bucket[1:], 128, code)
        found |= {f"codes of {code}": codes, f"scales of {code}": scales}
        found[f"dequantised {code}"] = ops.dequantise_blocks(codes, scales, 128, torch.bfloat16)
        codes, scales = ops.flatten_quantised(mixed, block=None, dtype=code)
        found |= {f"bucket's codes of {code}": codes, f"bucket's scales of {code}": scales}
    return found


def replays() -> list[str]:
    """What is wrong when a captured call runs again, between others with tables as large."""
    x, out = torch.zeros(700, device=DEVICE), torch.zeros(1400, device=DEVICE)
    ops.flatten([x])  # kernels are loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.flatten_into(out, [x, x], scale=2.0)
    wrong = []
    for step in range(5):
        x.fill_(step + 1.0)
        others = [ops.flatten([torch.full((9,), float(i), device=DEVICE)] * 2) for i in range(20)]
        graph.replay()
        if not torch.equal(out, torch.full_like(out, 2.0 * step + 2.0)):
            wrong.append(f"replay {step}")
        if any(not torch.equal(y, torch.full_like(y, float(i))) for i, y in enumerate(others)):
            wrong.append(f"calls beside replay {step}")
    return wrong


def large() -> list[str]:
    """Buckets whose elements no int counts."""
    x = torch.zeros(BEYOND_INT32, dtype=torch.uint8, device=DEVICE)
    x[-7:] = torch.arange(1, 8, device=DEVICE)
    bucket = ops.flatten([x[:5], x[5:]])
    wrong = [] if torch.equal(bucket[-7:], x[-7:]) and not bucket[:-7].any() else ["flatten, large"]
    first, second = ops.unflatten(bucket, [(BEYOND_INT32 - 3,), (3,)])
    if not torch.equal(torch.cat([first[-4:], second]), x[-7:]):
        wrong.append("unflatten, large")
    return wrong


def operators() -> dict[str, Any]:
    want = results("cpu")
    own = Rank(0)
    with own.scope():
        got = results(DEVICE)
        own.finish()
        wrong = [] if SIMULATES else [*replays(), *large()]
    for name, tensor in got.items():
        mine, other = (
            x.cpu().contiguous().view(-1).view(torch.uint8) for x in (tensor, want[name])
        )
        if not torch.equal(mine, other):
            wrong.append(f"{name}: other bits than on the CPU")
    return {"results": len(got), "wrong": wrong}
