// How a group comes to be: its ranks agree on the facts, connect, and show each other their pages.
#pragma once

#include <memory>

#include "base/error.h"
#include "collectives/group.h"

namespace pycoll {

// Collective over the ranks of `exchange`; world_size > 1. `facts` are this rank's; those of all ranks must be equal.
// Raises on every rank when one of them fails: kMismatch (with both values), kTimeout (with the missing ranks), kSystem.
std::shared_ptr<Group> form_group(Exchange* exchange, const std::shared_ptr<Endpoint>& endpoint,
                                  const Facts& facts, Deadline deadline,
                                  const InterruptCheck& interrupt);

// In place of it, by a rank that cannot take part: tells the others why, so that they raise instead of waiting, and
// does not wait for them.
void decline_group(Exchange* exchange, const Error& problem);

}  // namespace pycoll
