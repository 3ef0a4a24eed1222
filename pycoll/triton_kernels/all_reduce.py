"""all_reduce: which kernel."""

from __future__ import annotations

from torch import Tensor

from pycoll.triton_kernels.all_reduce_one_shot import start_one_shot
from pycoll.triton_kernels.all_reduce_ring import start_ring
from pycoll.triton_kernels.all_reduce_two_shot import start_two_shot
from pycoll.triton_kernels.arguments import Reduction, check
from pycoll.triton_kernels.group import TritonGroup
from pycoll.triton_kernels.storage import storage_of

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
_START = {"one_shot": start_one_shot, "two_shot": start_two_shot, "ring": start_ring}


def all_reduce(
    group: TritonGroup,
    input: Tensor,
    output: Tensor | None = None,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    factor: float = 1.0,
) -> Tensor:
    """``output = input of rank 0 op input of rank 1 op ...``.

    Args:
        input: equal shape and dtype on all ranks.
        output: the same shape and dtype; None: the input.
        op: sum, avg, product, min, max, band, bor, bxor or premul_sum.
        algorithm: one_shot (up to the group's mailbox_bytes), two_shot, or auto for one of these by size; all give the
            same bits. ring adds in the order of the ring.
        factor: of premul_sum, this rank's own.

    Raises:
        ValueError: a tensor, the op or the algorithm does not fit.
    """
    output = input if output is None else output
    check(group, {"input": input, "output": output}, op)
    if input.numel() != output.numel():
        raise ValueError(
            f"input has {input.numel()} elements and output {output.numel()}; make them equal"
        )
    algorithm = _algorithm(group, algorithm, input.numel() * input.element_size())
    call = Reduction(group, storage_of(input, op), storage_of(output, op), op, factor)
    _START[algorithm](call)
    return output


def _algorithm(group: TritonGroup, algorithm: str, nbytes: int) -> str:
    limit = group.layout.mailbox_bytes
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; give one of {', '.join(ALGORITHMS)}")
    if algorithm == "auto":
        return "one_shot" if nbytes <= limit else "two_shot"
    if algorithm == "one_shot" and nbytes > limit:
        raise ValueError(
            f"input has {nbytes} bytes and the group's mailbox_bytes is {limit}; "
            "take two_shot, or make the group with a larger mailbox"
        )
    return algorithm
