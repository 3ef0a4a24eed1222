"""all_reduce of sparse tensors: the sum of what they mean, whoever holds which entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from checker import assert_same_bits
from torch import Tensor

from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]


def entries(rank: int, dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int) -> Tensor:
    """Rank r holds 3 * r entries, some at places that others have too, some twice; rank 0 holds none."""
    nnz = 3 * rank
    indices = torch.stack(
        [(torch.arange(nnz) * (5 + rank) + dim) % shape[dim] for dim in range(sparse_dim)]
    )
    dense = torch.Size([nnz, *shape[sparse_dim:]])
    values = ((torch.arange(dense.numel()) * 7 + rank * 3) % 11 + 1).reshape(dense).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape)


# --- on ranks --------------------------------------------------------------------------------------


def reduce_sparse(dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dense = [entries(r, dtype, shape, sparse_dim).to_dense() for r in range(n)]
    for is_async in (False, True):
        tensor = entries(rank, dtype, shape, sparse_dim)
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            work.wait()
        assert tensor.is_sparse
        assert tensor.shape == shape
        assert_same_bits(tensor.to_dense(), torch.stack(dense).sum(0).to(dtype), "sum")
    if dtype in (torch.float32, torch.float64):
        tensor = entries(rank, dtype, shape, sparse_dim)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        expected = torch.stack(dense).sum(0) / torch.full(shape, n, dtype=dtype)
        assert_same_bits(tensor.to_dense(), expected, "average")


def reduce_nothing() -> list[int]:
    tensor = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (5,))
    dist.all_reduce(tensor)
    return [tensor._nnz(), *map(int, tensor.to_dense())]


def reduce_what_rounds(rows: list[float], op: dist.ReduceOp.RedOpType) -> float:
    value = torch.tensor([rows[dist.get_rank()]], dtype=torch.bfloat16)
    tensor = torch.sparse_coo_tensor(torch.tensor([[2]]), value, (3,))
    dist.all_reduce(tensor, op)
    return tensor.to_dense()[2].item()


def reduce_wrongly() -> list[str]:
    rank, texts = dist.get_rank(), []

    def attempt(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        before = tensor.to_dense()
        try:
            dist.all_reduce(tensor, op)
            texts.append("nothing was raised")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
        assert torch.equal(tensor.to_dense(), before)

    attempt(torch.eye(3 + rank).to_sparse())
    attempt(torch.eye(3).to_sparse() if rank else torch.eye(3))
    attempt(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    attempt(torch.eye(3, dtype=torch.float64 if rank else torch.float32).to_sparse())
    after = torch.ones(1)
    dist.all_reduce(after)
    assert after.item() == dist.get_world_size()
    return texts


def train_with_sparse_gradients() -> list[list[float]]:
    """Rows of an embedding that some ranks do not touch, and some touch twice."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(embedding)
    rows = torch.tensor([[1, 1, 4], [4, 5, 5]][rank])
    (model(rows) * (rank + 1)).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    return embedding.weight.grad.to_dense().tolist()


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "sparse_dim"),
    [((17,), 1), ((5, 7), 2), ((5, 7), 1), ((4, 3, 2), 2), ((3, 2, 5, 2), 3)],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str
)
def test_sums_of_sparse_tensors(
    pool: Pools, dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int
) -> None:
    for world_size in (1, 3):
        results = pool(world_size).run(reduce_sparse, dtype, shape, sparse_dim)
        assert results == [None] * world_size


def test_tensors_without_entries(pool: Pools) -> None:
    assert pool(2).run(reduce_nothing) == [[0] * 6] * 2


def test_sparse_sums_are_rounded_once(pool: Pools) -> None:
    """As dense ones are: 261 is 260 in bfloat16, and its third 87; after roundings on the way 262, or 86.5."""
    rows = [256.0, 3.0, 2.0]
    assert pool(3).run(reduce_what_rounds, rows, dist.ReduceOp.SUM) == [260.0] * 3
    assert pool(3).run(reduce_what_rounds, rows, dist.ReduceOp.AVG) == [87.0] * 3


def test_sparse_tensors_that_do_not_fit_together_are_refused(pool: Pools) -> None:
    for shape, layout, op, dtype in pool(2).run(reduce_wrongly):
        assert "rank 0 has shape [3, 3] and rank 1 has shape [4, 4]" in shape
        assert "rank 0 called all_reduce(9 x float32" in layout
        assert "SUM or AVG" in op
        assert "float32" in dtype
        assert "float64" in dtype


def test_ddp_with_sparse_gradients(pool: Pools) -> None:
    expected = [[0.0] * 2, [1.0] * 2, [0.0] * 2, [0.0] * 2, [1.5] * 2, [2.0] * 2]
    assert pool(2).run(train_with_sparse_gradients) == [expected] * 2
