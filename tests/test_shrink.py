"""Going on with those who are left after a death."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import assert_codes, run_script

KILLED = -9

pytestmark = pytest.mark.slow  # each test starts interpreters of its own


def test_training_goes_on_to_the_right_result_after_a_death(tmp_path: Path) -> None:
    """Gradient descent on the mean of all samples; the samples of the dead are shared out anew."""
    script = """
        import pycoll
        init(timeout=30)
        data = torch.arange(12.0, dtype=torch.float64)

        def shard():
            return data[dist.get_rank()::dist.get_world_size()]

        w = torch.zeros(1, dtype=torch.float64)
        step = 0
        while step < 60:
            try:
                if step == 20 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
                gradient = (w * len(shard()) - shard().sum())
                dist.all_reduce(gradient)
            except RuntimeError as error:
                assert "rank 1" in str(error), error
                assert pycoll.dead_ranks() == [1], pycoll.dead_ranks()
                group = pycoll.shrink()
                assert group is dist.group.WORLD and dist.get_world_size() == 2
                assert dist.get_rank() == (0 if rank == 0 else 1)
                continue    # the step again, with the new shards
            w -= 0.02 * gradient
            step += 1
        say("mean", round(w.item(), 6), "at", dist.get_world_size(), "ranks")
        dist.destroy_process_group()
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, KILLED, 0)
    for rank in (0, 2):
        assert "mean 5.5 at 2 ranks" in ended[rank].out


def test_several_deaths_at_different_times(tmp_path: Path) -> None:
    script = """
        import pycoll
        init(timeout=30)
        dist.barrier()
        if rank in (1, 3):
            time.sleep(0.3 * rank)
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            try:
                x = torch.ones(70_001); dist.all_reduce(x)
                if dist.get_world_size() == 2: break
            except RuntimeError:
                pycoll.shrink()
        say("sum", x[-1].item())
        dist.destroy_process_group()
    """
    ended = run_script(script, 4, tmp_path)
    assert_codes(ended, 0, KILLED, 0, KILLED)
    assert all("sum 2.0" in ended[rank].out for rank in (0, 2))


def test_excluding_the_living_and_wrong_arguments(tmp_path: Path) -> None:
    script = """
        import pycoll
        init(timeout=30)
        text, _ = raised(pycoll.shrink); say(text)
        group = dist.new_group([0, 1, 2])
        dist.barrier()
        if rank == 2:
            text, _ = raised(lambda: pycoll.shrink(group, exclude=[2])); say(text)
        else:
            smaller = pycoll.shrink(group, exclude=[2])
            x = torch.full((3,), rank + 1.0); dist.all_reduce(x, group=smaller)
            assert x.tolist() == [3.0] * 3
        x = torch.ones(1); dist.all_reduce(x); assert x.item() == 3
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, 0, 0)
    assert all("every rank of the group is alive" in rank.out for rank in ended)
    assert "rank 2 excludes itself" in ended[2].out or "excluded" in ended[2].out


def test_groups_are_made_after_a_death_among_their_makers(tmp_path: Path) -> None:
    """torch numbers groups by itself, and survivors have come to different numbers."""
    script = """
        import pycoll
        init()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        if rank != 0:  # rank 0 learns of the death elsewhere
            text, _ = raised(lambda: [dist.new_group(timeout=seconds(3)) for _ in range(rank)])
        else:
            text, _ = raised(lambda: dist.all_reduce(torch.ones(3)))
        say(text)
        assert "died" in text or "Timed out waiting for ranks 0, 1" in text, text
        pycoll.shrink()
        pair = dist.new_group([0, 2])
        x = torch.full((5,), dist.get_rank() + 1.0)
        if dist.get_rank() != 1:
            dist.all_reduce(x, group=pair)
            assert x.tolist() == [4.0] * 5, x
    """
    assert_codes(run_script(script, 4, tmp_path), 0, KILLED, 0, 0)


def test_who_waits_in_another_group_hears_of_those_that_go_on(tmp_path: Path) -> None:
    """That group has no dead rank, and a timeout that is longer than the test."""
    script = """
        import pycoll
        init()
        pair = dist.new_group([0, 2], timeout=seconds(600))
        dist.barrier()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        text, took = raised(lambda: dist.all_reduce(torch.ones(3), group=pair if rank == 2 else None))
        assert took < 30, took
        assert ("rank 0 aborted" in text) if rank == 2 else ("rank 1 (" in text and "died" in text), text
        pycoll.shrink()
        x = torch.full((5,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 5, x
    """
    assert_codes(run_script(script, 3, tmp_path), 0, KILLED, 0)
