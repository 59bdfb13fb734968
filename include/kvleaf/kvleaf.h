// kvleaf: the caches of hybrid language models. This header brings all layers; each has its own
// front header for those who embed one layer only, and sees nothing of those after it in this list:
//
//   leaf     what a leaf is, and the leaf kinds
//   pool     one pool of bytes for all leaves: geometry, blocks, eviction, audit
//   group    requests: rows, prefix tree, joint hit, steps
//   cache    the whole cache of one model: slots, tensors, model configurations
//   kernels  the loops over bytes; plain data in, beside the ladder
#pragma once

#include "kvleaf/cache/cache.h"      // IWYU pragma: export
#include "kvleaf/group/group.h"      // IWYU pragma: export
#include "kvleaf/kernels/kernels.h"  // IWYU pragma: export
#include "kvleaf/leaf/leaf.h"        // IWYU pragma: export
#include "kvleaf/pool/pool.h"        // IWYU pragma: export
