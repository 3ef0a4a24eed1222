"""One rank's view of a case: its tensors, what they must hold afterwards, and the comparison.

Nothing here communicates. `build_trial` lays out guarded tensors and asks `pycoll.reference` what
they must hold; something else runs the collective; `verify` compares bit for bit. Output tensors
start as the complement of what is expected, so that an element that is not written is always seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from case_data import contribution, premul_factors, uneven_numel
from generator import Case
from torch import Tensor

from pycoll import reference
from pycoll.testing import check_guards, guarded

# Coalesced forms move these along with the tensor of the case's own numel.
COALESCED_COMPANIONS = (0, 7)


@dataclass
class Trial:
    """What one rank passes to one collective.

    rank: in the case's group. root: of a rooted collective, in the group.
    factor: this rank's, of premul_sum. input_splits, output_splits: of an uneven tensor.
    inputs: read only. outputs: written to, or read and written where the collective is in place.
    expected: for each output, contiguous.
    kept: tensors whose bits must not change, each with a copy of them.
    buffers: tensors made by `guarded`, whose surroundings must not change.
    """

    case: Case
    rank: int
    root: int = 0
    factor: float | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return len(self.case.members)

    def add_input(self, values: Tensor) -> None:
        tensor = place(values, self.case.layout)
        self.inputs.append(tensor)
        self.kept.append((tensor, values))
        self.buffers.append(tensor)

    def add_output(self, expected: Tensor, start: Tensor | None = None) -> None:
        """start: what it holds before; the complement of `expected` unless given."""
        values = complement(expected) if start is None else start
        tensor = place(values, self.case.layout)
        self.outputs.append(tensor)
        self.expected.append(expected)
        self.buffers.append(tensor)


class Contributions:
    """The data of all ranks of one case, in the shape that its layout wants."""

    def __init__(self, case: Case, salt: int, exact: bool) -> None:
        self.case = case
        self.salt = salt
        self.exact = exact
        self.world_size = len(case.members)
        has_factors = case.op == "premul_sum"
        self.factors = premul_factors(self.world_size, exact=exact) if has_factors else None

    def reduced(self, rows: list[Tensor]) -> Tensor:
        return reference.reduce_ranks(rows, self.case.op, factor=self.factors)

    def of(self, rank: int, numel: int, part: int = 0) -> Tensor:
        """`part` tells apart the tensors of one call."""
        shape = shape_for(self.case.layout, numel)
        expanded = self.case.layout == "expanded"
        values = contribution(
            self.case.torch_dtype,
            self.case.op,
            shape[0] if expanded else math.prod(shape),
            rank=rank,
            world_size=self.world_size,
            salt=100 * self.salt + part,
            exact=self.exact,
        )
        return values.unsqueeze(1).expand(shape) if expanded else values.reshape(shape)

    def of_all(self, numel: int, part: int = 0) -> list[Tensor]:
        return [self.of(rank, numel, part) for rank in range(self.world_size)]

    def chunk(self, src: int, dst: int, numel: int, part: int = 0) -> Tensor:
        """What `src` has for `dst`, where every rank has a tensor for every rank."""
        return self.of(src, numel, part * self.world_size + dst)

    def sent(self, rank: int, numel: int, part: int = 0) -> list[Tensor]:
        """What `rank` has for each rank."""
        return [self.chunk(rank, dst, numel, part) for dst in range(self.world_size)]

    def meant(self, rank: int, numel: int, part: int = 0) -> list[Tensor]:
        """What each rank has for `rank`."""
        return [self.chunk(src, rank, numel, part) for src in range(self.world_size)]

    def numels(self) -> tuple[int, ...]:
        return (self.case.num_elements, *COALESCED_COMPANIONS)


def build_trial(case: Case, rank: int, *, root: int = 0, salt: int = 0, exact: bool) -> Trial:
    """The trial of `rank` (in the case's group). exact: which kind of data, see `case_data`."""
    data = Contributions(case, salt, exact)
    trial = Trial(case, rank, root, data.factors[rank] if data.factors else None)
    _BUILDERS[case.form](trial, data)
    return trial


def verify(trial: Trial) -> None:
    """Raise AssertionError unless every byte that the trial speaks of is what it must be."""
    moved = trial.case.op == "none"
    for index, (actual, expected) in enumerate(zip(trial.outputs, trial.expected, strict=True)):
        what = f"output {index} of rank {trial.rank} (root {trial.root})"
        assert_same_bits(actual, expected, what, nan_payload=moved)
    for index, (tensor, before) in enumerate(trial.kept):
        assert_same_bits(tensor, before, f"read-only tensor {index} of rank {trial.rank}")
    for buffer in trial.buffers:
        check_guards(buffer)


def assert_same_bits(
    actual: Tensor, expected: Tensor, what: str = "tensor", *, nan_payload: bool = True
) -> None:
    """Compare byte by byte. nan_payload: whether two NaN with different bits differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {tuple(actual.shape)} {actual.dtype} instead of "
            f"{tuple(expected.shape)} {expected.dtype}"
        )
    actual_bytes, expected_bytes = _byte_rows(actual), _byte_rows(expected)
    if torch.equal(actual_bytes, expected_bytes):
        return
    different = (actual_bytes != expected_bytes).any(dim=1)
    if not nan_payload:
        different &= ~(_is_nan(actual) & _is_nan(expected))
    wrong = torch.nonzero(different).flatten()
    if wrong.numel():
        flat_actual, flat_expected = actual.reshape(-1), expected.reshape(-1)
        if actual.is_complex():
            flat_actual = torch.view_as_real(flat_actual).reshape(-1)
            flat_expected = torch.view_as_real(flat_expected).reshape(-1)
        first, last = int(wrong[0]), int(wrong[-1])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {different.numel()} elements differ, the first at {first} "
            f"({flat_actual[first].item()} instead of {flat_expected[first].item()}), "
            f"the last at {last} "
            f"({flat_actual[last].item()} instead of {flat_expected[last].item()})"
        )


def shape_for(layout: str, numel: int) -> tuple[int, ...]:
    """The shape of a tensor of about `numel` elements; two dims need a multiple of three."""
    if layout == "zero_dim":
        return ()
    if layout in ("transposed", "expanded"):
        return (-(-numel // 3), 3)
    return (numel,)


def place(values: Tensor, layout: str) -> Tensor:
    """A guarded copy of `values` in memory as `layout` says.

    Expanded is for what `Contributions` made so; other tensors of such a case are contiguous.
    """
    itemsize = values.element_size()
    if layout == "transposed":
        return guarded(values, strides=(1, values.shape[0]))
    if layout == "strided":
        return guarded(values, strides=(2,), offset_bytes=itemsize)
    if layout in ("offset", "zero_dim"):
        return guarded(values, offset_bytes=3 * itemsize)
    if layout == "expanded" and values.stride()[1] == 0:
        return guarded(values, strides=(1, 0))
    return guarded(values)


def joined(chunks: Sequence[Tensor]) -> Tensor:
    """Concatenated along dim 0, and still expanded if the chunks are."""
    if chunks[0].dim() == 0:
        return torch.stack(list(chunks))
    if chunks[0].dim() == 2 and chunks[0].stride(1) == 0:
        return torch.cat([chunk[:, :1] for chunk in chunks]).expand(-1, chunks[0].shape[1])
    return torch.cat(list(chunks))


def complement(values: Tensor) -> Tensor:
    """A tensor that differs from `values` in every element."""
    if values.dtype == torch.bool:
        return ~values
    flat = _dense(values.reshape(-1))
    return (~flat.view(torch.uint8)).view(values.dtype).reshape(values.shape)


def _dense(flat: Tensor) -> Tensor:
    # `contiguous` would leave any stride to a vector of one element, which then has no bytes view.
    return flat.clone(memory_format=torch.contiguous_format)


def _byte_rows(tensor: Tensor) -> Tensor:
    """One row of bytes for each element; for each part of a complex one."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return _dense(flat).view(torch.uint8).reshape(-1, flat.element_size())


def _is_nan(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.is_floating_point():
        return torch.zeros(flat.shape, dtype=torch.bool)
    return flat.to(torch.float64).isnan()


def _all_reduce(trial: Trial, data: Contributions, numels: Sequence[int]) -> None:
    for part, numel in enumerate(numels):
        rows = data.of_all(numel, part)
        trial.add_output(data.reduced(rows), start=rows[trial.rank])


def _reduce(trial: Trial, data: Contributions) -> None:
    rows = data.of_all(trial.case.num_elements)
    if trial.rank == trial.root:
        trial.add_output(data.reduced(rows), start=rows[trial.rank])
    else:
        trial.add_input(rows[trial.rank])


def _reduce_scatter(trial: Trial, data: Contributions) -> None:
    for values in data.sent(trial.rank, trial.case.num_elements):
        trial.add_input(values)
    trial.add_output(data.reduced(data.meant(trial.rank, trial.case.num_elements)))


def _reduce_scatter_uneven(trial: Trial, data: Contributions) -> None:
    numels = [uneven_numel(trial.case.num_elements, dst) for dst in range(trial.world_size)]
    for dst, numel in enumerate(numels):
        trial.add_input(data.chunk(trial.rank, dst, numel))
    trial.add_output(data.reduced(data.meant(trial.rank, numels[trial.rank])))


def _reduce_scatter_tensor(trial: Trial, data: Contributions, numels: Sequence[int]) -> None:
    for part, numel in enumerate(numels):
        trial.add_input(joined(data.sent(trial.rank, numel, part)))
        trial.add_output(data.reduced(data.meant(trial.rank, numel, part)))


def _reduce_scatter_in_place(trial: Trial, data: Contributions) -> None:
    numel = trial.case.num_elements
    trial.add_input(joined(data.sent(trial.rank, numel)))
    (tensor,), ((_, before),) = trial.inputs, trial.kept
    chunk = tensor.shape[0] // trial.world_size
    rows = [slice(i * chunk, (i + 1) * chunk) for i in range(trial.world_size)]
    trial.outputs.append(tensor[rows[trial.rank]])
    trial.expected.append(data.reduced(data.meant(trial.rank, numel)))
    others = [row for i, row in enumerate(rows) if i != trial.rank]
    trial.kept = [(tensor[row], before[row]) for row in others]


def _all_gather(trial: Trial, data: Contributions, numels: Sequence[int]) -> None:
    columns = [data.of_all(numel, part) for part, numel in enumerate(numels)]
    for column in columns:
        trial.add_input(column[trial.rank])
    for rank in range(trial.world_size):
        for column in columns:
            trial.add_output(reference.all_gather(column)[trial.rank][rank])


def _all_gather_uneven(trial: Trial, data: Contributions) -> None:
    numel = trial.case.num_elements
    rows = [data.of(rank, uneven_numel(numel, rank)) for rank in range(trial.world_size)]
    trial.add_input(rows[trial.rank])
    for gathered in reference.all_gather(rows)[trial.rank]:
        trial.add_output(gathered)


def _all_gather_into_tensor(trial: Trial, data: Contributions, numels: Sequence[int]) -> None:
    for part, numel in enumerate(numels):
        rows = data.of_all(numel, part)
        trial.add_input(rows[trial.rank])
        trial.add_output(reference.all_gather_into_tensor(rows)[trial.rank])


def _all_gather_in_place(trial: Trial, data: Contributions) -> None:
    rows = data.of_all(trial.case.num_elements)
    trial.add_output(reference.all_gather_into_tensor(rows)[trial.rank])
    chunk = rows[0].shape[0]
    own = trial.outputs[0][trial.rank * chunk : (trial.rank + 1) * chunk]
    own.copy_(rows[trial.rank])
    trial.inputs.append(own)


def _broadcast(trial: Trial, data: Contributions) -> None:
    rows = data.of_all(trial.case.num_elements)
    trial.add_output(reference.broadcast(rows, trial.root)[trial.rank], start=rows[trial.rank])


def _gather(trial: Trial, data: Contributions) -> None:
    rows = data.of_all(trial.case.num_elements)
    trial.add_input(rows[trial.rank])
    for gathered in reference.gather(rows, trial.root)[trial.rank] or ():
        trial.add_output(gathered)


def _scatter(trial: Trial, data: Contributions) -> None:
    rows: list[list[Tensor] | None] = [None] * trial.world_size
    rows[trial.root] = sent = data.sent(trial.root, trial.case.num_elements)
    for values in sent if trial.rank == trial.root else ():
        trial.add_input(values)
    trial.add_output(reference.scatter(rows, trial.root)[trial.rank])


def _all_to_all(trial: Trial, data: Contributions, *, uneven: bool, single: bool) -> None:
    rank, n = trial.rank, trial.world_size

    def chunk(src: int, dst: int) -> Tensor:
        numel = trial.case.num_elements
        return data.chunk(src, dst, uneven_numel(numel, src + 2 * dst) if uneven else numel)

    sent = [chunk(rank, dst) for dst in range(n)]
    received = [chunk(src, rank) for src in range(n)]
    if not single:
        for values in sent:
            trial.add_input(values)
        for values in received:
            trial.add_output(values.clone(memory_format=torch.contiguous_format))
        return
    trial.add_input(joined(sent))
    trial.add_output(joined(received).clone(memory_format=torch.contiguous_format))
    if uneven:
        trial.input_splits = [values.shape[0] for values in sent]
        trial.output_splits = [values.shape[0] for values in received]


def _send_recv(trial: Trial, data: Contributions) -> None:
    rows = data.of_all(trial.case.num_elements)
    trial.add_input(rows[trial.rank])
    trial.add_output(rows[(trial.rank - 1) % trial.world_size].clone())


Builder = Callable[[Trial, Contributions], None]


def _single(build: Callable[[Trial, Contributions, Sequence[int]], None]) -> Builder:
    return lambda trial, data: build(trial, data, data.numels()[:1])


def _coalesced(build: Callable[[Trial, Contributions, Sequence[int]], None]) -> Builder:
    return lambda trial, data: build(trial, data, data.numels())


_BUILDERS: dict[str, Builder] = {
    "all_reduce": _single(_all_reduce),
    "all_reduce_coalesced": _coalesced(_all_reduce),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_uneven": _reduce_scatter_uneven,
    "reduce_scatter_tensor": _single(_reduce_scatter_tensor),
    "reduce_scatter_tensor_in_place": _reduce_scatter_in_place,
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter_tensor),
    "all_gather": _single(_all_gather),
    "all_gather_uneven": _all_gather_uneven,
    "all_gather_coalesced": _coalesced(_all_gather),
    "all_gather_into_tensor": _single(_all_gather_into_tensor),
    "all_gather_into_tensor_in_place": _all_gather_in_place,
    "all_gather_into_tensor_coalesced": _coalesced(_all_gather_into_tensor),
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": partial(_all_to_all, uneven=False, single=False),
    "all_to_all_uneven": partial(_all_to_all, uneven=True, single=False),
    "all_to_all_single": partial(_all_to_all, uneven=False, single=True),
    "all_to_all_single_uneven": partial(_all_to_all, uneven=True, single=True),
    "send_recv": _send_recv,
}
