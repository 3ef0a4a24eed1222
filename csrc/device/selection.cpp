#include "device/selection.h"

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "kernels/cuda/launch.h"

namespace pycoll::device {
namespace {

constexpr std::array<const char*, 7> kNames = {"direct",     "one_shot", "two_shot", "ring",
                                               "ring_ll128", "multimem", "mapped"};
constexpr uint64_t kAnySize = UINT64_MAX;
constexpr uint64_t kKiB = 1024;

// Estimates from published latencies and rates, not measured by pycoll yet: a one-shot all_reduce moves (n - 1) times the data
// twice, but needs one trip; two-shot pays a meeting and two trips. A row for architecture 0 is for those without their own.
constexpr Row kRows[] = {
    {100, 0, Collective::kAllReduce, Algorithm::kOneShot, 4, 8 * kKiB},
    {100, 2, Collective::kAllReduce, Algorithm::kOneShot, 16, 512 * kKiB},
    {100, 0, Collective::kAllReduce, Algorithm::kOneShot, 16, 128 * kKiB},
    {90, 0, Collective::kAllReduce, Algorithm::kOneShot, 4, 8 * kKiB},
    {90, 2, Collective::kAllReduce, Algorithm::kOneShot, 16, 512 * kKiB},
    {90, 0, Collective::kAllReduce, Algorithm::kOneShot, 16, 128 * kKiB},
    {80, 0, Collective::kAllReduce, Algorithm::kOneShot, 4, 8 * kKiB},
    {80, 2, Collective::kAllReduce, Algorithm::kOneShot, 16, 256 * kKiB},
    {80, 0, Collective::kAllReduce, Algorithm::kOneShot, 16, 64 * kKiB},
    {0, 0, Collective::kAllReduce, Algorithm::kOneShot, 1, 256},
    {0, 0, Collective::kAllReduce, Algorithm::kOneShot, 2, 2 * kKiB},
    {0, 0, Collective::kAllReduce, Algorithm::kTwoShot, 4, 64 * kKiB},
    {0, 0, Collective::kAllReduce, Algorithm::kTwoShot, 32, kAnySize},
};

bool has(Collective collective, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShot:
    case Algorithm::kTwoShot:
      return collective == Collective::kAllReduce;
    case Algorithm::kRing:
    case Algorithm::kRingLL128:
    case Algorithm::kMultimem:
      return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
             collective == Collective::kAllGather;
    case Algorithm::kMapped:
      return true;
    case Algorithm::kDirect:
      return collective != Collective::kAllReduce;
  }
  return false;
}

bool keeps_bracketing(Algorithm algorithm) {
  return algorithm != Algorithm::kRing && algorithm != Algorithm::kRingLL128 &&
         algorithm != Algorithm::kMultimem;
}

std::optional<Algorithm> algorithm_named(const std::string& text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<Algorithm>(i);
  }
  return std::nullopt;
}

Row parse_row(const std::string& text) {
  const auto refuse = [&](const char* what) {
    fail(ErrorKind::kInvalidArgument, "a row of the device's tuning table is \"", text,
         "\": ", what, "; measure it anew, or unset PYCOLL_CUDA_TUNING");
  };
  std::istringstream in(text);
  std::string world_size, collective, algorithm, nbytes, rest;
  Row row{};
  in >> row.architecture >> world_size >> collective >> algorithm >> row.num_blocks >> nbytes;
  if (!in || (in >> rest)) refuse("it has not six columns");
  try {
    row.world_size = world_size == "any" ? 0 : std::stoi(world_size);
    row.most_nbytes = nbytes == "any" ? kAnySize : std::stoull(nbytes);
  } catch (const std::exception&) {
    refuse("ranks and bytes are whole numbers, or any");
  }
  if (row.num_blocks < 1 || row.num_blocks > cuda::kMaxBlocks) refuse("blocks are 1 to 128");
  const auto found = algorithm_named(algorithm);
  if (!found) refuse("the algorithm is unknown");
  row.algorithm = *found;
  if (row.algorithm == Algorithm::kMapped)
    refuse("symmetric tensors take mapped by themselves, where the row says two_shot or direct");
  int index = 0;
  while (index < kNumCollectives && collective != pycoll::name(static_cast<Collective>(index)))
    ++index;
  if (index == kNumCollectives) refuse("the collective is unknown");
  row.collective = static_cast<Collective>(index);
  if (!has(row.collective, row.algorithm)) refuse("the collective has no such algorithm");
  if (!keeps_bracketing(row.algorithm))
    refuse("the algorithm gives up the fixed order of additions, and is taken by option only");
  return row;
}

// Of what decides about time: the part that a rank has alone. Ranks do not agree on how much an all_to_all moves.
uint64_t decisive_nbytes(const Request& request) {
  return request.collective == Collective::kAllToAll ? kAnySize : request.nbytes();
}

bool fits(const Row& row, const Request& request, const Facts& facts, int architecture) {
  return row.architecture == architecture && row.collective == request.collective &&
         (row.world_size == 0 || row.world_size == facts.world_size) &&
         decisive_nbytes(request) <= row.most_nbytes;
}

Choice tabled(const Request& request, const Facts& facts) {
  for (const Row& row : facts.measured) {
    if (fits(row, request, facts, facts.architecture)) return {row.algorithm, row.num_blocks};
  }
  const auto last = std::end(kRows);
  // The newest architecture that is not newer.
  const int tables[] = {100, 90, 80, 0};
  const int architecture = *std::find_if(std::begin(tables), std::end(tables),
                                         [&](int a) { return a <= facts.architecture; });
  for (const int table : {architecture, 0}) {
    const auto row = std::find_if(std::begin(kRows), last,
                                  [&](const Row& r) { return fits(r, request, facts, table); });
    if (row != last) return {row->algorithm, row->num_blocks};
    if (table == 0) break;
  }
  // One block for each 64 KiB that goes to or comes from the ranks.
  const uint64_t blocks = decisive_nbytes(request) / (64 * kKiB) + 1;
  return {Algorithm::kDirect, static_cast<int>(std::min<uint64_t>(blocks, 32))};
}

}  // namespace

const char* name(Algorithm algorithm) { return kNames[static_cast<size_t>(algorithm)]; }

std::vector<Row> parse_rows(const std::string& text) {
  if (!text.empty() && text[0] == '!') fail(ErrorKind::kInvalidArgument, text.substr(1));
  std::vector<Row> rows;
  std::istringstream in(text);
  for (std::string row; std::getline(in, row, ';');) {
    if (row.find_first_not_of(' ') != std::string::npos) rows.push_back(parse_row(row));
  }
  return rows;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names{"auto"};
  for (const char* name : kNames) {
    if (algorithm_named(name) != Algorithm::kMapped) names.emplace_back(name);
  }
  return names;
}

Choice select(const Request& request, const Facts& facts) {
  Choice choice = tabled(request, facts);
  const auto wanted = algorithm_named(facts.algorithm);
  if (wanted && has(request.collective, *wanted)) choice.algorithm = *wanted;
  // A ring that quantised on the way would add an error at every step.
  if (request.wire && !keeps_bracketing(choice.algorithm)) {
    choice.algorithm =
        request.collective == Collective::kAllReduce ? Algorithm::kTwoShot : Algorithm::kDirect;
  }
  const size_t most = sizes_of(facts.architecture).one_shot_bytes;
  if (choice.algorithm == Algorithm::kOneShot && decisive_nbytes(request) > most) {
    choice.algorithm = Algorithm::kTwoShot;
  }
  choice.num_blocks = std::min(choice.num_blocks, facts.most_blocks);
  return choice;
}

Sizes sizes_of(int architecture) {
  if (architecture == 0) return {4, 64, 70, 8 * kKiB};
  return {32, 256, 1024, 512 * kKiB};
}

}  // namespace pycoll::device
