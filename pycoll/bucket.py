"""Buckets: gradients that travel together, how parameters come into them, and what is recorded of them.

*Ready order* is the order in which a backward pass completes gradients. Parameters are put into buckets in that
order, so that a bucket is complete early and its reduction overlaps with the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from pycoll.symmetric import symmetric_empty

MIB = 1 << 20
DEFAULT_CAP_MB = 25.0
DEFAULT_FIRST_CAP_MB = 1.0
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class ParameterSpec:
    """What assignment needs to know of a parameter.

    Attributes:
        name: as in ``named_parameters``.
        nbytes: of its gradient in the bucket.
        kind: parameters of different kinds never share a bucket: dtype (in the bucket) and device.
        sparse: its gradient is sparse; then it has a bucket of its own.
        bucket_with: name of another parameter. All that name it share its bucket, whatever the caps, and the bucket's
            place in the order is that parameter's.
    """

    name: str
    nbytes: int
    kind: tuple[torch.dtype, torch.device]
    sparse: bool = False
    bucket_with: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        parameter: Tensor,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
        bucket_with: str | None = None,
    ) -> ParameterSpec:
        """`dtype`: in the bucket; None: the parameter's."""
        dtype = dtype or parameter.dtype
        nbytes = parameter.numel() * dtype.itemsize
        return cls(name, nbytes, (dtype, parameter.device), sparse, bucket_with)


def bucket_caps(
    cap_mb: float | None = None,
    cap_mb_list: Sequence[float] | None = None,
    first_cap_mb: float | None = None,
) -> list[int]:
    """Caps in bytes for `assign_buckets`, from what a user says in MiB.

    Args:
        cap_mb: of every bucket. None: 25, and 1 for the first one. A cap that is given, also 25, holds for the first
            bucket too.
        cap_mb_list: caps of the first buckets in ready order; the last one holds for all that follow. Goes before
            `cap_mb`.
        first_cap_mb: of the first bucket, whatever the others have.

    Raises:
        ValueError: a cap is not positive, or the list is empty.
    """
    if cap_mb_list is not None:
        caps = list(cap_mb_list)
        if not caps:
            raise ValueError("bucket_cap_mb_list is empty; give one cap at least, or None")
    elif cap_mb is None:
        caps = [DEFAULT_FIRST_CAP_MB, DEFAULT_CAP_MB]
    else:
        caps = [cap_mb]
    if first_cap_mb is not None:
        caps = [first_cap_mb, *(caps[1:] or caps)]
    for cap in caps:
        if not cap > 0:
            raise ValueError(f"a bucket's cap must be positive, got {cap} MiB")
    # Less than a byte means one parameter a bucket.
    return [max(1, int(cap * MIB)) for cap in caps]


def assign_buckets(
    specs: Sequence[ParameterSpec], caps: Sequence[int], order: Sequence[int] | None = None
) -> list[list[int]]:
    """Puts parameters into buckets.

    A bucket is closed as soon as it holds its cap or more: the parameter that reaches the cap is still inside, so that
    a bucket can exceed it by less than its last parameter (as in torch). Each kind has buckets of its own and goes
    through the caps for itself. Pure arithmetic on arguments that are equal on all ranks: so is the result.

    Args:
        specs: of all parameters.
        caps: bytes; ``caps[k]`` closes the k-th bucket of a kind, the last one all that follow.
        order: indices into `specs`, each once; None: as they stand.

    Returns:
        lists of indices, in the order in which the buckets are complete if parameters get ready in `order`.
    """
    followers: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec.bucket_with is not None:
            followers.setdefault(spec.bucket_with, []).append(index)
    open_buckets: dict[object, list[int]] = {}
    num_closed: dict[object, int] = {}
    filled: dict[object, int] = {}
    buckets: list[tuple[int, list[int]]] = []  # position of the last member, members
    positions = range(len(specs)) if order is None else order
    last_of: dict[object, int] = {}
    for position, index in enumerate(positions):
        spec = specs[index]
        if spec.bucket_with is not None:
            continue
        if spec.sparse or spec.name in followers:
            buckets.append((position, [*followers.get(spec.name, []), index]))
            continue
        key = spec.kind
        open_buckets.setdefault(key, []).append(index)
        last_of[key] = position
        filled[key] = filled.get(key, 0) + spec.nbytes
        if filled[key] >= caps[min(num_closed.get(key, 0), len(caps) - 1)]:
            buckets.append((position, open_buckets.pop(key)))
            num_closed[key] = num_closed.get(key, 0) + 1
            filled[key] = 0
    buckets += [(last_of[key], members) for key, members in open_buckets.items()]
    return [members for _, members in sorted(buckets)]


def allocate_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a bucket, (numel,), uninitialised: where the other ranks of the host reach it, if there is room.

    The one place that decides where buckets lie.
    """
    if device.type == "cpu":
        with suppress(RuntimeError):
            return symmetric_empty(numel, dtype=dtype)
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass
class BucketRecord:
    """What happened to a bucket in one backward pass. Times are of ``time.monotonic_ns()``; 0: did not happen.

    Attributes:
        start_ns: its reduction was issued; later than its last gradient if an earlier bucket was not complete.
        issued_ns: the call that issued it returned.
        end_ns: the reduction had ended.
        exposed_ns: for so long the thread of the backward pass did nothing but issue it and wait for it.
        sequence: number of the operation in the group, -1 where a communication hook reduced.
    """

    start_ns: int = 0
    issued_ns: int = 0
    end_ns: int = 0
    exposed_ns: int = 0
    sequence: int = -1


@dataclass(frozen=True)
class BucketFacts:
    """What stays of a bucket in records, without its memory."""

    index: int
    members: tuple[int, ...]
    names: tuple[str, ...]
    nbytes: int


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together, and the memory for it.

    Attributes:
        index: its place in the order in which buckets are reduced.
        members: indices of its parameters, in ready order.
        buffer: all gradients, (numel,); empty for a sparse bucket.
        views: of `buffer`, one a parameter, with the parameter's shape and (where it is dense in memory) strides.
    """

    index: int
    members: list[int]
    names: list[str]
    parameters: list[nn.Parameter]
    sparse: bool
    buffer: Tensor
    views: list[Tensor] = field(default_factory=list)
    record: BucketRecord = field(default_factory=BucketRecord)

    @property
    def nbytes(self) -> int:
        if self.sparse:
            return sum(p.numel() * p.element_size() for p in self.parameters)
        return self.buffer.numel() * self.buffer.element_size()

    def facts(self) -> BucketFacts:
        return BucketFacts(self.index, tuple(self.members), tuple(self.names), self.nbytes)

    def describe(self) -> str:
        """For messages: its number and the names of its parameters."""
        shown = ", ".join(self.names[:_NAMES_SHOWN])
        rest = len(self.names) - _NAMES_SHOWN
        return f"bucket {self.index} ({shown}{f' and {rest} more' if rest > 0 else ''})"


def make_buckets(
    assignment: Sequence[Sequence[int]],
    specs: Sequence[ParameterSpec],
    parameters: Sequence[nn.Parameter],
) -> list[Bucket]:
    """Buckets of an assignment, with memory."""
    numbers = count()
    return [_make_bucket(next(numbers), members, specs, parameters) for members in assignment]


def _make_bucket(
    index: int,
    members: Sequence[int],
    specs: Sequence[ParameterSpec],
    parameters: Sequence[nn.Parameter],
) -> Bucket:
    chosen = [parameters[i] for i in members]
    sparse = specs[members[0]].sparse
    numel = 0 if sparse else sum(p.numel() for p in chosen)
    buffer = allocate_bucket(numel, *specs[members[0]].kind)
    bucket = Bucket(index, list(members), [specs[i].name for i in members], chosen, sparse, buffer)
    if not sparse:
        bucket.views = list(views_of(buffer, chosen))
    return bucket


def views_of(buffer: Tensor, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Consecutive parts of `buffer`, (numel,), shaped as the parameters."""
    begin = 0
    for p in parameters:
        part = buffer.narrow(0, begin, p.numel())
        begin += p.numel()
        # A gradient with other strides than its parameter's costs the optimizer its fast path.
        yield part.as_strided(p.size(), p.stride()) if _is_dense(p) else part.view(p.size())


def _is_dense(tensor: Tensor) -> bool:
    """Its elements fill a block of memory without gaps or overlaps, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


class GradBucket:
    """What a communication hook gets, with the methods of ``torch.distributed.GradBucket``.

    Complex gradients are shown as real ones with a last dim of two, so that hooks that cast keep imaginary parts.
    """

    def __init__(self, bucket: Bucket, num_buckets: int) -> None:
        self._bucket = bucket
        self._num_buckets = num_buckets
        is_complex = bucket.buffer.is_complex()
        self._buffer = torch.view_as_real(bucket.buffer).view(-1) if is_complex else bucket.buffer

    def index(self) -> int:
        """Of the bucket, in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """(numel,): this rank's gradients one after the other, not yet divided."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces what `buffer` returns."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The parts of the buffer, one a parameter."""
        if not self._bucket.buffer.is_complex():
            return list(views_of(self._buffer, self._bucket.parameters))
        real = [torch.view_as_real(p.detach()) for p in self._bucket.parameters]
        return list(views_of(self._buffer, real))

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """No bucket of this pass comes after it."""
        return self._bucket.index == self._num_buckets - 1
