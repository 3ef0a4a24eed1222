"""What else adds up tensors of several ranks on one GPU, timed beside pycoll: ranks are processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import seconds_of
from where import Rank

from pycoll.testing import RankError, run_ranks

SIZES = (1024, 64 << 10, 1 << 20, 16 << 20)
WORLD_SIZES = (2, 4)


def _time(launch: Callable[[], Any]) -> float:
    dist.barrier()
    return seconds_of(launch, 30) * 1e6


def _beside_symm_mem() -> list[dict[str, Any]]:
    import torch.distributed._symmetric_memory as symm_mem

    own = Rank(dist.get_rank())
    with own.scope():
        name = dist.group.WORLD.group_name
        ops = torch.ops.symm_mem
        rows = []
        for nbytes in SIZES:
            shared = symm_mem.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda")
            symm_mem.rendezvous(shared, dist.group.WORLD)
            shared.fill_(1.0)
            plain = torch.ones_like(shared)
            row: dict[str, Any] = {"nbytes": nbytes}
            row["pycoll"] = _time(lambda plain=plain: dist.all_reduce(plain))
            row["one_shot"] = _time(lambda x=shared: ops.one_shot_all_reduce(x, "sum", name))
            row["two_shot"] = _time(lambda x=shared: ops.two_shot_all_reduce_(x, "sum", name))
            rows.append(row)
        dist.barrier()
    return rows


def _nccl() -> list[dict[str, Any]]:
    own = Rank(dist.get_rank())
    with own.scope():
        rows = []
        for nbytes in SIZES:
            x = torch.ones(nbytes // 2, dtype=torch.bfloat16, device="cuda")
            row: dict[str, Any] = {"nbytes": nbytes}
            row["nccl"] = _time(lambda x=x: dist.all_reduce(x))
            rows.append(row)
    return rows


def _slowest(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each measurement, the rank's that took longest."""
    return [
        {key: max(row[key] for row in rows) for key in rows[0]} for rows in zip(*found, strict=True)
    ]


def symm_mem() -> dict[str, Any]:
    """Microseconds of an all_reduce of bfloat16 by torch's symmetric memory, whose input lies there, and by pycoll."""
    rows = {n: _slowest(run_ranks(_beside_symm_mem, n, timeout=30)) for n in WORLD_SIZES}
    return {"microseconds": rows}


def nccl() -> dict[str, Any]:
    """NCCL refuses two ranks on one GPU unless told otherwise; what it says is kept."""
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    try:
        rows = {
            n: _slowest(run_ranks(_nccl, n, backend="nccl", timeout=20, env=environment))
            for n in WORLD_SIZES
        }
    except RankError as error:
        return {"refused": str(error)[-1000:]}
    return {"microseconds": rows}
