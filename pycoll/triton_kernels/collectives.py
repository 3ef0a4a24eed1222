"""Collectives by Triton kernels.

The meaning is that of pycoll's collectives on CPUs: rank order and float32 accumulation, and so the same bits, but for
the ring (docs/triton.md). Tensors are contiguous and lie on the group's device. Nothing is synchronised: call
``group.check()`` after the kernels have ended.
"""

from pycoll.triton_kernels.all_gather import all_gather
from pycoll.triton_kernels.all_reduce import all_reduce
from pycoll.triton_kernels.reduce_scatter import reduce_scatter

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]
