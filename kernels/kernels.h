// kernels/: plain data in, CPU and CUDA code out. Beside the ladder of layers: it knows layouts,
// and no leaf, pool or request. What the manager decided as lists of blocks is carried out here.
//
//   numbers       number.h     float32, float16, bfloat16, float8 E4M3 and E5M2, int8
//   index sums    layout.h     where an entry of a block lies; the same code on host and device
//   pages, rows   copy.h       copies and clears of a whole list, over many leaves, in one call
//   entries in    append.h     by slot mapping; as they are, converted, or quantised with scales
//   entries out   gather.h     the reverse
//   tables        table.h      deltas of staged tables
//   attention     attention.h  a plain reference over pages, for every kind of attention leaf
//   states        state.h      plain reference steps of recurrent layers: gated delta rule, Mamba-2
//   on a device   cuda.h       the same calls with a stream, where the library was built with CUDA
//   memory        device_memory.h  of a device, and pinned
//
// A page of attention: each layer's keys, then its values, then what the stride leaves unused.
//
//   base ──► block 0 (null)   block 1           block 2
//            |               |                 |                 |
//            0 …             |K0 |V0 |K1 |V1 |▒|K0 |V0 |K1 |V1 |▒|   two layers; ▒ padding
//            |<-page_stride->|^
//                             slot 0 … slots-1: rows [kv_heads, key_dim] of one token each
//
// Everywhere: 64-bit offsets, block 0 is readable zeros and never written, -1 is padding and
// skipped, nothing is allocated, and a call that throws KernelError has written nothing.
#pragma once

#include "kvleaf/kernels/append.h"         // IWYU pragma: export
#include "kvleaf/kernels/attention.h"      // IWYU pragma: export
#include "kvleaf/kernels/copy.h"           // IWYU pragma: export
#include "kvleaf/kernels/device_memory.h"  // IWYU pragma: export
#include "kvleaf/kernels/errors.h"         // IWYU pragma: export
#include "kvleaf/kernels/gather.h"         // IWYU pragma: export
#include "kvleaf/kernels/layout.h"         // IWYU pragma: export
#include "kvleaf/kernels/number.h"         // IWYU pragma: export
#include "kvleaf/kernels/state.h"          // IWYU pragma: export
#include "kvleaf/kernels/table.h"          // IWYU pragma: export
