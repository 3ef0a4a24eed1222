"""MPI under the names that torch.distributed has: what `buffers.Buffers` and the clock call on MPI's ranks.

Needs mpi4py and one of the MPI libraries it finds (both come from PyPI, see `peers`). Tensors are on the CPU; what is
handed to MPI is their memory, as numpy arrays that were made once for each tensor. Collectives block: there is no
async_op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class MpiApi:
    """Collectives of MPI.COMM_WORLD, and the clock's `Peers`.

    Raises:
        ImportError: mpi4py is missing, or finds no MPI library.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self._in_place: Any = MPI.IN_PLACE
        self.rank, self.world_size = self._world.rank, self._world.size
        self.library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        self._arrays: dict[int, tuple[Tensor, Any]] = {}
        self._ops = {
            dist.ReduceOp.SUM: MPI.SUM,
            dist.ReduceOp.MIN: MPI.MIN,
            dist.ReduceOp.MAX: MPI.MAX,
            dist.ReduceOp.PRODUCT: MPI.PROD,
        }

    def _array(self, tensor: Tensor) -> Any:
        """A numpy array over the tensor's memory. Looked up by identity: making one costs more than a small message."""
        known = self._arrays.get(id(tensor))
        if known is None:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                raise TypeError(f"MPI has no type for {tensor.dtype}")
            known = self._arrays[id(tensor)] = tensor, tensor.numpy()
        return known[1]

    def _op(self, op: Any) -> Any:
        try:
            return self._ops[op]
        except KeyError:
            raise TypeError(f"MPI has no operator for {op}") from None

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self._world.Allreduce(self._in_place, self._array(tensor), self._op(op))

    def all_reduce_into(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        self._world.Allreduce(self._array(tensor), self._array(output), self._op(op))

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> None:
        mine = self._array(tensor)
        if self.rank == dst:
            self._world.Reduce(self._in_place, mine, self._op(op), root=dst)
        else:
            self._world.Reduce(mine, None, self._op(op), root=dst)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._world.Bcast(self._array(tensor), root=src)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor) -> None:
        self._world.Allgather(self._unless_part(tensor, output), self._array(output))

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        whole = self._array(tensor)
        if not _shares_memory(output, tensor):
            self._world.Reduce_scatter_block(whole, self._array(output), self._op(op))
            return
        # MPI puts an in-place result at the buffer's beginning; the others here put it where the rank's part is.
        self._world.Reduce_scatter_block(self._in_place, whole, self._op(op))
        if self.rank:
            output.copy_(tensor[: output.numel()])

    def gather(self, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> None:
        if gather_list is None:
            self._world.Gather(self._array(tensor), None, root=dst)
            return
        whole = _whole(gather_list)
        self._world.Gather(self._unless_part(tensor, whole), self._array(whole), root=dst)

    def scatter(self, output: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> None:
        if scatter_list is None:
            self._world.Scatter(None, self._array(output), root=src)
            return
        whole = _whole(scatter_list)
        self._world.Scatter(self._array(whole), self._unless_part(output, whole), root=src)

    def all_to_all_single(self, output: Tensor, tensor: Tensor) -> None:
        self._world.Alltoall(self._array(tensor), self._array(output))

    def send_recv(self, tensor: Tensor, dst: int, output: Tensor, src: int) -> None:
        self._world.Sendrecv(self._array(tensor), dst, recvbuf=self._array(output), source=src)

    def barrier(self) -> None:
        self._world.Barrier()

    def maxima(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' values, position by position."""
        largest = torch.tensor(values, dtype=torch.float64)
        self._world.Allreduce(self._in_place, largest.numpy(), self._mpi.MAX)
        return largest.tolist()

    def _unless_part(self, tensor: Tensor, whole: Tensor) -> Any:
        """A rank's own part of a buffer that holds it is "in place" for MPI."""
        return self._in_place if _shares_memory(tensor, whole) else self._array(tensor)


def _shares_memory(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """The buffer that parts are consecutive views of (`Buffers` makes them so)."""
    base = parts[0]._base
    if base is None:
        raise TypeError("MPI gathers into one buffer; the parts are tensors of their own")
    return base
