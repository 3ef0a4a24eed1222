"""Asynchronous work, threads and messages: what went wrong for others when much is in flight.

`test_async` holds orders of waiting and operations of changing size, `test_point_to_point` sizes, tags
and sources. Here are the forms of exchange that deadlock elsewhere, tensors that are shared by operations
in flight, counters that outgrow bytes and words, and messages whose sender has left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor
from checker import assert_same_bits
from scripts import assert_codes, run_script
from torch import Tensor

from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

SMALL, LARGE = 2, 2_000_003  # elements of float32: 8 bytes, 8 megabytes


def ramp(numel: int, sender: int, step: int = 0) -> Tensor:
    return ((torch.arange(numel) * 7 + sender * 13 + step * 29) % 251).to(torch.float32)


# --- on ranks --------------------------------------------------------------------------------------


def exchanges(numel: int) -> Iterator[tuple[str, Callable[[Tensor, Tensor, int, int], list[Any]]]]:
    """Each sends a tensor to the next rank and receives one from the one before; works to wait for."""
    yield (
        "send first",
        lambda sent, got, after, before: [dist.isend(sent, after), dist.irecv(got, before)],
    )
    yield (
        "receive first",
        lambda sent, got, after, before: [dist.irecv(got, before), dist.isend(sent, after)],
    )
    for name, order in (("batch, send first", 1), ("batch, receive first", -1)):
        yield (
            name,
            lambda sent, got, after, before, order=order: dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, after),
                    dist.P2POp(dist.irecv, got, before),
                ][::order]
            ),
        )
    if numel == SMALL:  # a blocking send of a long message waits for its receive
        yield (
            "blocking",
            lambda sent, got, after, before: [dist.send(sent, after), dist.recv(got, before)][:0],
        )


def exchange_in_every_form(numel: int) -> list[str]:
    rank, n = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % n, (rank - 1) % n
    done = []
    for step, (name, exchange) in enumerate(exchanges(numel)):
        got = torch.full((numel,), -1.0)
        for work in exchange(ramp(numel, rank, step), got, after, before):
            work.wait()
        assert_same_bits(got, ramp(numel, before, step), name)
        done.append(name)
    return done


def one_forward_one_backward(numel: int, num_microbatches: int) -> None:
    """A pipeline of two stages: activations go down and gradients up, some of each in flight."""
    rank = dist.get_rank()
    works: list[Any] = []

    def receive(step: int, src: int) -> None:
        got = torch.full((numel,), -1.0)
        dist.recv(got, src, tag=src)
        assert_same_bits(got, ramp(numel, src, step), f"micro-batch {step}")

    for step in range(num_microbatches + 1):
        if rank == 0:
            if step < num_microbatches:
                works.append(dist.isend(ramp(numel, 0, step), 1, tag=0))
            if step > 0:
                receive(step - 1, 1)
        elif step < num_microbatches:
            receive(step, 0)
            works.append(dist.isend(ramp(numel, 1, step), 0, tag=1))
    for work in works:
        work.wait()


def receive_from_anybody_at_once() -> list[int]:
    """All receives are posted before the first message can have come."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numels = (5, 50_021)
    if rank == 0:
        buffers = [torch.full((numel,), -1.0) for numel in numels for _ in range(n - 1)]
        works = [dist.irecv(buffer, None, tag=buffer.numel()) for buffer in buffers]
        dist.barrier()
        sources = []
        for work, buffer in zip(works, buffers, strict=True):
            work.wait()
            sources.append(work._source_rank())
            assert_same_bits(buffer, ramp(buffer.numel(), sources[-1]), "received")
        return sources
    dist.barrier()
    for numel in reversed(numels):
        dist.send(ramp(numel, rank), 0, tag=numel)
    return []


def unusual_tags() -> None:
    rank, tags = dist.get_rank(), (0, 255, 256, 65535, 65536, 2**31 - 1)
    if rank == 0:
        works = [dist.isend(ramp(3, 0, tag), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        for tag in reversed(tags):
            got = torch.zeros(3)
            dist.recv(got, 0, tag=tag)
            assert_same_bits(got, ramp(3, 0, tag), f"tag {tag}")


def overlapping_tensors_in_flight(numel: int) -> None:
    """Sums over views that overlap, a broadcast and a gather, none waited for before the last."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((numel,), rank + 1.0)
    gathered = torch.zeros(n * numel)
    total = n * (n + 1) / 2
    works = [
        dist.all_reduce(x[: 2 * numel // 3], async_op=True),
        dist.all_reduce(x[numel // 3 :], async_op=True),
        dist.broadcast(x[numel // 2 :], 1, async_op=True),
        all_gather_into_tensor(gathered, x, async_op=True),
        dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    expected = torch.full((numel,), total)
    expected[numel // 3 : 2 * numel // 3] = n * total
    assert_same_bits(x, expected, "after all")
    assert_same_bits(gathered, expected.repeat(n), "gathered in between")


def wait_in_many_threads(num_operations: int) -> None:
    """Every work is waited for by three threads, none of which has issued it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numels = [(3, 5003, 70001)[i % 3] for i in range(num_operations)]
    tensors = [torch.full((numel,), float(rank + i)) for i, numel in enumerate(numels)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    wrong: list[int] = []

    def wait(start: int) -> None:
        for i in itertools.chain(range(start, num_operations), range(start)):
            works[i].wait()
            if not (tensors[i] == n * (n - 1) / 2 + n * i).all():
                wrong.append(i)

    threads = [threading.Thread(target=wait, args=(5 * t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def count_far(num_operations: int, collective: str) -> int:
    """Waits for every result; the number of the last operation."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    x, y = torch.zeros(n), torch.zeros(n)
    message = torch.zeros(1)
    for i in range(num_operations):
        if collective == "all_reduce":
            x.fill_(rank + i)
            dist.all_reduce(x, group=group)
            assert x[-1] == n * (n - 1) / 2 + n * i, i
        elif collective == "barrier":
            dist.barrier(group=group)
        elif collective == "all_to_all":
            x.fill_(rank + i)
            dist.all_to_all_single(y, x, group=group)
            assert y[-1] == n - 1 + i, i
        elif rank == i % 2:
            dist.send(message.fill_(i), 1 - rank, group=group)
        else:
            dist.recv(message, 1 - rank, group=group)
            assert message == i
    backend = group._get_backend(torch.device("cpu"))
    number = backend._get_sequence_number_for_group()
    dist.destroy_process_group(group)
    return number


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("world_size", [2, 4])
def test_everybody_sends_first_or_receives_first(pool: Pools, world_size: int, numel: int) -> None:
    """Others put all transfers of a process into one queue, and a symmetric exchange deadlocks."""
    forms = [name for name, _ in exchanges(numel)]
    assert pool(world_size).run(exchange_in_every_form, numel) == [forms] * world_size


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_a_pipeline_in_which_one_forward_follows_one_backward(pool: Pools, numel: int) -> None:
    """Others serialise both directions, and the two stages wait for each other."""
    assert pool(2).run(one_forward_one_backward, numel, 5) == [None, None]


def test_receives_from_any_source_posted_before_all_messages(pool: Pools) -> None:
    """Others give one sender's bytes to another's receive."""
    sources = pool(4).run(receive_from_anybody_at_once)[0]
    assert sorted(sources[:3]) == sorted(sources[3:]) == [1, 2, 3]


def test_tags_are_whole_numbers_of_any_size(pool: Pools) -> None:
    """Others keep tags in fewer bits, and 65536 receives what was meant for 0."""
    assert pool(2).run(unusual_tags) == [None, None]


@pytest.mark.parametrize("numel", [30, 300_003])
def test_operations_on_overlapping_tensors_run_in_the_order_of_issue(
    pool: Pools, numel: int
) -> None:
    """Others run two at once over one buffer: 5 at some places where 6 is right."""
    assert pool(3).run(overlapping_tensors_in_flight, numel) == [None] * 3


def test_many_threads_wait_for_the_same_works(pool: Pools) -> None:
    """Others let the first waiter take the completion, and the second waits for ever."""
    assert pool(2).run(wait_in_many_threads, 60) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_reduce", "barrier", "all_to_all", "message"])
def test_counters_outgrow_bytes_and_words(pool: Pools, collective: str) -> None:
    """Others compare counters that have wrapped, and wait for ever; here past 2**8 and 2**16."""
    num_operations = 2**16 + 300
    numbers = pool(2).run(count_far, num_operations, collective, timeout=240)
    assert numbers == [0 if collective == "message" else num_operations] * 2


@pytest.mark.slow
@pytest.mark.parametrize("numel", [11, 4096])
def test_a_sender_that_has_left_is_no_loss(numel: int, tmp_path: Path) -> None:
    """Others lose a message that nobody waited for when its sender's program ends."""
    script = f"""
        init()
        if rank == 0:
            for step in range(5):
                dist.isend(torch.arange({numel}.0) + step, 1)
            sys.exit(0)
        time.sleep(1.5)    # until rank 0 is gone
        for step in range(5):
            x = torch.zeros({numel})
            dist.recv(x, 0)
            assert x.tolist() == (torch.arange({numel}.0) + step).tolist()
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


@pytest.mark.slow
def test_a_long_message_of_a_sender_that_leaves_arrives_or_names_it(tmp_path: Path) -> None:
    """A message too long to lie ready waits for its receive, but not for ever."""
    script = """
        init()
        if rank == 0:
            dist.isend(torch.arange(1_000_003.0), 1)
            sys.exit(0)
        if os.environ["LATE"] == "yes": time.sleep(3)
        x = torch.zeros(1_000_003)
        text, took = raised(lambda: dist.recv(x, 0))
        say(text)
        if text == "nothing was raised":
            assert torch.equal(x, torch.arange(1_000_003.0))
    """
    for late in ("no", "yes"):
        directory = tmp_path / late
        directory.mkdir()
        ended = run_script(script, 2, directory, LATE=late)
        assert_codes(ended, 0, 0)
        assert "nothing was raised" in ended[1].out or "rank 0" in ended[1].out
