// cache/: the whole cache of one model.
//
//   layer_spec.h     what one layer keeps, in numbers
//   state_shapes.h   the shapes of recurrent states
//   model_config.h   a published config.json read into one such spec per layer
//   model_leaves.h   leaves composed from the specs
//   tensor.h         views of memory, exchanged by DLPack
//   arena_tensor.h   arenas on the host, pinned, on a device or in given memory, read as tensors
//   cache_config.h   the numbers that a KVCache is made of
//   kv_part.h        what a layer keeps beside its attention over the text
//   step_indices.h   what the forward of one step reads
//   kv_cache.h       KVCache: slots, steps and tensors of one model
#pragma once

#include "kvleaf/cache/arena_tensor.h"  // IWYU pragma: export
#include "kvleaf/cache/cache_config.h"  // IWYU pragma: export
#include "kvleaf/cache/kv_cache.h"      // IWYU pragma: export
#include "kvleaf/cache/kv_part.h"       // IWYU pragma: export
#include "kvleaf/cache/layer_spec.h"    // IWYU pragma: export
#include "kvleaf/cache/leaf_module.h"   // IWYU pragma: export
#include "kvleaf/cache/model_config.h"  // IWYU pragma: export
#include "kvleaf/cache/model_leaves.h"  // IWYU pragma: export
#include "kvleaf/cache/state_shapes.h"  // IWYU pragma: export
#include "kvleaf/cache/step_indices.h"  // IWYU pragma: export
#include "kvleaf/cache/tensor.h"        // IWYU pragma: export
