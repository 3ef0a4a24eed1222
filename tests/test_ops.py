"""pycoll.ops as operators of torch.library: schema, fakes, derivatives, torch.compile, what they refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pycoll import ops

on_both_kernels = pytest.mark.usefixtures("operator_kernels")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Run = Callable[..., Any]


def tensors(dtype: torch.dtype = torch.float32, *, grad: bool = False) -> list[Tensor]:
    made = [torch.randn(5), torch.randn(3, 7).t(), torch.randn(0), torch.randn(101)]
    return [x.to(dtype).requires_grad_(grad) for x in made]


# --- torch.library ---------------------------------------------------------------------------------

BEGINS, NUMEL = [2, 7, 28, 30], 137


def samples() -> list[tuple[str, tuple[Any, ...]]]:
    """Each operator with arguments of several kinds."""
    codes, scales = ops.quantise_blocks(torch.randn(13, 11), 16, torch.int8)
    bucket = torch.randn(NUMEL)
    wanted = [5, 0, 31, 101]
    return [
        ("flatten", (tensors(), BEGINS, NUMEL, torch.float32, 1.0)),
        ("flatten", (tensors(grad=True), BEGINS, NUMEL, torch.bfloat16, 0.5)),
        ("flatten", (tensors(torch.float64, grad=True), BEGINS, NUMEL, torch.float64, 0.5)),
        ("flatten", (tensors(torch.float16), BEGINS, NUMEL, E5M2, 2.0)),
        ("flatten_into", (torch.randn(NUMEL), tensors(), BEGINS, 0.5, True)),
        ("flatten_into", (torch.randn(NUMEL).bfloat16(), tensors(), BEGINS, 1.0, False)),
        ("unflatten", (bucket, wanted, torch.float32, 1.0)),
        ("unflatten", (bucket.clone().requires_grad_(), wanted, torch.float16, 0.5)),
        ("unflatten_into", (bucket, tensors(), BEGINS, 1.0, False)),
        ("unflatten_into", (bucket, tensors(torch.bfloat16), BEGINS, 0.5, True)),
        ("quantise_blocks", (torch.randn(13, 11, requires_grad=True), 16, torch.int8)),
        ("quantise_blocks", (torch.randn(131).bfloat16(), 16, E4M3)),
        ("dequantise_blocks", (codes, scales, 16, torch.float32)),
        ("dequantise_blocks", (codes, scales.clone().requires_grad_(), 16, torch.bfloat16)),
        ("flatten_quantised", (tensors(grad=True), BEGINS, NUMEL, 16, torch.int8, 1.0)),
        ("flatten_quantised", (tensors(), [0, 5, 26, 26], 127, 0, E5M2, 0.5)),
        ("unflatten_quantised_into", (codes.view(-1), scales, tensors(), BEGINS, 16, 1.0, False)),
        ("unflatten_quantised_into", (codes.view(-1), scales, tensors(), BEGINS, 16, 2.0, True)),
    ]


@on_both_kernels
@pytest.mark.parametrize("index", range(len(samples())), ids=lambda i: f"{samples()[i][0]}-{i}")
def test_opcheck(index: int) -> None:
    name, args = samples()[index]
    results = torch.library.opcheck(getattr(torch.ops.pycoll, name).default, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def test_every_operator_is_checked() -> None:
    defined = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("pycoll::")}
    assert defined == {f"pycoll::{name}" for name, _ in samples()}


# --- derivatives -----------------------------------------------------------------------------------


@on_both_kernels
def test_derivatives_of_flatten_and_unflatten() -> None:
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def flattened(x: Tensor, y: Tensor) -> Tensor:
        return ops.flatten([x.t(), None, y], numels=[12, 2, 5], scale=0.3)

    assert torch.autograd.gradcheck(flattened, (a, b))
    assert torch.autograd.gradgradcheck(flattened, (a, b))
    bucket = torch.randn(17, dtype=torch.float64, requires_grad=True)

    def unflattened(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.unflatten(x, [(3, 4), (0,), (5,)], scale=0.3))

    assert torch.autograd.gradcheck(unflattened, (bucket,))
    assert torch.autograd.gradgradcheck(unflattened, (bucket,))


@on_both_kernels
def test_a_gradient_has_the_dtype_of_its_tensor() -> None:
    a = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(4, requires_grad=True)
    ops.flatten([a, b], dtype=torch.float32, scale=0.5).sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.bfloat16
    assert torch.equal(a.grad.float(), torch.full((3,), 0.5))
    assert torch.equal(b.grad, torch.full((4,), 0.5))


@on_both_kernels
def test_part_of_what_was_unflattened_may_be_used() -> None:
    bucket = torch.randn(9, requires_grad=True)
    _, second, _ = ops.unflatten(bucket, [(2,), (3,), (4,)])
    (second * 2).sum().backward()
    assert bucket.grad is not None
    assert bucket.grad.tolist() == [0, 0, 2, 2, 2, 0, 0, 0, 0]


@on_both_kernels
def test_derivative_of_dequantisation_by_the_scales() -> None:
    codes, scales = ops.quantise_blocks(torch.randn(7, 9), 16, torch.int8)
    scales.requires_grad_()
    weights = torch.randn(7, 9)
    (ops.dequantise_blocks(codes, scales, 16) * weights).sum().backward()
    products = (codes.float() * weights).view(-1)
    want = torch.stack([part.sum() for part in products.split(16)])
    torch.testing.assert_close(scales.grad, want)


@on_both_kernels
def test_codes_carry_no_gradient() -> None:
    x = torch.randn(300, requires_grad=True)
    for dtype in (E4M3, E5M2, torch.int8):
        assert not any(t.requires_grad for t in ops.quantise_blocks(x, dtype=dtype))
        assert not any(t.requires_grad for t in ops.flatten_quantised([x], dtype=dtype))


# --- torch.compile ---------------------------------------------------------------------------------


def a_step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """All operators, with computation around and between them."""
    bucket = ops.flatten([a * 2, None, b.t()], numels=[a.numel(), 3, b.numel()], scale=0.5)
    codes, scales = ops.quantise_blocks(bucket.detach(), 32, torch.int8)
    back = ops.dequantise_blocks(codes, scales, 32) + 1
    x, y = ops.unflatten(bucket, [(a.numel() + 3,), (b.numel(),)])
    ops.flatten_into(back, [x.detach() * 3, y.detach()], accumulate=True)
    codes, scales = ops.flatten_quantised([back, x.detach()], block=None, dtype=E5M2)
    outputs = [torch.zeros_like(back), torch.zeros_like(x)]
    ops.unflatten_quantised_into(codes, scales, outputs, block=None)
    ops.unflatten_into(back, outputs[:1], scale=2.0, accumulate=True)
    return x * 2 + y.sum(), outputs[0] * 2, outputs[1], codes.view(torch.uint8)


def check_compiled(compiled: Run) -> None:
    for numel in (11, 13, 17):
        leaves = [torch.randn(numel, requires_grad=True), torch.randn(4, numel, requires_grad=True)]
        got, want = compiled(*leaves), a_step(*leaves)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
        for g, w in zip(
            torch.autograd.grad(got[0].sum(), leaves),
            torch.autograd.grad(want[0].sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(g, w)


@on_both_kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(dynamic: bool) -> None:
    torch._dynamo.reset()
    check_compiled(torch.compile(a_step, backend="aot_eager", fullgraph=True, dynamic=dynamic))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor() -> None:
    """In a process of its own: inductor cannot live with what other tests do to distutils."""
    code = (
        "import torch, test_ops; "
        "test_ops.check_compiled(torch.compile(test_ops.a_step, fullgraph=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]


# --- refusals --------------------------------------------------------------------------------------

ONES = torch.ones(5)
INT8_CODES = torch.ones(9, dtype=torch.int8)

# call, and what the message has to say
REFUSED: list[tuple[Run, str]] = [
    (lambda: ops.flatten([ONES, None]), r"tensors\[1\] is None and numels is not given; pass"),
    (lambda: ops.flatten([None], numels=[3]), "dtype is not given; pass dtype"),
    (lambda: ops.flatten([ONES], numels=[3]), r"tensors\[0\] has 5 elements, but numels\[0\] is 3"),
    (lambda: ops.flatten([ONES], numels=[5, 1]), "tensors has 1 entries and numels 2; give one"),
    (
        lambda: ops.flatten([ONES, ONES.int()]),
        r"tensors\[1\] is int32 but dtype is float32, and only float32.*give both the same dtype",
    ),
    (lambda: ops.flatten([ONES.double()], dtype=torch.float32), "is float64 but dtype is float32"),
    (
        lambda: ops.flatten([ONES.int()], scale=0.5),
        "scale is 0.5 and accumulate is False, but elements of int32 are moved as they are; leave",
    ),
    (
        lambda: ops.flatten([ONES.to_sparse()]),
        r"tensors\[0\] has layout Sparse; convert it with to_dense",
    ),
    (
        lambda: ops.flatten_into(torch.ones(6), [ONES]),
        "bucket has 6 elements, but the tensors have 5; make them equal",
    ),
    (lambda: ops.flatten_into(torch.ones(10)[::2], [ONES]), r"bucket has strides \[2\]; pass a"),
    (lambda: ops.flatten_into(ONES, [ONES[:3], ONES[:2]]), r"tensors\[1\] shares memory with buck"),
    (lambda: ops.flatten_into(ONES, [ONES], scale=2.0), r"tensors\[0\] shares memory with bucket"),
    (lambda: ops.unflatten(ONES, [(2,), (4,)]), "bucket has 5 elements, but numels add up to 6"),
    (
        lambda: ops.unflatten_into(torch.ones(10), [ONES, ONES]),
        r"tensors\[0\] and tensors\[1\] share memory",
    ),
    (
        lambda: ops.unflatten_into(ONES, [torch.ones(1).expand(5)]),
        r"tensors\[0\] overlaps itself.*clone\(\) it first",
    ),
    (lambda: ops.quantise_blocks(ONES, 0), "block is 0; give a positive number"),
    (
        lambda: ops.quantise_blocks(ONES, 8, torch.int16),
        "dtype is int16, but codes are float8_e4m3",
    ),
    (lambda: ops.quantise_blocks(ONES.double()), "tensor is float64 but what is quantised is"),
    (
        lambda: ops.dequantise_blocks(INT8_CODES, ONES, 4),
        "scales has 5 elements, but the number of blocks is 3; make them equal",
    ),
    (lambda: ops.dequantise_blocks(INT8_CODES, torch.ones(3).half(), 4), "scales is float16; scal"),
    (lambda: ops.dequantise_blocks(ONES, ONES, 1), "codes is float32, but codes are float8_e4m3fn"),
    (lambda: ops.flatten_quantised([ONES], block=-1), "block is -1; give a positive number"),
    (
        lambda: ops.unflatten_quantised_into(INT8_CODES, ONES, [ONES], block=3),
        "codes has 9 elements, but the tensors have 5",
    ),
    (
        lambda: torch.ops.pycoll.flatten([ONES, ONES], [0, 3], 10, torch.float32, 1.0),
        r"begins\[1\] is 3, but the tensors before it reach to element 5",
    ),
    (
        lambda: torch.ops.pycoll.flatten([ONES], [2], 6, torch.float32, 1.0),
        "numel is 6, but the tensors reach to element 7",
    ),
    (
        lambda: torch.ops.pycoll.flatten_quantised([ONES], [2], 7, 0, torch.int8, 1.0),
        "block is 0, a scale for each tensor, but begins leave gaps",
    ),
]


@on_both_kernels
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_refusals_name_the_argument_and_the_remedy(call: Run, message: str) -> None:
    before = ONES.clone()
    with pytest.raises(ValueError, match=message):
        call()
    assert torch.equal(ONES, before)


# --- in-place results and loading ------------------------------------------------------------------


@on_both_kernels
def test_autograd_sees_what_was_written() -> None:
    x = torch.ones(5, requires_grad=True)
    target = torch.ones(5)
    product = x * target
    ops.unflatten_into(torch.zeros(5), [target])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_nothing_is_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, torch, pycoll; assert 'pycoll._C' not in sys.modules; "
        "import pycoll.ops; assert 'pycoll._C' in sys.modules; "
        "import torch.distributed as dist; "
        "print(pycoll.ops.flatten([torch.ones(2), torch.zeros(1)]).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0, 0.0]"
