// leaf/: what a leaf is, and the leaf kinds.
//
// A leaf is one addressable region of the cache: keys and values of all full-attention layers, one
// kind of recurrent state, a quantised leaf's scales. It declares its memory, its reach, how it is
// written, and which arrays a forward needs (region.h). It knows no pool, no request and no model:
// each kind can be tested alone, and a kind that is not here is a subclass in somebody else's code.
//
//   full, latent, chunked   attention.h         entries of the request's own tokens
//   window (with sinks)     sliding_window.h
//   state                   recurrent_state.h   one state, and checkpoints of it
//   cross                   cross_attention.h   entries of an encoder's tokens
//   scratch                 scratch.h           one private block
//   scales                  scales.h            beside a quantised leaf
#pragma once

#include "kvleaf/leaf/access_pattern.h"   // IWYU pragma: export
#include "kvleaf/leaf/attention.h"        // IWYU pragma: export
#include "kvleaf/leaf/cross_attention.h"  // IWYU pragma: export
#include "kvleaf/leaf/dtype.h"            // IWYU pragma: export
#include "kvleaf/leaf/errors.h"           // IWYU pragma: export
#include "kvleaf/leaf/group_id.h"         // IWYU pragma: export
#include "kvleaf/leaf/ids.h"              // IWYU pragma: export
#include "kvleaf/leaf/recurrent_state.h"  // IWYU pragma: export
#include "kvleaf/leaf/region.h"           // IWYU pragma: export
#include "kvleaf/leaf/scales.h"           // IWYU pragma: export
#include "kvleaf/leaf/scratch.h"          // IWYU pragma: export
#include "kvleaf/leaf/sliding_window.h"   // IWYU pragma: export
#include "kvleaf/leaf/staged.h"           // IWYU pragma: export
