"""What is timed: a collective, its size, dtype, operator, and where its result goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycoll.bench.formulas import CUT_INTO_PARTS, SIZE_MEANING

OPS = tuple(SIZE_MEANING)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
REDUCE_OPS = ("sum", "avg", "min", "max", "product")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# What torch.distributed's own function does; the other place takes a copy, or views of one buffer.
NATURALLY_IN_PLACE = ("all_reduce", "broadcast", "reduce")
NEVER_IN_PLACE = ("all_to_all", "send_recv")
DEVICES = ("cpu", "cuda")
# Integers up to this size are exact in the dtype, and so is every partial sum of them.
EXACT_UP_TO = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.int64: (1 << 63) - 1,
    torch.int32: (1 << 31) - 1,
    torch.uint8: (1 << 8) - 1,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in EXACT_UP_TO}


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        op: one of `OPS`.
        nbytes: S as the formulas define it (`SIZE_MEANING`); see `total_numel` for its rounding.
        dtype: a key of `DTYPES`.
        async_op: call with async_op=True and wait at once, instead of the blocking call.
        in_place: input and output share memory, as nccl-tests defines it (for collectives that are
            cut into parts, the rank's own part of the large buffer). None: as torch's function is
            used most, see `NATURALLY_IN_PLACE`. Where torch has no out-of-place form the call is a
            copy and the in-place function.
        reduce_op: one of `REDUCE_OPS`; only reducing collectives look at it.
        device: one of `DEVICES`.
    """

    op: str
    nbytes: int
    dtype: str = "float32"
    async_op: bool = False
    in_place: bool | None = None
    reduce_op: str = "sum"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("op", self.op, OPS),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("reduce_op", self.reduce_op, REDUCE_OPS),
            ("device", self.device, DEVICES),
        ):
            if value not in known:
                raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")
        if self.nbytes < 1:
            raise ValueError(f"nbytes must be positive, got {self.nbytes}")
        if self.in_place is None:
            object.__setattr__(self, "in_place", self.op in NATURALLY_IN_PLACE)
        if self.in_place and self.op in NEVER_IN_PLACE:
            raise ValueError(f"{self.op} has no in-place form; ask for in_place=False")

    @property
    def place(self) -> str:
        return "in" if self.in_place else "out"


def places(op: str) -> tuple[bool, ...]:
    """The values of in_place that an op has, in the order in which nccl-tests prints them."""
    if op == "barrier":
        return (False,)
    return (False,) if op in NEVER_IN_PLACE else (False, True)


def total_numel(case: Case, world_size: int) -> int:
    """Elements that S stands for: at least one, and a multiple of world_size where the op cuts S
    into a part a rank. A barrier has none.
    """
    if case.op == "barrier":
        return 0
    numel = max(1, case.nbytes // DTYPES[case.dtype].itemsize)
    if case.op not in CUT_INTO_PARTS:
        return numel
    return max(1, numel // world_size) * world_size


def total_nbytes(case: Case, world_size: int) -> int:
    """S in bytes as it is really timed."""
    return total_numel(case, world_size) * DTYPES[case.dtype].itemsize
