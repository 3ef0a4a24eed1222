"""send, recv and their asynchronous forms: sizes, tags, order, any source, both sides sending first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pycoll.testing import RankPool
from pycoll.testing.guards import check_guards, guarded

Pool = Callable[[int], RankPool]
# Empty, one byte, in the line, eager, the last eager one and the first rendezvous, long.
SIZES = [0, 1, 7, 1021, 16384, 16385, 1_000_003]


def content(numel: int, sender: int, salt: int = 0) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + sender * 13 + salt * 29) % 251).to(torch.uint8)


def exchange(numel: int, receive_first: bool) -> bool:
    """Both sides post both; the results do not depend on the order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    got = guarded(torch.empty(numel, dtype=torch.uint8), offset_bytes=3)
    calls: list[Callable[[], dist.Work | None]] = [
        lambda: dist.isend(content(numel, rank), right),
        lambda: dist.irecv(got, left),
    ]
    for work in [call() for call in (reversed(calls) if receive_first else calls)]:
        assert work is not None
        work.wait()
    assert torch.equal(got, content(numel, left))
    check_guards(got)
    return True


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize("numel", [*SIZES, 8_000_009])
def test_everybody_sends_around_a_ring(pool: Pool, numel: int, receive_first: bool) -> None:
    for world_size in (2, 4):
        assert all(pool(world_size).run(exchange, numel, receive_first))


def blocking_sends_below_the_limit() -> bool:
    """send() of an eager message returns before its recv(): both sides may send first."""
    rank = dist.get_rank()
    for numel in (1, 16384):
        dist.send(content(numel, rank), 1 - rank)
        got = torch.empty(numel, dtype=torch.uint8)
        assert dist.recv(got, 1 - rank) == 1 - rank
        assert torch.equal(got, content(numel, 1 - rank))
    return True


def test_both_sides_send_first_with_blocking_calls(pool: Pool) -> None:
    assert all(pool(2).run(blocking_sends_below_the_limit))


def tags() -> bool:
    rank = dist.get_rank()
    for numel in SIZES:
        if rank == 0:
            works = [dist.isend(content(numel, 0, tag), 1, tag=tag) for tag in (1, 2, 3)]
            for work in works:
                work.wait()
        else:
            for tag in (3, 1, 2):
                got = torch.empty(numel, dtype=torch.uint8)
                dist.recv(got, 0, tag=tag)
                assert torch.equal(got, content(numel, 0, tag)), (numel, tag)
    return True


def test_tags_match_whatever_the_order(pool: Pool) -> None:
    assert all(pool(2).run(tags))


def any_source() -> list[int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    sources = []
    if rank == 0:
        for numel in (5, 50_021):
            for _ in range(n - 1):
                got = torch.empty(numel, dtype=torch.uint8)
                source = dist.recv(got)
                assert torch.equal(got, content(numel, source))
                sources.append(source)
            dist.barrier()
    else:
        for numel in (5, 50_021):
            dist.send(content(numel, rank), 0)
            dist.barrier()
    return sources


def test_receive_from_any_source(pool: Pool) -> None:
    sources = pool(4).run(any_source)[0]
    assert sorted(sources[:3]) == [1, 2, 3]
    assert sorted(sources[3:]) == [1, 2, 3]


def same_tag_keeps_its_order(count: int) -> bool:
    sizes = [SIZES[(3 * i) % 6] for i in range(count)]
    if dist.get_rank() == 0:
        works = [dist.isend(content(numel, 0, i), 1) for i, numel in enumerate(sizes)]
        for work in works:
            work.wait()
    else:
        received = [torch.empty(numel, dtype=torch.uint8) for numel in sizes]
        for work in reversed([dist.irecv(got, 0) for got in received]):
            work.wait()
        for i, got in enumerate(received):
            assert torch.equal(got, content(sizes[i], 0, i)), i
    return True


def test_messages_of_one_tag_keep_their_order(pool: Pool) -> None:
    assert all(pool(2).run(same_tag_keeps_its_order, 100))


def strided_and_mixed() -> bool:
    rank = dist.get_rank()
    base = torch.full((50, 40), -1.0)
    if rank == 0:
        column = torch.arange(2000.0).view(40, 50).t()
        dist.send(column, 1)
        column.zero_()  # the message is what the tensor held when it was sent
    else:
        dist.recv(base.t()[:, :].t(), 0)
        assert torch.equal(base, torch.arange(2000.0).view(40, 50).t())
        base.fill_(-1)
        target = base[::2, ::4]
        dist.recv(target, 0)
        assert torch.equal(target, torch.arange(250.0).view(25, 10))
        assert (base[1::2] == -1).all()
        assert (base[:, 1::4] == -1).all()
        return True
    dist.send(torch.arange(250.0).view(25, 10), 1)
    return True


def test_strides_on_either_side(pool: Pool) -> None:
    assert all(pool(2).run(strided_and_mixed))


def wrong_sizes() -> list[str]:
    texts = []
    for sent, wanted, dtype in [
        (6, 4, None),
        (4, 6, None),
        (60_000, 40_000, None),
        (8, 8, torch.int32),
    ]:
        if dist.get_rank() == 0:
            dist.send(torch.ones(sent), 1)
            continue
        got = torch.zeros(wanted, dtype=dtype)
        try:
            dist.recv(got, 0)
            texts.append("nothing was raised")
        except RuntimeError as error:
            texts.append(str(error))
        assert not got.any(), "user memory was written"
    x = torch.ones(1)
    dist.all_reduce(x)  # the group is still good
    assert x.item() == 2
    return texts


def test_a_message_of_another_size_or_dtype_is_refused_by_the_receiver(pool: Pool) -> None:
    texts = pool(2).run(wrong_sizes)[1]
    for text, sides in zip(
        texts,
        [
            ("sent 6 x float32", "receives 4 x float32"),
            ("sent 4 x float32", "receives 6 x float32"),
            ("sent 60000 x float32", "receives 40000 x float32"),
            ("sent 8 x float32", "receives 8 x int32"),
        ],
        strict=True,
    ):
        assert all(side in text for side in sides), text


def messages_beside_collectives() -> bool:
    rank = dist.get_rank()
    got = torch.empty(300_007, dtype=torch.uint8)
    receive = dist.irecv(got, 1 - rank)
    for turn in range(20):
        x = torch.full((40_009,), rank + 1.0)
        dist.all_reduce(x)
        assert (x == 3).all()
        if turn == 10:
            send = dist.isend(content(300_007, rank), 1 - rank)
    send.wait()
    receive.wait()
    assert torch.equal(got, content(300_007, 1 - rank))
    return True


def test_messages_and_collectives_do_not_block_each_other(pool: Pool) -> None:
    assert all(pool(2).run(messages_beside_collectives))


def wrong_peers() -> list[str]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    texts = []
    for peer in (7, dist.get_rank()):
        try:
            backend.send([torch.ones(1)], peer, 0)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_wrong_peers_are_refused(pool: Pool) -> None:
    for texts in pool(2).run(wrong_peers):
        assert "dst 7 is not a rank of this group of 2" in texts[0]
        assert "is this rank itself" in texts[1]
