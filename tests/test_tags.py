"""Two calls that look alike, swapped between ranks: seen by names, and in detail mode by place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scripts import assert_codes, run_script

import pycoll
from pycoll.testing import RankPool

Pool = Callable[[int], RankPool]


def swapped() -> tuple[str, list[float]]:
    rank = dist.get_rank()
    a, b = torch.full((4,), 1.0 + rank), torch.full((4,), 100.0 * (1 + rank))
    try:
        for name, tensor in [("a", a), ("b", b)][:: 1 if rank == 0 else -1]:
            with pycoll.tag(f"gradient of {name}"):
                dist.all_reduce(tensor)
        text = "nothing was raised"
    except RuntimeError as error:
        text = str(error)
    untouched = [a[0].item(), b[0].item()]
    dist.barrier()
    with pycoll.tag("the same on both"):
        dist.all_reduce(a)
    return text, [*untouched, a[0].item()]


def test_swapped_calls_with_names_raise_on_both(pool: Pool) -> None:
    for rank, (text, values) in enumerate(pool(2).run(swapped)):
        assert "rank 0 called all_reduce(4 x float32, SUM) at gradient of a" in text
        assert "rank 1 called all_reduce(4 x float32, SUM) at gradient of b" in text
        assert values == [1.0 + rank, 100.0 * (1 + rank), 3.0]


def one_rank_names_its_call() -> str:
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            with pycoll.tag("x"):
                dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_name_on_one_rank_only_is_a_difference(pool: Pool) -> None:
    for text in pool(2).run(one_rank_names_its_call):
        assert "rank 1 called all_reduce(1 x float32, SUM) at x" in text
        assert "rank 0 called all_reduce(1 x float32, SUM);" in text


def test_empty_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the tag is empty"), pycoll.tag(""):
        pass


@pytest.mark.slow
def test_detail_mode_compares_places(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "def run(rank):\n"
        "    a, b = torch.full((4,), 1.0 + rank), torch.full((4,), 100.0 * (1 + rank))\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "    if rank == 0:\n"
        "        dist.all_reduce(a)\n"
        "    else:\n"
        "        dist.all_reduce(b)\n"
    )
    script = """
        sys.path.insert(0, os.path.dirname(os.environ["STORE"]))
        import train
        init()
        say(raised(lambda: train.run(rank))[0])
    """
    ended = run_script(script, 2, tmp_path, PYCOLL_DEBUG="DETAIL")
    assert_codes(ended, 0, 0)
    for rank in ended:
        assert "rank 0 called all_reduce(4 x float32, SUM) at train.py:6" in rank.out
        assert "rank 1 called all_reduce(4 x float32, SUM) at train.py:8" in rank.out
