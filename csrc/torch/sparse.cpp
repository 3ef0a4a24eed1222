#include "torch/sparse.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include "torch/requests.h"

namespace pycoll::torch_adapter {
namespace {

constexpr int64_t kMostDims = 30;

// Number of entries, of sparse dimensions, and the shape, as one row of numbers.
at::Tensor describe(const at::Tensor& tensor) {
  at::Tensor row = at::empty({3 + kMostDims}, at::kLong);
  auto* numbers = row.mutable_data_ptr<int64_t>();
  std::fill(numbers, numbers + row.numel(), -1);
  numbers[0] = tensor._nnz();
  numbers[1] = tensor.sparse_dim();
  numbers[2] = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), numbers + 3);
  return row;
}

std::vector<at::Tensor> gather(Communicator* communicator, const at::Tensor& mine,
                               std::vector<at::Tensor> all, std::chrono::milliseconds timeout) {
  TensorSet set;
  communicator->run(
      all_gather_request(&set, all, mine, communicator->rank(), communicator->world_size()),
      timeout);
  return all;
}

// The entries of all ranks one after the other; rank r has counts[r] of them. `rows` has the entries in its first dimension.
at::Tensor gather_entries(Communicator* communicator, const at::Tensor& rows,
                          const std::vector<int64_t>& counts, std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> all;
  for (const int64_t count : counts) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = count;
    all.push_back(at::empty(sizes, rows.options()));
  }
  return at::cat(gather(communicator, rows.contiguous(), std::move(all), timeout));
}

void check_same_shape(const std::vector<at::Tensor>& rows) {
  for (size_t r = 1; r < rows.size(); ++r) {
    const at::Tensor mine = rows[r].narrow(0, 1, 2 + kMostDims);
    const at::Tensor zero = rows[0].narrow(0, 1, 2 + kMostDims);
    if (mine.equal(zero)) continue;
    const auto shape = [](const at::Tensor& row) {
      const auto* numbers = row.const_data_ptr<int64_t>();
      return at::IntArrayRef(numbers + 3, static_cast<size_t>(numbers[2])).vec();
    };
    fail(ErrorKind::kMismatch,
         "all_reduce of sparse tensors differs between ranks: rank 0 has shape ",
         at::IntArrayRef(shape(rows[0])), " and rank ", r, " has shape ",
         at::IntArrayRef(shape(rows[r])),
         ", or another number of sparse dimensions; give all ranks the same");
  }
}

}  // namespace

void all_reduce_sparse(Communicator* communicator, at::Tensor& tensor, const c10d::ReduceOp& op,
                       std::chrono::milliseconds timeout) {
  PYCOLL_CHECK_ARG(tensor.device().is_cpu(), "tensor is on ", tensor.device().str(),
                   ", and pycoll adds up sparse tensors of CPUs only; move it with .cpu()");
  PYCOLL_CHECK_ARG(op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG,
                   "op of an all_reduce of sparse tensors is not SUM or AVG; convert the tensor "
                   "with to_dense()");
  PYCOLL_CHECK_ARG(tensor.dim() <= kMostDims, "tensor has ", tensor.dim(),
                   " dimensions; the most for sparse ones is ", kMostDims);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // Entries travel and are added in the type that sums are made in, and are rounded once.
  const at::ScalarType dtype = tensor.scalar_type();
  const bool is_narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const at::Tensor mine = (is_narrow ? tensor.to(at::kFloat) : tensor).coalesce();
  const size_t n = static_cast<size_t>(communicator->world_size());
  std::vector<at::Tensor> rows;
  for (size_t r = 0; r < n; ++r) rows.push_back(at::empty({3 + kMostDims}, at::kLong));
  rows = gather(communicator, describe(mine), std::move(rows), timeout);
  check_same_shape(rows);
  std::vector<int64_t> counts;
  for (const at::Tensor& row : rows) counts.push_back(row.const_data_ptr<int64_t>()[0]);
  const at::Tensor indices = gather_entries(communicator, mine.indices().t(), counts, timeout);
  const at::Tensor values = gather_entries(communicator, mine.values(), counts, timeout);
  at::Tensor sum =
      at::sparse_coo_tensor(indices.t(), values, mine.sizes(), mine.options()).coalesce();
  if (op.op_ == c10d::ReduceOp::AVG) sum = sum.div(static_cast<double>(n));
  tensor.copy_(sum);
}

}  // namespace pycoll::torch_adapter
