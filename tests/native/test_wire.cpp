// Collectives whose elements travel encoded, among ranks that are threads: values, tensors in several pieces, guard bytes, bytes
// moved, disagreement. Runs plain and with sanitizers.
#include "base/error.h"
#include "guarded.h"
#include "kernels/cpu/wire_format.h"
#include "ranks.h"

using namespace pycoll;
using namespace pycoll::test;
using cpu::WireFormat;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr WireFormat kFormats[] = {{DType::kFloat8E4M3FN, 128}, {DType::kFloat8E5M2, 37},
                                   {DType::kInt8, 1024},        {DType::kInt8, 1},
                                   {DType::kBFloat16, 0},       {DType::kFloat16, 0}};

float value(size_t i, int rank) {
  const auto x = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 251) - 125.0f;
  return i % 97 == 3 ? x * 64 : x;
}

std::vector<float> values(size_t numel, int rank, size_t shift = 0) {
  std::vector<float> x(numel);
  for (size_t i = 0; i < numel; ++i) x[i] = value(i + shift, rank);
  return x;
}

// Encoded and decoded at once, as one run.
std::vector<float> through(const WireFormat& wire, const std::vector<float>& x) {
  std::vector<std::byte> run(wire.nbytes(x.size()) + 1);
  std::vector<float> y(x.size());
  const size_t step = cpu::wire_tile_numel(wire);
  for (size_t i = 0; i < x.size(); i += step) {
    const size_t numel = std::min(step, x.size() - i);
    cpu::encode(wire, x.data() + i, i, numel, run.data(), x.size());
    cpu::decode(wire, run.data(), x.size(), i, numel, y.data() + i);
  }
  return y;
}

std::vector<float> sum_of(const std::vector<std::vector<float>>& contributions) {
  std::vector<float> sum = contributions[0];
  for (size_t r = 1; r < contributions.size(); ++r) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += contributions[r][i];
  }
  return sum;
}

void check_equal(const float* got, const std::vector<float>& want, const char* what,
                 const WireFormat& wire) {
  size_t wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) wrong += got[i] != want[i];
  CHECK(wrong == 0, "%s, %zu x float32 as %s, block %zu: %zu wrong", what, want.size(),
        name(wire.dtype), wire.block, wrong);
}

Request request_of(Collective collective, size_t numel, const WireFormat& wire) {
  Request request;
  request.collective = collective;
  request.dtype = DType::kFloat32;
  request.numel = numel;
  request.wire = wire;
  return request;
}

// A chunk in pieces whose bounds are no multiples of anything.
void add_in_pieces(ChunkView* view, float* data, size_t numel) {
  view->add_chunk();
  for (size_t p = 0; p < 3; ++p) {
    const size_t begin = numel * p / 3, end = numel * (p + 1) / 3;
    view->add_piece(data + begin, end - begin);
  }
}

void check_all_reduce(Communicator& comm, size_t numel, const WireFormat& wire) {
  std::vector<std::vector<float>> contributions;
  for (int r = 0; r < comm.world_size(); ++r)
    contributions.push_back(through(wire, values(numel, r)));
  Guarded<float> x(numel);
  std::ranges::copy(values(numel, comm.rank()), x.data());
  Request request = request_of(Collective::kAllReduce, numel, wire);
  add_in_pieces(&request.input, x.data(), numel);
  request.output = request.input;
  comm.run(std::move(request), kTimeout);
  check_equal(x.data(), through(wire, sum_of(contributions)), "all_reduce", wire);
  CHECK(x.intact());
}

void check_all_gather(Communicator& comm, size_t numel, const WireFormat& wire) {
  const auto n = static_cast<size_t>(comm.world_size());
  Guarded<float> out(numel * n);
  float* mine = out.data() + static_cast<size_t>(comm.rank()) * numel;  // in place
  std::ranges::copy(values(numel, comm.rank()), mine);
  Request request = request_of(Collective::kAllGather, numel, wire);
  request.input.add_chunk(mine, numel);
  for (size_t r = 0; r < n; ++r) add_in_pieces(&request.output, out.data() + r * numel, numel);
  comm.run(std::move(request), kTimeout);
  for (int r = 0; r < comm.world_size(); ++r) {
    check_equal(out.data() + static_cast<size_t>(r) * numel, through(wire, values(numel, r)),
                "all_gather", wire);
  }
  CHECK(out.intact());
}

void check_reduce_scatter(Communicator& comm, size_t numel, const WireFormat& wire) {
  const auto n = static_cast<size_t>(comm.world_size());
  const auto me = static_cast<size_t>(comm.rank());
  Guarded<float> in(numel * n), out(numel);
  std::vector<std::vector<float>> contributions;
  for (int r = 0; r < comm.world_size(); ++r)
    contributions.push_back(through(wire, values(numel, r, me * 1000)));
  Request request = request_of(Collective::kReduceScatter, numel, wire);
  for (size_t c = 0; c < n; ++c) {
    std::ranges::copy(values(numel, comm.rank(), c * 1000), in.data() + c * numel);
    add_in_pieces(&request.input, in.data() + c * numel, numel);
  }
  request.output.add_chunk(out.data(), numel);
  comm.run(std::move(request), kTimeout);
  check_equal(out.data(), sum_of(contributions), "reduce_scatter", wire);
  CHECK(in.intact() && out.intact());
}

std::string failure_of(Communicator& comm, const std::optional<WireFormat>& wire) {
  std::vector<float> x = values(100, comm.rank());
  Request request;
  request.collective = Collective::kAllReduce;
  request.dtype = DType::kFloat32;
  request.numel = x.size();
  request.wire = wire;
  request.input.add_chunk(x.data(), x.size());
  request.output = request.input;
  try {
    comm.run(std::move(request), kTimeout);
  } catch (const Error& error) {
    CHECK(x == values(100, comm.rank()));
    return error.what();
  }
  return "";
}

}  // namespace

TEST(every_collective_and_format) {
  for (const char* algorithm : {"auto", "one_shot", "ring"}) {
    for (const int n : {2, 3}) {
      run_ranks(n,
                [](Communicator& comm) {
                  for (const WireFormat& wire : kFormats) {
                    for (const size_t numel : {0, 1, 23, 1009, 30011}) {
                      check_all_reduce(comm, numel, wire);
                      check_all_gather(comm, numel, wire);
                      check_reduce_scatter(comm, numel, wire);
                    }
                  }
                },
                {algorithm});
    }
  }
}

// Slots are written again and again while others read: enough blocks for all of them.
TEST(many_blocks_in_the_slots) {
  setenv("PYCOLL_STAGING_BYTES", "4096", 1);
  run_ranks(3, [](Communicator& comm) {
    for (const WireFormat& wire : {kFormats[0], kFormats[2], kFormats[4]}) {
      check_all_reduce(comm, 60013, wire);
      check_all_gather(comm, 60013, wire);
      check_reduce_scatter(comm, 60013, wire);
    }
  });
  unsetenv("PYCOLL_STAGING_BYTES");
}

TEST(formats_are_compared) {
  run_ranks(3, [](Communicator& comm) {
    const WireFormat wire{DType::kFloat8E4M3FN, 128};
    WireFormat other = wire;
    if (comm.rank() == 1) other.block = 64;
    CHECK(contains(failure_of(comm, other), "sent as float8_e4m3fn in blocks of 64"));
    if (comm.rank() == 1) other = {DType::kFloat8E5M2, 128};
    CHECK(contains(failure_of(comm, other), "sent as float8_e5m2 in blocks of 128"));
    const auto plain = comm.rank() == 2 ? std::nullopt : std::optional<WireFormat>(wire);
    CHECK(contains(failure_of(comm, plain), "rank 2 called all_reduce(100 x float32, SUM);"));
    CHECK(failure_of(comm, wire).empty());
  });
}

TEST(formats_without_meaning_are_refused) {
  run_ranks(2, [](Communicator& comm) {
    CHECK(contains(failure_of(comm, WireFormat{DType::kInt8, 0}), "block is 0"));
    CHECK(contains(failure_of(comm, WireFormat{DType::kInt8, 1025}), "block is 1025"));
    CHECK(contains(failure_of(comm, WireFormat{DType::kBFloat16, 8}), "block is 8"));
    CHECK(contains(failure_of(comm, WireFormat{DType::kInt32, 0}), "wire_dtype is int32"));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
