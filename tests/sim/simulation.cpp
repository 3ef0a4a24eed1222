#include "simulation.h"

#include "scheduler.h"

namespace pycoll::sim {

const char* name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kDone:
      return "done";
    case Verdict::kDeadlock:
      return "deadlock";
    case Verdict::kStepLimit:
      return "step limit";
    case Verdict::kRace:
      return "race";
    case Verdict::kBadAccess:
      return "bad access";
    case Verdict::kMisuse:
      return "misuse";
  }
  return "unknown";
}

Simulation::Simulation(int num_ranks, const Options& options)
    : options_(options),
      streams_(static_cast<size_t>(num_ranks)),
      scheduler_(std::make_unique<Scheduler>(&streams_, &buffers_, options_)) {}

Simulation::~Simulation() = default;

Report Simulation::run() { return scheduler_->run(); }

}  // namespace pycoll::sim
