"""What a rank's Triton kernels need of their group: memory that peers map, and the table that leads to it.

The layout of control memory, signals and epochs is that of the CUDA kernels (csrc/kernels/cuda/launch.h). Memory is
zero at first, and belongs to the group as long as one of its kernels may run, on any rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pycoll.triton_kernels import ring, signals
from pycoll.triton_kernels.launching import LaunchConfig
from pycoll.triton_kernels.storage import UNIT_BYTES

MAX_BLOCKS = 128
LINE_BYTES = 128
DIRECT_AREAS = 2
RING_SLOTS = int(ring.RING_SLOTS.value)
RECORD_WORDS = 8  # FailureRecord of csrc/kernels/cuda/failure.h
NO_TIMEOUT = 2**63 - 1

Allocate = Callable[[int], Tensor]


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class Layout:
    """How a rank's memory is divided; equal on all ranks.

    slot_bytes: of user data in a slot of the direct kernels and rings; a multiple of 16. mailbox_bytes: the most that
        one-shot takes; a multiple of 16.
    """

    world_size: int
    config: LaunchConfig = field(default_factory=LaunchConfig)
    slot_bytes: int = 64 << 10
    mailbox_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "mailbox_bytes"):
            nbytes = getattr(self, name)
            if nbytes < UNIT_BYTES or nbytes % UNIT_BYTES:
                raise ValueError(f"{name} is {nbytes}; give a positive multiple of {UNIT_BYTES}")

    def sizes(self) -> list[int]:
        """Bytes of each kind of memory, in the order of the table (signals.py), in whole lines."""
        n, blocks = self.world_size, self.config.num_blocks
        direct = DIRECT_AREAS * blocks * n * self.slot_bytes
        ring_bytes = blocks * RING_SLOTS * int(ring.MAX_WIDENING.value) * self.slot_bytes
        return [
            _lines(2 * n * int(signals.MEETING_BYTES.value)),
            _lines(8 * DIRECT_AREAS * MAX_BLOCKS * n),
            _lines(8 * 2 * MAX_BLOCKS),
            _lines(max(direct, ring_bytes)),
            _lines(2 * n * self.mailbox_bytes),
        ]

    def nbytes(self) -> int:
        return sum(self.sizes())

    @property
    def slot_units(self) -> int:
        return self.slot_bytes // UNIT_BYTES

    @property
    def mailbox_units(self) -> int:
        return self.mailbox_bytes // UNIT_BYTES


class TritonGroup:
    """A rank of a group of Triton kernels.

    Kernels of a group run one after another on each rank (one stream, or streams ordered by events), in the same order
    on all ranks. Ranks that share a GPU need room for all their programs at once.

    Args:
        rank: this rank.
        layout: how every rank's memory is divided.
        addresses: where this rank sees the memory of each rank; ``layout.nbytes()`` of it, aligned to 128 bytes, zero.
        device: of the tensors that kernels work on.
        timeout_s: of each wait in a kernel. None: for ever.
        allocate: makes zeros, as uint8, in memory that this rank's kernels reach; None: torch does.
        keep: kept alive as long as the group.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        addresses: Sequence[int],
        device: torch.device,
        *,
        timeout_s: float | None = 600.0,
        allocate: Allocate | None = None,
        keep: Any = None,
    ) -> None:
        if len(addresses) != layout.world_size or not 0 <= rank < layout.world_size:
            raise ValueError(
                f"rank is {rank} and addresses has {len(addresses)} entries, but layout is for "
                f"{layout.world_size} ranks; give one address for each rank"
            )
        if any(address % LINE_BYTES for address in addresses):
            raise ValueError(f"addresses are {list(addresses)}; align them to {LINE_BYTES} bytes")
        self.rank, self.layout, self.device = rank, layout, device
        self.world_size = layout.world_size
        self._keep = keep
        self._allocate = allocate or self._zeros
        pinned = device.type == "cuda" and allocate is None
        record_bytes = 4 * RECORD_WORDS
        self.record = (
            torch.zeros(record_bytes, dtype=torch.uint8, pin_memory=True)
            if pinned
            else self._allocate(record_bytes)
        ).view(torch.int32)
        self.epochs = self._allocate(4 * MAX_BLOCKS).view(torch.int32)
        self.abort_word = self._allocate(4).view(torch.int32)
        self.table = self._make_table(addresses, timeout_s)
        self._chunk_tables: dict[tuple[int, ...], Tensor] = {}

    def _zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _to_device(self, values: Sequence[int]) -> Tensor:
        tensor = self._allocate(8 * len(values)).view(torch.int64)
        return tensor.copy_(torch.tensor(values, dtype=torch.int64))

    def _make_table(self, addresses: Sequence[int], timeout_s: float | None) -> Tensor:
        timeout_ns = NO_TIMEOUT if timeout_s is None else int(timeout_s * 1e9)
        own = [self.epochs.data_ptr(), self.abort_word.data_ptr(), self.record.data_ptr()]
        values = [self.rank, self.world_size, timeout_ns, *own, 0, 0]
        offset = 0
        for nbytes in self.layout.sizes():
            values += [address + offset for address in addresses]
            offset += nbytes
        return self._to_device(values)

    @classmethod
    def of_process_group(
        cls,
        process_group: Any = None,
        device: torch.device | str = "cuda",
        *,
        config: LaunchConfig | None = None,
        slot_bytes: int = 64 << 10,
        mailbox_bytes: int = 256 << 10,
        timeout_s: float | None = 600.0,
    ) -> TritonGroup:
        """A group over torch's symmetric memory of `device`; collective.

        Args:
            process_group: of torch.distributed; None: the default group.
            device: this rank's. "cpu" is for Triton's interpreter.

        Raises:
            ValueError: sizes that do not fit; the system has no symmetric memory for the device.
        """
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        process_group = dist.group.WORLD if process_group is None else process_group
        layout = Layout(process_group.size(), config or LaunchConfig(), slot_bytes, mailbox_bytes)
        memory = symm_mem.empty(layout.nbytes(), dtype=torch.uint8, device=torch.device(device))
        handle = symm_mem.rendezvous(memory, process_group)
        memory.zero_()
        handle.barrier()
        return cls(
            process_group.rank(),
            layout,
            [int(pointer) for pointer in handle.buffer_ptrs],
            memory.device,
            timeout_s=timeout_s,
            keep=(memory, handle),
        )

    def chunk_table(self, numels: Sequence[int]) -> Tensor:
        """First element and number of elements of each rank's chunk, where kernels find them; kept for the next
        call."""
        key = tuple(numels)
        if key not in self._chunk_tables:
            begins = [sum(key[:i]) for i in range(len(key))]
            self._chunk_tables[key] = self._to_device([*begins, *key])
        return self._chunk_tables[key]

    def abort(self) -> None:
        """Kernels of this rank that wait, and all later ones, return; outputs are undefined then."""
        self.abort_word.fill_(1)

    def check(self) -> None:
        """After the kernels have ended.

        Raises:
            torch.distributed.DistBackendError: a wait has taken longer than the deadline, another rank has called
            something
                else (the message names it), or the group was aborted.
        """
        import torch.distributed as dist

        kind, phase, rank, peer = (int(word) for word in self.record[:4])
        expected, seen = (int(word) for word in self.record.view(torch.int64)[2:4])
        if kind == int(signals.DEADLINE.value):
            raise dist.DistBackendError(
                f"rank {rank} waited in vain for rank {peer} ({signals.PHASES[phase]}): expected "
                f"{expected:#x}, seen {seen:#x}; the group is used up, make another one"
            )
        if kind == int(signals.MISMATCH.value):
            raise dist.DistBackendError(
                f"rank {peer} does not call what rank {rank} calls (fingerprints {seen:#x} and "
                f"{expected:#x}); give all ranks the same operation, op, dtype and sizes. The group "
                "is used up, make another one"
            )
        if int(self.abort_word[0]) != 0:
            raise dist.DistBackendError("the group was aborted; make another one")


def fingerprint(*what: Any) -> int:
    """What all ranks must agree on, in 64 bits with a sign."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
