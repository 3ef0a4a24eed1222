"""pycoll: collectives for PyTorch that one can read, and that never hang or lie.

``init_process_group("pycoll")`` is all that a program needs. Names here are loaded when first used, so
that ``import pycoll`` stays cheap and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._version import __version__
from pycoll.options import Options

if TYPE_CHECKING:
    from pycoll.backend import algorithm_names, events
    from pycoll.collectives import (
        all_gather,
        all_gather_into_tensor,
        all_gather_into_tensor_coalesced,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
        scatter,
    )
    from pycoll.flight_recorder import dump_flight_record
    from pycoll.groups import dead_ranks, shrink
    from pycoll.parallel.ddp import DistributedDataParallel
    from pycoll.parallel.dp import DataParallel
    from pycoll.parallel.fsdp.clipping import clip_grad_norm_
    from pycoll.parallel.fsdp.front import FullyShardedDataParallel, ShardingStrategy
    from pycoll.parallel.fsdp.memory import memory_report
    from pycoll.parallel.fsdp.module import (
        FSDPModule,
        fully_shard,
        register_fsdp_forward_method,
    )
    from pycoll.parallel.fsdp.policies import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        WirePolicy,
    )
    from pycoll.parallel.fsdp.state import full_state_dict, load_full_state_dict
    from pycoll.parallel.sync_batch_norm import SyncBatchNorm
    from pycoll.parallel.zero import ZeroRedundancyOptimizer
    from pycoll.symmetric import (
        is_shared,
        register_symmetric,
        release_cached_shared_memory,
        shared_allocator,
        shared_memory_stats,
        symmetric_empty,
        use_shared_allocator,
    )
    from pycoll.tags import tag

__all__ = [
    "CPUOffloadPolicy",
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Options",
    "ShardingStrategy",
    "SyncBatchNorm",
    "WirePolicy",
    "ZeroRedundancyOptimizer",
    "__version__",
    "algorithm_names",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "dead_ranks",
    "dump_flight_record",
    "events",
    "full_state_dict",
    "fully_shard",
    "gather",
    "is_shared",
    "load_full_state_dict",
    "memory_report",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_fsdp_forward_method",
    "register_symmetric",
    "release_cached_shared_memory",
    "scatter",
    "shared_allocator",
    "shared_memory_stats",
    "shrink",
    "symmetric_empty",
    "tag",
    "use_shared_allocator",
]

# Where names come from; all that is not listed is in pycoll.collectives.
_HOME = {
    "CPUOffloadPolicy": "pycoll.parallel.fsdp.policies",
    "DataParallel": "pycoll.parallel.dp",
    "DistributedDataParallel": "pycoll.parallel.ddp",
    "FSDPModule": "pycoll.parallel.fsdp.module",
    "FullyShardedDataParallel": "pycoll.parallel.fsdp.front",
    "MixedPrecisionPolicy": "pycoll.parallel.fsdp.policies",
    "OffloadPolicy": "pycoll.parallel.fsdp.policies",
    "ShardingStrategy": "pycoll.parallel.fsdp.front",
    "SyncBatchNorm": "pycoll.parallel.sync_batch_norm",
    "ZeroRedundancyOptimizer": "pycoll.parallel.zero",
    "WirePolicy": "pycoll.parallel.fsdp.policies",
    "algorithm_names": "pycoll.backend",
    "dump_flight_record": "pycoll.flight_recorder",
    "clip_grad_norm_": "pycoll.parallel.fsdp.clipping",
    "events": "pycoll.backend",
    "full_state_dict": "pycoll.parallel.fsdp.state",
    "load_full_state_dict": "pycoll.parallel.fsdp.state",
    "memory_report": "pycoll.parallel.fsdp.memory",
    "fully_shard": "pycoll.parallel.fsdp.module",
    "register_fsdp_forward_method": "pycoll.parallel.fsdp.module",
    "tag": "pycoll.tags",
    "dead_ranks": "pycoll.groups",
    "shrink": "pycoll.groups",
    "is_shared": "pycoll.symmetric",
    "release_cached_shared_memory": "pycoll.symmetric",
    "shared_allocator": "pycoll.symmetric",
    "shared_memory_stats": "pycoll.symmetric",
    "register_symmetric": "pycoll.symmetric",
    "symmetric_empty": "pycoll.symmetric",
    "use_shared_allocator": "pycoll.symmetric",
}
_LAZY = frozenset(__all__) - {"Options", "__version__"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME.get(name, "pycoll.collectives")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
