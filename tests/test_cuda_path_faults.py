"""The backend's CUDA path on the simulator, where a call or one rank's device goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checker import assert_same_bits
from test_cuda_path import Pools, _simulator, device, failure_of_first, raised

from pycoll.testing import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_simulator")]
__all__ = ["_simulator"]  # a fixture


def num_references(tensor: torch.Tensor) -> int:
    """To its storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def dropped_messages() -> None:
    dev, rank, n = device(), dist.get_rank(), dist.get_world_size()
    seen = []
    with dev.active():
        for step in range(4):
            x, y = torch.full((700,), rank + 10.0 * step), torch.empty(700)
            dist.isend(x, (rank + 1) % n)
            dist.irecv(y, (rank - 1) % n)
            # Other tensors of the same storages, so that x and y may go.
            for tensor in (x, y):
                seen.append(torch.empty(0).set_(tensor.untyped_storage(), 0, (700,)))
            del x, y, tensor
            assert num_references(seen[-1]) > num_references(torch.ones(1)), "nobody keeps them"
            dev.synchronise()
    for step in range(4):
        assert_same_bits(seen[2 * step + 1], torch.full((700,), (rank - 1) % n + 10.0 * step))
    # The last message has found all before it to be over.
    assert {num_references(t) for t in seen[:-2]} == {num_references(torch.ones(1))}


def test_messages_that_nobody_waits_for_are_let_go(pool: Pools) -> None:
    pool(2).run(dropped_messages)


def wait_within_a_capture() -> None:
    dev = device()
    with dev.active():
        dist.barrier()
        x = torch.ones(10)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(ValueError, match=r"within it.*call wait\(\) before"), dev.capture():
            work.wait()
        work.wait()
        with dev.capture() as graph:
            dist.all_reduce(x, async_op=True).wait()
        dev.replay(graph[0])
        dev.synchronise()
    assert_same_bits(x, torch.full((10,), float(dist.get_world_size()) ** 2))


def test_a_graph_waits_for_nothing_outside_of_it(pool: Pools) -> None:
    pool(2).run(wait_within_a_capture)


def run_out_of_memory(when: str) -> str:
    """On rank 0. The others must not wait for their deadlines of half an hour."""
    n = dist.get_world_size()
    if when == "launch":
        with device().active():
            dist.barrier()
    if dist.get_rank() == 0:
        device().limit_memory(64)
    out, inputs = torch.empty(500), [torch.ones(500) for _ in range(n)]
    return raised(lambda: dist.reduce_scatter(out, inputs))


@pytest.mark.parametrize("when", ["first", "launch"])
def test_memory_that_runs_out_on_one_rank_is_an_error_on_all(when: str) -> None:
    texts = run_ranks(run_out_of_memory, 2, when, timeout=60)
    assert "no room for" in texts[0], texts
    what = "cannot make memory for the group" if when == "first" else "could not launch"
    assert f"rank 0 {what}" in texts[1], texts


def test_a_table_does_not_choose_mapped(tmp_path: Path) -> None:
    row = {
        "architecture": 0,
        "world_size": None,
        "collective": "all_reduce",
        "algorithm": "mapped",
        "num_blocks": 1,
        "most_nbytes": None,
    }
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"format": 1, "rows": [row]}))
    for text in run_ranks(failure_of_first, 2, env={"PYCOLL_CUDA_TUNING": str(table)}):
        assert "symmetric tensors take mapped by themselves" in text
