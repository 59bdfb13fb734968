// pool/: one arena of bytes for all leaves. It knows page sizes, not tokens, so it can be embedded
// with nothing but page sizes.
//
//   geometry.h    how the arena is tiled: huge blocks, strides, views, and the cheapest choice
//   block_pool.h  which block belongs to whom: draw, return, commit, find, evict, joint demands,
//                 audit
//   arena.h       the bytes themselves
#pragma once

#include "kvleaf/pool/arena.h"       // IWYU pragma: export
#include "kvleaf/pool/block_pool.h"  // IWYU pragma: export
#include "kvleaf/pool/geometry.h"    // IWYU pragma: export
