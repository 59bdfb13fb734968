// group/: tokens and requests. It knows no tensors.
//
//   request_options.h  what callers say of a request, and what they are told
//   block_manager.h    requests, rows, prefix reuse, steps in flight
//   step_plan.h        what one forward reads
//   step_planner.h     the same, written in place for a batch
//
// Behind them: segment.h and prefix_tree.h (what is findable), joint_hit.h (the deepest prefix that
// all leaves can resume), retention.h (which boundaries are worth keeping), request.h (one
// request's rows).
#pragma once

#include "kvleaf/group/block_manager.h"    // IWYU pragma: export
#include "kvleaf/group/request_options.h"  // IWYU pragma: export
#include "kvleaf/group/step_plan.h"        // IWYU pragma: export
#include "kvleaf/group/step_planner.h"     // IWYU pragma: export
