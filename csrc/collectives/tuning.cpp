#include "collectives/tuning.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "base/error.h"
#include "collectives/selector.h"

namespace pycoll {
namespace {

constexpr char kRemedy[] =
    "; measure it anew with `pycoll tune-collectives`, or set PYCOLL_TUNING=off";

Collective collective_named(const std::string& word, const std::string& row) {
  for (int c = 0; c < kNumCollectives; ++c) {
    if (word == name(static_cast<Collective>(c))) return static_cast<Collective>(c);
  }
  fail(ErrorKind::kInvalidArgument, "the tuning table names the collective '", word, "' in '", row,
       "', which does not exist", kRemedy);
}

const Algorithm* algorithm_named(const std::string& word, Collective collective,
                                 const std::string& row) {
  for (const Algorithm* algorithm : algorithms()) {
    if (algorithm->collective != collective || word != algorithm->name) continue;
    PYCOLL_CHECK_ARG(keeps_bracketing(*algorithm), "the tuning table asks for ", word, " in '", row,
                     "', whose order of additions depends on the place in the tensor: it can be "
                     "chosen with Options(algorithm=...) only",
                     kRemedy);
    return algorithm;
  }
  fail(ErrorKind::kInvalidArgument, "the tuning table asks for ", word, " in '", row, "', but ",
       name(collective), " has no such algorithm", kRemedy);
}

template <class T>
T number(const std::string& word, const std::string& row) {
  T value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  PYCOLL_CHECK_ARG(error == std::errc() && end == word.data() + word.size() && value > 0,
                   "the tuning table has '", word, "' where a positive number belongs, in '", row,
                   "'", kRemedy);
  return value;
}

TunedRow parse_row(const std::string& row) {
  std::istringstream words(row);
  std::string ranks, collective, algorithm, nbytes, rest;
  words >> ranks >> collective >> algorithm >> nbytes;
  PYCOLL_CHECK_ARG(!nbytes.empty() && !(words >> rest), "the tuning table has the row '", row,
                   "', which is not RANKS COLLECTIVE ALGORITHM BYTES", kRemedy);
  TunedRow parsed;
  parsed.world_size = number<int>(ranks, row);
  parsed.collective = collective_named(collective, row);
  parsed.algorithm = algorithm_named(algorithm, parsed.collective, row);
  parsed.most_nbytes = nbytes == "any" ? UINT64_MAX : number<uint64_t>(nbytes, row);
  return parsed;
}

}  // namespace

std::vector<TunedRow> parse_tuning(const std::string& text) {
  PYCOLL_CHECK_ARG(text.empty() || text.front() != '!', text.substr(1));
  std::vector<TunedRow> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line, ';');) {
    if (line.find_first_not_of(" \n") == std::string::npos) continue;
    const TunedRow row = parse_row(line);
    for (const TunedRow& before : rows) {
      PYCOLL_CHECK_ARG(before.world_size != row.world_size || before.collective != row.collective ||
                           before.most_nbytes < row.most_nbytes,
                       "the tuning table has the row '", line,
                       "' behind one that already covers its sizes", kRemedy);
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace pycoll
