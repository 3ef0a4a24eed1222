// Operations that tests of the engine submit: sums of ones.
#pragma once

#include "ranks.h"

namespace pycoll::test {

using std::chrono::milliseconds;
inline constexpr milliseconds kTimeout{60000};

using OperationPtr = std::shared_ptr<Operation>;

inline int64_t ms_since(int64_t start_ns) { return (now_ns() - start_ns) / 1'000'000; }

// An all_reduce of ones, so that each element becomes the number of ranks. The operation keeps its data alive, as a
// framework's tensors are kept.
using Data = std::shared_ptr<std::vector<float>>;

inline Data ones(size_t numel) { return std::make_shared<std::vector<float>>(numel, 1.0f); }

inline Request sum_request(const Data& data) {
  Request request;
  request.collective = Collective::kAllReduce;
  request.dtype = DType::kFloat32;
  request.numel = data->size();
  request.input.add_chunk(data->data(), data->size());
  request.output.add_chunk(data->data(), data->size());
  request.after = [data] {};
  return request;
}

inline Request barrier_request() { return Request{}; }

struct Sum {
  Sum(Communicator& comm, size_t numel, milliseconds timeout = kTimeout)
      : data(ones(numel)), operation(comm.start(sum_request(data), timeout)) {}
  Data data;
  OperationPtr operation;

  void check(Communicator& comm) {
    CHECK(comm.wait(operation, Deadline::never()));
    if (operation->error() != nullptr) std::rethrow_exception(operation->error());
    size_t wrong = 0;
    for (const float x : *data) wrong += x != static_cast<float>(comm.world_size());
    CHECK(wrong == 0, "%zu of %zu wrong", wrong, data->size());
  }
};

inline std::string text_of(const OperationPtr& operation, ErrorKind kind) {
  CHECK(operation->finished());
  try {
    if (operation->error() != nullptr) std::rethrow_exception(operation->error());
  } catch (const Error& error) {
    CHECK(error.kind() == kind, "%s", error.what());
    return error.what();
  }
  CHECK(false, "the operation has not failed");
  return "";
}

inline constexpr size_t kLarge = 300'000;  // beyond what travels beside a signal

}  // namespace pycoll::test
