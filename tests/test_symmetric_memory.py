"""torch's symmetric memory on CPU tensors: torch.distributed._symmetric_memory and torch.ops.symm_mem."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from case_data import contribution
from case_runner import BACKEND
from checker import assert_same_bits
from errors import text_of
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

import pycoll
from pycoll import backend, reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

pytestmark = pytest.mark.skipif(BACKEND != "pycoll", reason="memory of pycoll")

NUMEL = 1009


def pattern(numel: int, rank: int, salt: int = 0) -> Tensor:
    return ((torch.arange(numel) * 7 + rank * 13 + salt * 5) % 251).float()


def symmetric(numel: int = NUMEL, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = symm_mem.empty(numel, dtype=dtype, device="cpu")
    return tensor.copy_(pattern(numel, dist.get_rank(), salt))


# --- buffers ---------------------------------------------------------------------------------------


def read_and_write_buffers() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = symmetric()
    assert symm_mem.is_symm_mem_tensor(tensor)
    assert not symm_mem.is_symm_mem_tensor(torch.ones(3))
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert (handle.rank, handle.world_size) == (rank, n)
    assert handle.buffer_size == 4 * NUMEL
    assert symm_mem.rendezvous(tensor, dist.group.WORLD) is not None
    handle.barrier()
    for peer in range(n):
        assert_same_bits(handle.get_buffer(peer, (NUMEL,), torch.float32), pattern(NUMEL, peer))
        part = handle.get_buffer(peer, (3, 7), torch.float32, 11)
        assert_same_bits(part.flatten(), pattern(NUMEL, peer)[11:32])
    handle.barrier()
    # Each writes one element of everybody's buffer.
    for peer in range(n):
        handle.get_buffer(peer, (NUMEL,), torch.float32)[rank] = 1000.0 * rank + peer
    handle.barrier()
    expected = pattern(NUMEL, rank)
    expected[:n] = torch.tensor([1000.0 * r + rank for r in range(n)])
    assert_same_bits(tensor, expected)


def meet_at_an_offset() -> None:
    """Of a tensor that begins inside an allocation."""
    whole = symmetric()
    part = whole[64:]
    handle = symm_mem.rendezvous(part, dist.group.WORLD)
    handle.barrier()
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    remote = handle.get_remote_tensor(peer, (7,), torch.float32)
    begin = handle.offset // 4
    assert_same_bits(remote, pattern(NUMEL, peer)[begin : begin + 7])
    handle.barrier()


def meet_in_several_groups() -> None:
    rank = dist.get_rank()
    low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
    tensor = symmetric()
    for members, group in (([0, 1], low), ([1, 2], high), ([0, 1, 2], dist.group.WORLD)):
        if rank not in members:
            continue
        handle = symm_mem.rendezvous(tensor, group)
        assert handle.world_size == len(members)
        handle.barrier(channel=3)
        for index, member in enumerate(members):
            assert_same_bits(
                handle.get_buffer(index, (NUMEL,), torch.float32), pattern(NUMEL, member)
            )
        handle.barrier(channel=3)
    for group in (low, high):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def allocate_persistently() -> None:
    def make() -> Tensor:
        return _SymmetricMemory.empty_strided_p2p(
            (NUMEL,), (1,), torch.float32, torch.device("cpu"), dist.group.WORLD.group_name, 42
        )

    tensor = make()
    address = tensor.data_ptr()
    tensor.copy_(pattern(NUMEL, dist.get_rank()))
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    handle.barrier()
    assert "active" in text_of(make)
    del tensor
    tensor = make()
    assert tensor.data_ptr() == address
    assert_same_bits(tensor, pattern(NUMEL, dist.get_rank()))
    symm_mem.rendezvous(tensor, dist.group.WORLD).barrier()


def free_and_make_again() -> None:
    """Of a freed tensor no handle is left that a new one at the same place could get."""
    for salt in range(5):
        tensor = symmetric(NUMEL + salt, salt)
        handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
        handle.barrier()
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        seen = handle.get_buffer(peer, (NUMEL + salt,), torch.float32).clone()
        assert_same_bits(seen, pattern(NUMEL + salt, peer, salt))
        handle.barrier()
        del handle, tensor


def keep_a_block_by_its_handle() -> None:
    """What a handle shows is not given to another tensor while it lives, and is given back after it."""
    n = dist.get_world_size()
    tensor = symmetric()
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    views = [handle.get_buffer(peer, (NUMEL,), torch.float32) for peer in range(n)]
    in_use = pycoll.shared_memory_stats()["bytes_in_use"]
    del tensor
    later = [symm_mem.empty(NUMEL, device="cpu").fill_(-1.0) for _ in range(3)]
    dist.barrier()
    for peer in range(n):
        assert_same_bits(views[peer], pattern(NUMEL, peer))
    handle.barrier()
    del views, later
    assert pycoll.shared_memory_stats()["bytes_in_use"] == in_use
    del handle
    assert pycoll.shared_memory_stats()["bytes_in_use"] < in_use


@pytest.mark.parametrize(
    "fn",
    [
        read_and_write_buffers,
        meet_at_an_offset,
        meet_in_several_groups,
        allocate_persistently,
        free_and_make_again,
        keep_a_block_by_its_handle,
    ],
    ids=lambda fn: fn.__name__,
)
def test_buffers(pool: Pools, fn: Callable[[], None]) -> None:
    assert pool(3).run(fn) == [None] * 3


# --- signals ---------------------------------------------------------------------------------------


def pass_signals_around() -> None:
    """What was written before a signal is seen after it; the pad is zero again at the end."""
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = symm_mem.empty(NUMEL, dtype=torch.float32, device="cpu").zero_()
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    after, before = (rank + 1) % n, (rank - 1) % n
    for turn in range(200):
        channel = turn % 2
        handle.get_buffer(after, (NUMEL,), torch.float32).fill_(turn * 10 + rank)
        handle.put_signal(after, channel=channel)
        handle.wait_signal(before, channel=channel)
        assert (tensor == turn * 10 + before).all()
        handle.barrier(channel=2)
    assert not handle.get_signal_pad(rank).any()


def refuse_wrong_arguments() -> dict[str, str]:
    rank = dist.get_rank()
    tensor = symmetric()
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    texts = {
        "rank": text_of(lambda: handle.put_signal(7)),
        "channel": text_of(lambda: handle.barrier(channel=1 << 20)),
        "negative": text_of(lambda: handle.wait_signal(0, channel=-1)),
        "late": text_of(lambda: handle.wait_signal(1 - rank, channel=5, timeout_ms=200)),
    }
    uneven = symmetric(NUMEL + rank)
    texts["uneven"] = text_of(lambda: symm_mem.rendezvous(uneven, dist.group.WORLD))
    plain = symmetric() if rank == 0 else None
    if rank == 1:
        del plain
    handle.barrier()
    return texts


def leave_a_barrier_alone() -> tuple[str, list[str]]:
    """One rank gives up a barrier; after that none on its channel may end as if all had come."""
    handle = symm_mem.rendezvous(symmetric(), dist.group.WORLD)
    handle.barrier(channel=3)
    first = ""
    if dist.get_rank() == 1:
        first = text_of(lambda: handle.barrier(channel=3, timeout_ms=100))
    dist.barrier()
    texts = [text_of(lambda: handle.barrier(channel=3, timeout_ms=5000)) for _ in range(2)]
    handle.barrier(channel=4)
    handle = symm_mem.rendezvous(symmetric(), dist.group.WORLD)
    handle.barrier(channel=3)
    return first, texts


def signal_from_a_child() -> str:
    handle = symm_mem.rendezvous(symmetric(), dist.group.WORLD)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = text_of(lambda: handle.put_signal(1 - dist.get_rank()))
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        text = stream.read()
    handle.barrier()
    return text


def test_signals(pool: Pools) -> None:
    assert pool(3).run(pass_signals_around) == [None] * 3


def test_a_failed_barrier_breaks_its_channel(pool: Pools) -> None:
    for rank, (first, texts) in enumerate(pool(3).run(leave_a_barrier_alone)):
        assert ("Timed out waiting for the signal" in first) == (rank == 1)
        for text in texts:
            assert "channel 3 of this symmetric memory is broken" in text


def test_a_forked_child_cannot_signal(pool: Pools) -> None:
    for text in pool(2).run(signal_from_a_child):
        assert "a forked child cannot use it" in text


def test_what_is_wrong_is_said(pool: Pools) -> None:
    for rank, texts in enumerate(pool(2).run(refuse_wrong_arguments)):
        assert "dst_rank is 7, but the group has the ranks 0 to 1" in texts["rank"]
        assert "channel is 1048576" in texts["channel"]
        assert "channel is -1" in texts["negative"]
        assert f"Timed out waiting for the signal of rank {1 - rank} on channel 5" in texts["late"]
        assert "ValueError" in texts["uneven"]
        assert "the allocation is 4036 bytes on rank 0 and 4040 on rank 1" in texts["uneven"]


# --- operators -------------------------------------------------------------------------------------

NAME = "all_reduce"
OPERATORS: dict[str, Callable[[Tensor, Tensor, str, str], Tensor]] = {
    "multimem_all_reduce_": lambda x, out, op, g: torch.ops.symm_mem.multimem_all_reduce_(x, op, g),
    "multimem_one_shot_all_reduce": lambda x, out, op, g: (
        torch.ops.symm_mem.multimem_one_shot_all_reduce(x, op, g)
    ),
    "multimem_one_shot_all_reduce_out": lambda x, out, op, g: (
        torch.ops.symm_mem.multimem_one_shot_all_reduce_out(x, op, g, out)
    ),
    "one_shot_all_reduce": lambda x, out, op, g: torch.ops.symm_mem.one_shot_all_reduce(x, op, g),
    "one_shot_all_reduce_out": lambda x, out, op, g: torch.ops.symm_mem.one_shot_all_reduce_out(
        x, op, g, out
    ),
    "one_shot_all_reduce_copy": lambda x, out, op, g: torch.ops.symm_mem.one_shot_all_reduce_copy(
        torch.empty_like(x), x, op, g
    ),
    "one_shot_all_reduce_copy_out": lambda x, out, op, g: (
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(torch.empty_like(x), x, op, g, out)
    ),
    "two_shot_all_reduce_": lambda x, out, op, g: torch.ops.symm_mem.two_shot_all_reduce_(x, op, g),
    "two_shot_all_reduce_out": lambda x, out, op, g: torch.ops.symm_mem.two_shot_all_reduce_out(
        x, op, g, out
    ),
}
IN_PLACE = ("multimem_all_reduce_", "two_shot_all_reduce_")


def run_operators(dtype: torch.dtype, op: str) -> dict[str, str]:
    """The path that each operator took, once its result has been compared."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    taken = {}
    for numel in (5, 70001):
        rows = [contribution(dtype, op, numel, rank=r, world_size=n, salt=3) for r in range(n)]
        expected = reference.reduce_ranks(rows, op)
        for name, call in OPERATORS.items():
            x = symm_mem.empty(numel, dtype=dtype, device="cpu").copy_(rows[rank])
            out = symm_mem.empty(numel, dtype=dtype, device="cpu").zero_()
            result = call(x, out, op, group)
            assert_same_bits(result, expected, f"{name} of {numel}")
            if name not in IN_PLACE:
                assert_same_bits(x, rows[rank], f"input of {name}")
            taken[name] = backend.events()[-1]["memory_path"]
    return taken


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_operators(pool: Pools, dtype: torch.dtype, op: str) -> None:
    for taken in pool(2).run(run_operators, dtype, op):
        copies = [name for name, path in taken.items() if path != "mapped"]
        # Their buffer is a plain one here.
        assert copies == ["one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out"]


def refuse_an_operator() -> tuple[str, str]:
    group = dist.group.WORLD.group_name
    x = symmetric()
    op = "sum" if dist.get_rank() == 0 else "max"
    text = text_of(lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, op, group))
    dist.all_reduce(x)
    return text, str(x[1].item())


def refuse_a_buffer() -> str:
    """That of one rank is too small."""
    group = dist.group.WORLD.group_name
    x = torch.ones(NUMEL)
    buffer = symm_mem.empty(NUMEL - dist.get_rank(), device="cpu")
    text = text_of(lambda: torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group))
    dist.all_reduce(x)
    assert (x == 2).all()
    return text


def test_no_operator_has_a_type_of_its_own() -> None:
    """Builds of torch for CUDA have kernels with C++ types, and end the program where ours have others."""
    backend.extension()
    for name in OPERATORS:
        kernels = torch._C._dispatch_dump(f"symm_mem::{name}").splitlines()
        (ours,) = (line for line in kernels if line.startswith("CPU: "))
        assert ours.endswith("[ boxed ]")


def test_a_refused_buffer_is_told_to_all(pool: Pools) -> None:
    waiting, refused = pool(2).run(refuse_a_buffer)
    assert "symm_buffer has 1008 elements" in refused
    assert "local_input 1009" in refused
    assert "rank 1 refused its arguments" in waiting
    assert "symm_buffer has 1008 elements" in waiting


def test_a_refused_operator_leaves_the_group_usable(pool: Pools) -> None:
    (mine, first), (refused, second) = pool(2).run(refuse_an_operator)
    assert "reduce_op is 'max'" in refused
    assert "rank 1 refused its arguments" in mine
    assert first == second == str(float(7 + 20))


# --- the backend's own allocation ------------------------------------------------------------------


def allocate_from_the_backend() -> Any:
    device = torch.device("cpu")
    own = dist.group.WORLD._get_backend(device)
    assert own.supports_tensor_alloc(device)
    tensor = own.allocate_tensor(70001, dtype=torch.bfloat16, device=device)
    assert tensor.shape == (70001,)
    assert tensor.dtype == torch.bfloat16
    tensor.fill_(dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert (tensor == 3.0).all()
    return backend.events()[-1]["memory_path"]


def test_allocate_tensor_gives_mapped_memory(pool: Pools) -> None:
    assert pool(2).run(allocate_from_the_backend) == ["mapped"] * 2
