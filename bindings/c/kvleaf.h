/* kvleaf in C: leaves, geometry, pool, requests and planner, as in C++, with the prefix kvleaf_.
 *
 *   kvleaf_leaf      one kind of cache memory: shipped, from a model's config, or written in C
 *   kvleaf_geometry  how one arena of bytes is tiled so that pages of different sizes share it
 *   kvleaf_arena     those bytes: of the host, pinned, of a device, or the caller's; DLPack views
 *   kvleaf_pool      which block belongs to whom; knows page sizes, no tokens
 *   kvleaf_manager   requests: rows of blocks, prefix reuse, steps in flight
 *   kvleaf_planner   what one forward reads, written in place
 *
 *   cc engine.c $(pkg-config --cflags --libs kvleaf_c)
 *
 * Errors. A function that can fail returns a kvleaf_status. On failure nothing has changed and no
 * output was written, and kvleaf_last_error() tells this thread what was wrong, with the numbers
 * and what would be accepted. No exception crosses this border. An expected refusal (no memory now)
 * is KVLEAF_POOL_EXHAUSTED.
 *
 * Outputs. `T* out` receives one value and must not be null, unless it says "or null". A pair
 * (const T** out, size_t* count) receives an array that belongs to the object asked: it lives until
 * the next call on that object that may change it, or as said. Strings end in a zero, are UTF-8,
 * and live as long as the array or object they came with.
 *
 * Structs. One whose first member is struct_size grows in later versions, at its end: set it to
 * sizeof of the struct, for inputs and outputs alike, and zero the rest. In options, zero stands
 * for the default, so a member that an older program does not know has its default. Structs without
 * struct_size never change while KVLEAF_ABI_VERSION stays. Flags are 0 or 1.
 *
 * Lifetimes. Handles are opaque and destroyed by their own _destroy, which accepts null. What a
 * handle was made of may be destroyed before it, in any order: a manager keeps its leaves, a
 * planner its manager. A handle described as borrowed belongs to the object it came from.
 *
 * Threads. One thread at a time uses a pool, or a manager with its pool and planners. Leaves,
 * geometries and arenas may be read from any thread, and so may kvleaf_pool_stats and
 * kvleaf_pool_leaf_stats. There is no global state.
 *
 * Numbers. Leaves are indices in the order given. Block 0 of a leaf is the null block: readable
 * zeros, never allocated, never written; where a block is asked for, 0 means "none". Sizes are in
 * bytes, lengths and positions in tokens, whatever is not said otherwise.
 *
 * C99 and C++; for foreign languages the declarations suffice: no macro is needed to call anything.
 */
#ifndef KVLEAF_H
#define KVLEAF_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ----------------------------------------------------------------------------------
 */

/* Of this header. A library of the same ABI version serves programs made with any older header of
 * that version, and refuses struct members that it does not know unless they are zero. */
#define KVLEAF_ABI_VERSION 1

uint32_t kvleaf_abi_version(void); /* of the library: compare with KVLEAF_ABI_VERSION */
const char* kvleaf_version(void);  /* "0.1.0" */

/* ---- errors -----------------------------------------------------------------------------------
 */

typedef int32_t kvleaf_status;
enum {
  KVLEAF_OK = 0,
  KVLEAF_INVALID_ARGUMENT = 1, /* what no call with these arguments could accept; a null handle */
  KVLEAF_GEOMETRY_ERROR = 2,   /* pages that cannot be tiled in the budget */
  KVLEAF_POOL_EXHAUSTED = 3,   /* memory that is not there now */
  KVLEAF_BLOCK_ERROR = 4,     /* a block that the call may not touch: null, foreign, free already */
  KVLEAF_INVARIANT_ERROR = 5, /* a broken equation: a bug; the object refuses all further work */
  KVLEAF_REQUEST_ERROR = 6,   /* a request unknown, known already, or of a length it cannot have */
  KVLEAF_STEP_ERROR = 7,      /* a step not begun, settled already, or not the oldest in flight */
  KVLEAF_PLAN_SHAPE_ERROR = 8, /* a batch or array that does not fit the planner */
  KVLEAF_CONFIG_ERROR = 9,     /* a model configuration that cannot be read */
  KVLEAF_CALLBACK_ERROR = 10,  /* a callback of the caller's said that it failed */
  KVLEAF_OUT_OF_MEMORY = 11,   /* of the host, for the library's own records */
  KVLEAF_OTHER_ERROR = 12,
  KVLEAF_DEVICE_ERROR = 13 /* a CUDA device that is not there, or what its runtime reports */
};

/* Why the last call on this thread that failed did; "" if none did. Until the next that fails. */
const char* kvleaf_last_error(void);
/* "pool exhausted", …: a name for the code; "unknown status" for others. */
const char* kvleaf_status_name(kvleaf_status status);
/* For callbacks: what to add to the message when they return a status other than KVLEAF_OK. */
void kvleaf_set_error(const char* message);

/* ---- leaves: access patterns -------------------------------------------------------------------
 */

typedef int32_t kvleaf_dtype;
enum {
  KVLEAF_DTYPE_DEFAULT = 0, /* bfloat16 of attention, float32 of states and scales */
  KVLEAF_UINT8 = 1,
  KVLEAF_INT8 = 2,
  KVLEAF_INT32 = 3,
  KVLEAF_INT64 = 4,
  KVLEAF_FLOAT16 = 5,
  KVLEAF_BFLOAT16 = 6,
  KVLEAF_FLOAT32 = 7,
  KVLEAF_FLOAT8_E4M3 = 8,
  KVLEAF_FLOAT8_E5M2 = 9
};

typedef int32_t kvleaf_pattern_kind;
enum {
  KVLEAF_PATTERN_FULL = 0,    /* all tokens */
  KVLEAF_PATTERN_WINDOW = 1,  /* the last `tokens`, the query counted, and the first `head` */
  KVLEAF_PATTERN_CHUNK = 2,   /* from the last multiple of `tokens` */
  KVLEAF_PATTERN_POINT = 3,   /* a state: what ends at n, and valid only there */
  KVLEAF_PATTERN_ENCODER = 4, /* all of the encoder's tokens, whatever n is */
  KVLEAF_PATTERN_NONE = 5,    /* scratch */
  KVLEAF_PATTERN_CUSTOM = 6   /* the first `head`, and from tail_begin(n) on */
};

/* Which tokens' entries must still be held to compute token n: [0, head) and [tail_begin(n), n). */
typedef struct kvleaf_pattern {
  kvleaf_pattern_kind kind;
  uint32_t tokens; /* of a window or chunk */
  uint32_t head;   /* of a custom pattern; the sinks of a window */
  uint32_t ahead;  /* custom: 1 if entry i is computed from token i + 1 as well, else 0 */
  /* Custom: must not decrease as n grows, nor pass n; called for n in [0, max_len] when a manager
   * is made, and by kvleaf_pattern_reach. */
  uint32_t (*tail_begin)(void* user_data, uint32_t n);
  void* user_data; /* of tail_begin, as long as a leaf made with it is in use */
} kvleaf_pattern;

/* Slots [0, head_end) and [tail_begin, end), in pages. */
typedef struct kvleaf_slot_reach {
  uint32_t head_end;
  uint32_t tail_begin;
  uint32_t end;
} kvleaf_slot_reach;

/* The slots of `tokens_per_page` tokens that intersect the reach with n tokens computed, the partly
 * filled one included. An encoder: all pages of `encoder_tokens`. */
kvleaf_status kvleaf_pattern_reach(const kvleaf_pattern* pattern, uint32_t n,
                                   uint32_t tokens_per_page, uint32_t encoder_tokens,
                                   kvleaf_slot_reach* out);

/* ---- leaves: the kinds shipped -----------------------------------------------------------------
 */

/* One addressable region of the pool. Immutable; a manager that was given a leaf keeps it. */
typedef struct kvleaf_leaf kvleaf_leaf;
void kvleaf_leaf_destroy(kvleaf_leaf* leaf);

typedef int32_t kvleaf_table_format;
enum {
  KVLEAF_TABLE_DEFAULT = 0, /* dense */
  KVLEAF_TABLE_DENSE = 1,   /* "block_table" int32 [batch, columns] */
  KVLEAF_TABLE_CSR = 2      /* "indptr", "indices", "last_page_len", int32 */
};

typedef struct kvleaf_attention_options {
  size_t struct_size;
  uint32_t layers;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t has_value_head_dim; /* 0: head_dim */
  uint32_t value_head_dim;     /* elements; 0: V is K */
  kvleaf_dtype dtype;
  uint32_t tokens_per_page; /* required */
  uint32_t slots_per_page;  /* entries; 0: one per token. Must divide the page */
  kvleaf_table_format table;
} kvleaf_attention_options;

typedef struct kvleaf_window_options {
  size_t struct_size;
  uint32_t window;  /* tokens, the query counted */
  uint32_t sinks;   /* first tokens that stay */
  uint32_t compact; /* 1: stage the live span and "first_slot" only */
} kvleaf_window_options;

typedef struct kvleaf_latent_options {
  size_t struct_size;
  uint32_t layers;
  uint32_t width; /* elements per token and layer */
  kvleaf_dtype dtype;
  uint32_t tokens_per_page; /* required */
  uint32_t slots_per_page;
  kvleaf_table_format table;
} kvleaf_latent_options;

/* One array of a state, per layer: a name, `rank` extents, a type. */
typedef struct kvleaf_slab {
  const char* name;
  const uint32_t* shape;
  size_t rank;
  kvleaf_dtype dtype;
} kvleaf_slab;

typedef int32_t kvleaf_state_kernel;
enum {
  KVLEAF_KERNEL_DEFAULT = 0,  /* in place */
  KVLEAF_KERNEL_IN_PLACE = 1, /* reads and writes one block */
  KVLEAF_KERNEL_IN_OUT = 2    /* reads one row and writes another */
};

typedef int32_t kvleaf_state_table;
enum {
  KVLEAF_STATE_TABLE_DEFAULT = 0, /* blocks */
  KVLEAF_STATE_BLOCKS = 1,        /* int32 [batch] block indices */
  KVLEAF_STATE_ROWS = 2           /* int32 [layers, batch] rows; a single slab only */
};

typedef struct kvleaf_state_options {
  size_t struct_size;
  uint32_t layers;
  uint32_t rollback; /* live states kept beside the first, for draft tokens */
  const kvleaf_slab* slabs;
  size_t slab_count;
  kvleaf_state_kernel kernel;
  kvleaf_state_table table;
  uint32_t in_chunk;        /* 1: the kernel emits states at boundaries inside a chunk */
  uint32_t tokens_per_page; /* distance of boundaries; 0: the cache's page_tokens */
  const char* group;        /* null: "state" */
} kvleaf_state_options;

kvleaf_status kvleaf_full_attention_leaf(const char* leaf_id,
                                         const kvleaf_attention_options* options,
                                         kvleaf_leaf** out);
kvleaf_status kvleaf_latent_attention_leaf(const char* leaf_id,
                                           const kvleaf_latent_options* options, kvleaf_leaf** out);
kvleaf_status kvleaf_sliding_window_leaf(const char* leaf_id, const kvleaf_window_options* window,
                                         const kvleaf_attention_options* options,
                                         kvleaf_leaf** out);
kvleaf_status kvleaf_chunked_attention_leaf(const char* leaf_id, uint32_t chunk,
                                            const kvleaf_attention_options* options,
                                            kvleaf_leaf** out);
kvleaf_status kvleaf_recurrent_state_leaf(const char* leaf_id, const kvleaf_state_options* options,
                                          kvleaf_leaf** out);
/* group: null: "encoder". */
kvleaf_status kvleaf_cross_attention_leaf(const char* leaf_id,
                                          const kvleaf_attention_options* options,
                                          const char* group, kvleaf_leaf** out);
/* stride_alignment: 0: packed pages; 1: any padding. group: null: "scratch". */
kvleaf_status kvleaf_scratch_leaf(const char* leaf_id, uint64_t bytes_per_page,
                                  uint64_t stride_alignment, const char* group, kvleaf_leaf** out);
/* Scales of a quantised attention leaf: its id with ".scales", its group, one scale for every
 * `granularity` values. */
kvleaf_status kvleaf_scales_leaf(const kvleaf_leaf* values, uint32_t granularity,
                                 kvleaf_dtype dtype, kvleaf_leaf** out);

/* ---- leaves: from a published model's configuration --------------------------------------------
 */

typedef struct kvleaf_leaves_options {
  size_t struct_size;
  uint32_t tokens_per_page;    /* of attention; 0: 16 */
  kvleaf_dtype dtype;          /* of the model; default: the config's */
  kvleaf_dtype kv_dtype;       /* of keys, values and latents; default: the model's */
  uint32_t tensor_parallel;    /* leaves are those of one rank; 0: 1 */
  uint64_t budget_bytes;       /* given, large states may be split into equal leaves */
  uint32_t expected_tokens;    /* of a typical request; 0: 2,048 */
  uint32_t implied_values;     /* 1: values made from keys are not stored */
  uint32_t scales_granularity; /* of one-byte kv_dtypes: values per scale; 0: no scales leaves */
  kvleaf_dtype scales_dtype;
  kvleaf_state_kernel state_kernel;
} kvleaf_leaves_options;

/* *out receives a new array of *count leaves, to be given back by kvleaf_leaves_destroy. options:
 * or null. KVLEAF_CONFIG_ERROR names the file, the key and what would be accepted. */
kvleaf_status kvleaf_leaves_from_config(const char* path, const kvleaf_leaves_options* options,
                                        kvleaf_leaf*** out, size_t* count);
/* The same from JSON text of `bytes` bytes. */
kvleaf_status kvleaf_leaves_from_json(const char* json, size_t bytes,
                                      const kvleaf_leaves_options* options, kvleaf_leaf*** out,
                                      size_t* count);
void kvleaf_leaves_destroy(kvleaf_leaf** leaves, size_t count);

/* ---- leaves: what they say ---------------------------------------------------------------------
 */

typedef int32_t kvleaf_writing;
enum {
  KVLEAF_WRITING_APPEND = 0,     /* each token written once: cached by page */
  KVLEAF_WRITING_IN_PLACE = 1,   /* a state: cached as checkpoints */
  KVLEAF_WRITING_WRITE_ONCE = 2, /* an encoder's output: cached whole */
  KVLEAF_WRITING_PRIVATE = 3     /* scratch: never cached */
};

typedef struct kvleaf_leaf_info {
  size_t struct_size;
  const char* leaf_id; /* strings live as long as the leaf */
  const char* group;
  uint64_t bytes_per_page;
  uint64_t stride_alignment; /* 0: packed */
  uint32_t tokens_per_page;  /* 0: the cache's page_tokens */
  kvleaf_writing writing;
  uint32_t cacheable;
  uint32_t layers;   /* 0 when it does not say */
  uint32_t rollback; /* states */
  kvleaf_state_kernel state_kernel;
} kvleaf_leaf_info;

kvleaf_status kvleaf_leaf_describe(const kvleaf_leaf* leaf, kvleaf_leaf_info* out);
/* Most blocks one request holds while it fills `num_blocks` slots, with at most `step_tokens`
 * planned and not yet settled. */
kvleaf_status kvleaf_leaf_blocks_to_reserve(const kvleaf_leaf* leaf, uint32_t num_blocks,
                                            uint32_t tokens_per_page,
                                            uint32_t enable_prefix_caching, uint32_t step_tokens,
                                            uint32_t* out);

/* Name, shape and type of one array that a forward stages. */
typedef struct kvleaf_staged_input {
  const char* key;
  kvleaf_dtype dtype;
  uint32_t rank;    /* 1 … 4 */
  int64_t shape[4]; /* elements; those behind the rank are 0 */
} kvleaf_staged_input;

/* One staged array, narrowed to its batch. Strides are in elements; the innermost is 1. */
typedef struct kvleaf_array {
  const char* key;
  kvleaf_dtype dtype;
  uint32_t rank;
  void* data;
  int64_t shape[4];
  int64_t strides[4];
} kvleaf_array;

/* The blocks of one batch row in slot order, 0 where nothing is reached. */
typedef struct kvleaf_row_plan {
  const uint32_t* blocks;
  size_t count;
} kvleaf_row_plan;

/* Rows [begin, end) of the bound input `key`. */
typedef struct kvleaf_bound_rows {
  const char* key;
  uint64_t begin;
  uint64_t end;
} kvleaf_bound_rows;

/* At most 8 inputs, written to into[0 … *count); KVLEAF_INVALID_ARGUMENT where `capacity` is less
 * than there are, here and below. */
kvleaf_status kvleaf_leaf_staged_input_shapes(const kvleaf_leaf* leaf, uint32_t batch,
                                              uint32_t num_blocks, kvleaf_staged_input* into,
                                              size_t capacity, size_t* count);
/* Writes every entry of `arrays`, one array per staged input. */
kvleaf_status kvleaf_leaf_write_staged_inputs(const kvleaf_leaf* leaf, const kvleaf_row_plan* plans,
                                              size_t rows, const kvleaf_array* arrays,
                                              size_t array_count);
/* For a leaf addressed by row through an input bound once; nothing for others. */
kvleaf_status kvleaf_leaf_bound_row_span(const kvleaf_leaf* leaf, uint32_t block,
                                         kvleaf_bound_rows* into, size_t capacity, size_t* count);
/* from[i] is to be copied to to[i]. */
kvleaf_status kvleaf_leaf_bound_row_copies(const kvleaf_leaf* leaf, uint32_t src, uint32_t dst,
                                           kvleaf_bound_rows* from, kvleaf_bound_rows* to,
                                           size_t capacity, size_t* count);

/* ---- leaves: a kind written in C ---------------------------------------------------------------
 */

/* What became of one batch row since its arrays were last written. */
typedef struct kvleaf_row_delta {
  uint32_t new_owner; /* 1: all of the row is in `blocks` */
  uint32_t padding;   /* 1: a dummy row: null everywhere; the rest is to be ignored */
  uint32_t first_changed_slot;
  uint32_t computed;   /* tokens computed before this step; an encoder's leaf: its tokens */
  uint32_t new_tokens; /* tokens this step computes; an encoder's leaf: 0 */
  uint32_t read_block; /* states: the block this step reads its state from */
  uint32_t write_block;
  uint32_t block_count;
  const uint32_t* blocks; /* slots first_changed_slot … end of the row */
  const uint32_t* boundary_blocks;
  uint32_t boundary_count;
  /* A word that is the leaf's own, per row of these arrays: 0 when they are zeroed, all ones after
   * write_staged_inputs. Null where the caller keeps none. */
  uint32_t* filled_columns;
} kvleaf_row_delta;

/* Through which write_staged_delta says what it changed. */
typedef struct kvleaf_staging kvleaf_staging;
/* To be called first by a delta that reports; what it then does not report has not changed. */
void kvleaf_staging_reports_changes(const kvleaf_staging* staging);
/* `count` elements of arrays[array], from data + first, have changed. */
void kvleaf_staging_changed(const kvleaf_staging* staging, size_t array, int64_t first,
                            int64_t count);

/* A kind of memory that is not shipped. Members after `user_data` are callbacks and may be null:
 * then the leaf behaves as its writing and pattern say, with an int32 "block_table" of [batch,
 * num_blocks]. One that returns a status other than KVLEAF_OK makes the call it was called from
 * fail with KVLEAF_CALLBACK_ERROR and its number in the message; see kvleaf_set_error. They must
 * not call the object that calls them. What they mean in full: kvleaf/leaf/region.h. */
typedef struct kvleaf_leaf_kind {
  size_t struct_size;
  const char* leaf_id;
  const char* group; /* leaves of one group are reused, advanced and evicted together */
  kvleaf_pattern pattern;
  kvleaf_writing writing;
  uint32_t tokens_per_page; /* 0: the cache's page_tokens */
  uint64_t bytes_per_page;
  uint64_t stride_alignment; /* 0: packed; 1: any padding; a row where addressed by row */
  uint32_t never_cached;     /* 1: not even where the writing would allow it */
  uint32_t layers;           /* for reports */
  uint32_t rollback;         /* states */
  kvleaf_state_kernel state_kernel;
  uint32_t emits_in_chunk;   /* states */
  uint32_t stages_live_span; /* 1: columns are the slots held, not those from slot 0 */
  void* user_data;
  /* Once, when the last user of the leaf is gone. Not called if the leaf could not be made. */
  void (*destroy)(void* user_data);
  uint32_t (*slots_per_page)(void* user_data, uint32_t tokens_per_page);
  uint32_t (*blocks_to_reserve)(void* user_data, uint32_t num_blocks, uint32_t tokens_per_page,
                                uint32_t enable_prefix_caching, uint32_t step_tokens);
  /* Keys must live as long as the leaf. into: zeroed, with room for 8. */
  kvleaf_status (*staged_input_shapes)(void* user_data, uint32_t batch, uint32_t num_blocks,
                                       kvleaf_staged_input* into, size_t* count);
  /* A kind that stages arrays of its own, or writes the table differently, has this one. */
  kvleaf_status (*write_staged_inputs)(void* user_data, const kvleaf_row_plan* plans, size_t rows,
                                       const kvleaf_array* arrays, size_t array_count);
  /* Optional beside write_staged_inputs: only what changed. */
  kvleaf_status (*write_staged_delta)(void* user_data, const kvleaf_row_delta* deltas, size_t rows,
                                      const kvleaf_array* arrays, size_t array_count,
                                      const kvleaf_staging* staging);
  /* into: zeroed, with room for 8; keys must live as long as the leaf. */
  kvleaf_status (*bound_row_span)(void* user_data, uint32_t block, kvleaf_bound_rows* into,
                                  size_t* count);
  kvleaf_status (*bound_row_copies)(void* user_data, uint32_t src, uint32_t dst,
                                    kvleaf_bound_rows* from, kvleaf_bound_rows* to, size_t* count);
  kvleaf_status (*bind)(void* user_data, uint64_t page_stride);
} kvleaf_leaf_kind;

kvleaf_status kvleaf_custom_leaf(const kvleaf_leaf_kind* kind, kvleaf_leaf** out);

/* ---- geometry ----------------------------------------------------------------------------------
 */

/* What the pool must know of a leaf: sizes, no tokens. */
typedef struct kvleaf_page_spec {
  size_t struct_size; /* the same in every element of an array */
  const char* name;
  uint64_t bytes_per_page;
  uint64_t stride_alignment; /* 0: packed, the stride is bytes_per_page; 1: any padding */
  double weight;             /* expected share of data bytes, divided by the sum; 0: 1 */
  uint64_t floor;            /* live blocks that are always kept obtainable */
  uint64_t ceiling;          /* live blocks never exceeded, where has_ceiling */
  uint32_t has_ceiling;
  uint32_t one_per_request; /* 1: a state, which may be split into equal leaves */
} kvleaf_page_spec;

/* The page of a leaf, with weight 1. The name lives as long as the leaf. */
kvleaf_status kvleaf_page_spec_of(const kvleaf_leaf* leaf, kvleaf_page_spec* out);
/* The pages of these leaves, into[0 … count), with the weights of a manager's default. Each
 * element's struct_size must be set. expected_tokens: 0: 2,048. page_tokens: 0: 16. */
kvleaf_status kvleaf_page_specs(kvleaf_leaf* const* leaves, size_t count, uint32_t page_tokens,
                                uint32_t expected_tokens, kvleaf_page_spec* into);

/* A value: immutable, equal for equal tilings. */
typedef struct kvleaf_geometry kvleaf_geometry;
void kvleaf_geometry_destroy(kvleaf_geometry* geometry);

/* The cheapest geometry for these pages in this budget, exactly. max_huge_bytes: 0: the default
 * cap. alignment of the null region: 0: 256. KVLEAF_GEOMETRY_ERROR names each page's size, the
 * least budget that would start, and the leaf to blame. */
kvleaf_status kvleaf_plan_geometry(uint64_t budget_bytes, const kvleaf_page_spec* pages,
                                   size_t count, uint64_t max_huge_bytes, uint64_t alignment,
                                   kvleaf_geometry** out);
/* One of the caller's choice; `ratios` are blocks per huge block, one per page. alignment: 0: 1. */
kvleaf_status kvleaf_geometry_by_hand(const kvleaf_page_spec* pages, size_t count,
                                      uint64_t huge_bytes, uint64_t huge_blocks,
                                      const uint64_t* ratios, uint64_t alignment,
                                      kvleaf_geometry** out);
/* The same tiling with another number of huge blocks. */
kvleaf_status kvleaf_geometry_resized(const kvleaf_geometry* geometry, uint64_t huge_blocks,
                                      kvleaf_geometry** out);

typedef struct kvleaf_geometry_info {
  size_t struct_size;
  uint64_t budget_bytes;
  uint64_t arena_bytes; /* null_bytes + huge_bytes * huge_blocks: the memory to provide */
  uint64_t null_bytes;  /* must read as zeros */
  uint64_t huge_bytes;
  uint64_t huge_blocks;
  double cost; /* share of the budget lost to padding, remainders and half-used huge blocks */
  uint32_t leaves;
  uint32_t page_classes;
} kvleaf_geometry_info;

/* One leaf's view of the arena: block b begins at base_offset + b * page_stride. */
typedef struct kvleaf_leaf_geometry {
  size_t struct_size;
  const char* name;
  uint64_t bytes_per_page;
  uint64_t page_stride;
  uint64_t ratio;       /* blocks per huge block */
  uint64_t base_offset; /* of block 0 */
  uint64_t blocks;      /* real ids are 1 … blocks */
  uint64_t floor;
  uint64_t ceiling; /* where has_ceiling */
  uint32_t has_ceiling;
  uint32_t page_class; /* leaves of one number share huge blocks */
} kvleaf_leaf_geometry;

typedef struct kvleaf_byte_range {
  uint64_t begin;
  uint64_t end;
} kvleaf_byte_range;

kvleaf_status kvleaf_geometry_describe(const kvleaf_geometry* geometry, kvleaf_geometry_info* out);
kvleaf_status kvleaf_geometry_leaf(const kvleaf_geometry* geometry, uint32_t leaf,
                                   kvleaf_leaf_geometry* out);
kvleaf_status kvleaf_geometry_find(const kvleaf_geometry* geometry, const char* name,
                                   uint32_t* out_leaf);
/* Bytes of one block's data in the arena. */
kvleaf_status kvleaf_geometry_byte_range(const kvleaf_geometry* geometry, uint32_t leaf,
                                         uint32_t block, kvleaf_byte_range* out);
kvleaf_status kvleaf_geometry_huge_block_of(const kvleaf_geometry* geometry, uint32_t leaf,
                                            uint32_t block, uint32_t* out);

/* ---- arena -------------------------------------------------------------------------------------
 */

typedef int32_t kvleaf_memory;
enum {
  KVLEAF_MEMORY_HOST = 0,   /* aligned to huge pages where the system has them, bound to no node */
  KVLEAF_MEMORY_PINNED = 1, /* of the host, and a CUDA device reads it fast */
  KVLEAF_MEMORY_CUDA = 2    /* of a CUDA device */
};

/* The bytes that a geometry tiles, zeroed. The library itself writes none of them. May be used from
 * any thread. A pool needs none: engines that have memory of their own lay it out by the geometry.
 */
typedef struct kvleaf_arena kvleaf_arena;
/* The memory goes with the last view taken by kvleaf_arena_view. */
void kvleaf_arena_destroy(kvleaf_arena* arena);

/* device: of KVLEAF_MEMORY_CUDA, else 0. KVLEAF_DEVICE_ERROR, with the bytes wanted and the CUDA
 * runtime's message, where there is no such device or memory, or no CUDA in this library. */
kvleaf_status kvleaf_arena_create(const kvleaf_geometry* geometry, kvleaf_memory memory,
                                  int32_t device, kvleaf_arena** out);
/* In the caller's memory, at least arena_bytes of it, whose null region is zeros. release: called
 * once with user_data when the memory is no longer used; null: the caller keeps it until then. */
kvleaf_status kvleaf_arena_over(const kvleaf_geometry* geometry, kvleaf_memory memory,
                                int32_t device, void* data, uint64_t bytes,
                                void (*release)(void* user_data), void* user_data,
                                kvleaf_arena** out);
/* The same with another framework's tensor: uint8, one dimension, contiguous, on the CPU or on a
 * CUDA device. Its deleter is called when it is no longer used; on failure it stays the caller's.
 */
struct DLManagedTensor;
kvleaf_status kvleaf_arena_over_dlpack(const kvleaf_geometry* geometry,
                                       struct DLManagedTensor* memory, kvleaf_arena** out);

/* Address and size of the whole arena; of a device's memory, as the device knows it. */
kvleaf_status kvleaf_arena_bytes(const kvleaf_arena* arena, void** out_data, uint64_t* out_bytes);
/* Address of one block's data. */
kvleaf_status kvleaf_arena_page(const kvleaf_arena* arena, uint32_t leaf, uint32_t block,
                                void** out_data);
/* The pages of a leaf as a DLPack tensor [blocks + 1, page_shape...]: a block id is an index, 0 the
 * null page. strides[0] is the page stride in elements, the rest is contiguous. page_shape:
 * elements of one page; rank 0: all of them in one dimension. page_offset: bytes in the page where
 * they begin. dtype: default: uint8. The consumer calls the tensor's deleter. */
kvleaf_status kvleaf_arena_view(const kvleaf_arena* arena, uint32_t leaf, kvleaf_dtype dtype,
                                const int64_t* page_shape, size_t rank, uint64_t page_offset,
                                struct DLManagedTensor** out);

/* Gives memory of these ranges back to the system, and takes it again, zeroed: what
 * kvleaf_pool_resize names. Of KVLEAF_MEMORY_HOST that kvleaf_arena_create made only; touching what
 * is unmapped ends the process. *out_bytes: those that changed hands, whole pages of the system. */
kvleaf_status kvleaf_arena_unmap(const kvleaf_arena* arena, const kvleaf_byte_range* ranges,
                                 size_t count, uint64_t* out_bytes);
kvleaf_status kvleaf_arena_map(const kvleaf_arena* arena, const kvleaf_byte_range* ranges,
                               size_t count, uint64_t* out_bytes);

/* ---- pool --------------------------------------------------------------------------------------
 */

/* Blocks of every leaf out of one arena of huge blocks. It moves no bytes. */
typedef struct kvleaf_pool kvleaf_pool;

/* max_huge_blocks: how far kvleaf_pool_resize may grow it; 0: not beyond the geometry. */
kvleaf_status kvleaf_pool_create(const kvleaf_geometry* geometry, uint64_t max_huge_blocks,
                                 kvleaf_pool** out);
/* Does nothing for a pool that is a manager's. */
void kvleaf_pool_destroy(kvleaf_pool* pool);
/* Borrowed. Of all huge blocks that may ever be in service. */
kvleaf_status kvleaf_pool_geometry(const kvleaf_pool* pool, const kvleaf_geometry** out);

typedef int32_t kvleaf_fate;
enum {
  KVLEAF_FATE_CACHE = 0,  /* meant to stay findable */
  KVLEAF_FATE_REQUEST = 1 /* gone with its request */
};

/* One leaf's share of a joint demand. */
typedef struct kvleaf_demand {
  uint32_t leaf;
  kvleaf_fate fate;
  uint64_t blocks;
  int64_t hint; /* as of kvleaf_pool_allocate */
} kvleaf_demand;

/* One block, live with one reference. hint: the huge block this request last took from, -1: none;
 * ignored when useless. KVLEAF_POOL_EXHAUSTED when the joint rule refuses it. */
kvleaf_status kvleaf_pool_allocate(kvleaf_pool* pool, uint32_t leaf, kvleaf_fate fate, int64_t hint,
                                   uint32_t* out_block);
/* `count` blocks of one leaf or none. */
kvleaf_status kvleaf_pool_allocate_many(kvleaf_pool* pool, uint32_t leaf, size_t count,
                                        kvleaf_fate fate, int64_t hint, uint32_t* out_blocks);
/* All or nothing: out_blocks[0 … block_count) receives the blocks of demand[0], then of demand[1],
 * …; block_count must be their sum. */
kvleaf_status kvleaf_pool_allocate_all(kvleaf_pool* pool, const kvleaf_demand* demand,
                                       size_t demand_count, uint32_t* out_blocks,
                                       size_t block_count);
/* The same rule without side effects: wanted[i] blocks of leaf i, none of those left out. */
kvleaf_status kvleaf_pool_can_allocate(const kvleaf_pool* pool, const uint64_t* wanted,
                                       size_t leaf_count, uint32_t* out_fits);

/* Returns one reference. The last makes the block cached if it is committed, else clean. */
kvleaf_status kvleaf_pool_free(kvleaf_pool* pool, uint32_t leaf, uint32_t block);
kvleaf_status kvleaf_pool_free_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                    size_t count);
/* One more reference; makes a cached block live. value: its place in the order of eviction, least
 * first; null: the time of the call, unless it was committed with a value. */
kvleaf_status kvleaf_pool_touch(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                const uint64_t* value);
kvleaf_status kvleaf_pool_touch_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                     size_t count, const uint64_t* value);
kvleaf_status kvleaf_pool_references(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                     uint32_t* out);

/* What the owner knows a committed block by. */
typedef struct kvleaf_key {
  uint8_t bytes[16];
} kvleaf_key;

/* Makes a live block findable under `key`. value: as of kvleaf_pool_touch. */
kvleaf_status kvleaf_pool_commit(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                 const kvleaf_key* key, const uint64_t* value);
/* values: one per block, or null. */
kvleaf_status kvleaf_pool_commit_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                      const kvleaf_key* keys, size_t count, const uint64_t* values);
kvleaf_status kvleaf_pool_revalue(kvleaf_pool* pool, uint32_t leaf, uint32_t block, uint64_t value);
kvleaf_status kvleaf_pool_value(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                uint64_t* out);
/* Another key for a committed block, its value unchanged. */
kvleaf_status kvleaf_pool_rekey(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                const kvleaf_key* key);
/* No longer findable: a cached block becomes clean, a live one stays live. */
kvleaf_status kvleaf_pool_uncommit(kvleaf_pool* pool, uint32_t leaf, uint32_t block);
kvleaf_status kvleaf_pool_committed(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                    uint32_t* out);
/* *out_block receives 0, the null block, where nothing is committed under the key. */
kvleaf_status kvleaf_pool_find(const kvleaf_pool* pool, uint32_t leaf, const kvleaf_key* key,
                               uint32_t* out_block);

/* Told once of each evicted block, after it ceased to be findable and before it is used again. It
 * may call uncommit, revalue, rekey and what only asks. A status other than KVLEAF_OK makes the
 * allocation fail with KVLEAF_CALLBACK_ERROR, nothing taken (evictions stay). */
typedef kvleaf_status (*kvleaf_on_evict)(void* user_data, uint32_t leaf, uint32_t block,
                                         const kvleaf_key* key);
/* callback: null: none. user_data must live as long as it. Refused for a manager's pool. */
kvleaf_status kvleaf_pool_on_evict(kvleaf_pool* pool, kvleaf_on_evict callback, void* user_data);

typedef struct kvleaf_block_move {
  uint32_t leaf;
  uint32_t src;
  uint32_t dst;
} kvleaf_block_move;

/* Copies, of at most max_bytes, that would empty a huge block of the leaf's page class; none where
 * there is no such set. Changes nothing. */
kvleaf_status kvleaf_pool_plan_compaction(kvleaf_pool* pool, uint32_t leaf, uint64_t max_bytes,
                                          const kvleaf_block_move** out, size_t* count);
/* Everything known of src belongs to dst. To be called after the bytes were copied. */
kvleaf_status kvleaf_pool_move(kvleaf_pool* pool, uint32_t leaf, uint32_t src, uint32_t dst);
/* Another number of huge blocks in service. The bytes may be unmapped (shrinking) or must be
 * mapped (growing). KVLEAF_POOL_EXHAUSTED names the least number possible. */
kvleaf_status kvleaf_pool_resize(kvleaf_pool* pool, uint64_t huge_blocks,
                                 const kvleaf_byte_range** out, size_t* count);

typedef struct kvleaf_pool_totals {
  size_t struct_size;
  uint64_t huge_blocks; /* in service: empty + claimed + idle */
  uint64_t empty;
  uint64_t claimed;
  uint64_t idle;
  uint64_t retyped; /* huge blocks taken from one page class for another, since it was made */
  uint64_t metadata_bytes;
} kvleaf_pool_totals;

typedef struct kvleaf_leaf_stats {
  size_t struct_size;
  uint64_t live;   /* blocks */
  uint64_t cached; /* blocks */
  uint64_t clean;  /* blocks of its page class */
  uint64_t padding_bytes;
  uint64_t evicted; /* blocks, since the pool was made */
} kvleaf_leaf_stats;

kvleaf_status kvleaf_pool_stats(const kvleaf_pool* pool, kvleaf_pool_totals* out);
kvleaf_status kvleaf_pool_leaf_stats(const kvleaf_pool* pool, uint32_t leaf,
                                     kvleaf_leaf_stats* out);
/* Recounts everything. KVLEAF_INVARIANT_ERROR names the first broken equation. */
kvleaf_status kvleaf_pool_audit(const kvleaf_pool* pool);

/* ---- requests ----------------------------------------------------------------------------------
 */

/* Requests, their rows of blocks in every leaf, and what they share. Ids are the caller's. */
typedef struct kvleaf_manager kvleaf_manager;

typedef int32_t kvleaf_retention;
enum {
  KVLEAF_RETENTION_DEFAULT = 0,
  KVLEAF_RETENTION_TAIL = 1,   /* ends of prompts and sequences, and junctions */
  KVLEAF_RETENTION_DENSE = 2,  /* every boundary */
  KVLEAF_RETENTION_SPACED = 3, /* powers of two of pages from both ends, and tail */
  KVLEAF_RETENTION_EVERY = 4   /* every retention_tokens tokens, and tail */
};
typedef int32_t kvleaf_eviction;
enum { KVLEAF_EVICTION_DEFAULT = 0, KVLEAF_EVICTION_VALUE = 1, KVLEAF_EVICTION_LRU = 2 };
typedef int32_t kvleaf_hash;
enum { KVLEAF_HASH_DEFAULT = 0, KVLEAF_HASH_XXH3_128 = 1, KVLEAF_HASH_SHA256 = 2 };

typedef struct kvleaf_manager_options {
  size_t struct_size;
  uint64_t budget_bytes;           /* of the arena; unused where a geometry is given */
  uint32_t page_tokens;            /* boundaries are its multiples; 0: 16 */
  uint32_t max_len;                /* tokens of the longest request; required */
  uint32_t max_step_tokens;        /* of one request in one step; 0: 8,192 */
  uint32_t max_steps_in_flight;    /* 0: 2 */
  const kvleaf_geometry* geometry; /* null: planned; else of pages named like the leaves */
  uint32_t expected_tokens;        /* of a typical request: weighs leaves; 0: 2,048 */
  uint32_t disable_prefix_caching;
  kvleaf_retention retention;
  uint32_t retention_tokens;
  kvleaf_eviction eviction;
  kvleaf_hash hash;
  uint32_t has_seed; /* 0: random for xxh3_128, 0 for sha256 */
  uint32_t events;   /* 1: record for kvleaf_manager_take_events */
  uint64_t seed;
} kvleaf_manager_options;

kvleaf_status kvleaf_manager_create(kvleaf_leaf* const* leaves, size_t count,
                                    const kvleaf_manager_options* options, kvleaf_manager** out);
void kvleaf_manager_destroy(kvleaf_manager* manager);

kvleaf_status kvleaf_manager_geometry(const kvleaf_manager* manager, const kvleaf_geometry** out);
/* Borrowed. Its blocks are the manager's: to be asked, and freed by nobody else. */
kvleaf_status kvleaf_manager_pool(kvleaf_manager* manager, kvleaf_pool** out);
kvleaf_status kvleaf_manager_find_leaf(const kvleaf_manager* manager, const char* leaf_id,
                                       uint32_t* out_leaf);
kvleaf_status kvleaf_manager_tokens_per_page(const kvleaf_manager* manager, uint32_t leaf,
                                             uint32_t* out);
/* Tokens of the longest request that an empty pool serves, in chunks of max_step_tokens. */
kvleaf_status kvleaf_manager_longest_request(const kvleaf_manager* manager, uint32_t* out);

/* A media item whose placeholder tokens stand at [offset, offset + length) of the prompt. */
typedef struct kvleaf_media_item {
  uint32_t offset;
  uint32_t length;
  const void* digest; /* identity of its content */
  size_t digest_bytes;
  uint32_t whole; /* 1: its tokens attend to each other both ways: nothing ends inside it */
} kvleaf_media_item;

typedef struct kvleaf_admit_options {
  size_t struct_size;
  const void* salt; /* nothing is shared across salts */
  size_t salt_bytes;
  const char* adapter;        /* name and version, "a@2"; nothing is shared across; or null */
  const void* encoder_digest; /* identity of the encoder's input; null: no encoder */
  size_t encoder_digest_bytes;
  uint32_t encoder_tokens;
  uint32_t encoder_at;            /* text position from which the text depends on it */
  const kvleaf_media_item* media; /* ascending, not overlapping */
  size_t media_count;
  int32_t priority;   /* of its cached pages: higher ones stay longer */
  uint32_t guarantee; /* tokens it may grow to without being refused memory; 0: no promise */
  uint32_t has_addressable;
  uint32_t addressable; /* leading tokens that may be matched or committed */
  uint32_t partial;     /* 1: a hit may copy the common part of a page */
} kvleaf_admit_options;

/* How much longer the hit would be if that group lacked nothing. */
typedef struct kvleaf_group_loss {
  const char* group;
  uint32_t tokens;
} kvleaf_group_loss;

/* Pointers live until the next admit or probe of this manager. */
typedef struct kvleaf_admission {
  size_t struct_size;
  uint32_t hit_tokens;     /* leading tokens that need not be computed */
  uint32_t next_stop;      /* where the next chunk should end, in tokens; 0: anywhere */
  uint32_t encoder_cached; /* 1: no encoder run is needed */
  uint32_t lost_count;
  const kvleaf_group_loss* lost;
  const char* reason; /* why nothing hit, or what ended the hit; "" */
} kvleaf_admission;

/* Claims the longest prefix that every leaf can resume, and asks whether the rest would fit.
 * options and out: or null. KVLEAF_POOL_EXHAUSTED when it cannot be admitted now. */
kvleaf_status kvleaf_manager_admit(kvleaf_manager* manager, uint64_t request, const int32_t* tokens,
                                   size_t count, const kvleaf_admit_options* options,
                                   kvleaf_admission* out);
/* What admit would answer; claims nothing. */
kvleaf_status kvleaf_manager_probe(kvleaf_manager* manager, const int32_t* tokens, size_t count,
                                   const kvleaf_admit_options* options, kvleaf_admission* out);
/* Ids that became known; they may have been planned before. */
kvleaf_status kvleaf_manager_append(kvleaf_manager* manager, uint64_t request,
                                    const int32_t* tokens, size_t count);
/* Where the next chunk should end; 0: anywhere. */
kvleaf_status kvleaf_manager_next_stop(const kvleaf_manager* manager, uint64_t request,
                                       uint32_t* out);
/* The encoder's pages of this request are written. */
kvleaf_status kvleaf_manager_encoder_filled(kvleaf_manager* manager, uint64_t request);

typedef int32_t kvleaf_prefix;
enum { KVLEAF_PREFIX_KEEP = 0, KVLEAF_PREFIX_DROP = 1 };
/* Ends a request. addressable: tokens past which nothing of it stays findable; or null. */
kvleaf_status kvleaf_manager_release(kvleaf_manager* manager, uint64_t request,
                                     kvleaf_prefix prefix, const uint32_t* addressable);
/* Returns its blocks, keeps what is committed. Resumed by admit with all its tokens. */
kvleaf_status kvleaf_manager_preempt(kvleaf_manager* manager, uint64_t request);
/* `child` shares the parent's full pages and gets its own partly filled page, state and scratch. */
kvleaf_status kvleaf_manager_fork(kvleaf_manager* manager, uint64_t parent, uint64_t child);
/* Keeps the first `tokens` tokens. */
kvleaf_status kvleaf_manager_rewind(kvleaf_manager* manager, uint64_t request, uint32_t tokens);
/* Drops every commit; running requests go on and publish nothing computed before. */
kvleaf_status kvleaf_manager_reset_cache(kvleaf_manager* manager);

typedef struct kvleaf_step_request {
  uint64_t request;
  uint32_t new_tokens;
} kvleaf_step_request;
typedef struct kvleaf_block_copy {
  uint32_t leaf;
  uint32_t src;
  uint32_t dst;
} kvleaf_block_copy;
typedef struct kvleaf_zero_fill {
  uint32_t leaf;
  uint32_t block;
} kvleaf_zero_fill;
typedef struct kvleaf_refusal {
  uint64_t request;
  const char* why;
} kvleaf_refusal;

/* A forward that was begun. Pointers live until max_steps_in_flight further steps were begun.
 * Copies and zero fills are to run before the forward, in any order: sources are read as they were
 * before it. */
typedef struct kvleaf_step {
  size_t struct_size;
  uint64_t id;
  const uint64_t* served; /* requests, in the order given */
  size_t served_count;
  const kvleaf_refusal* refused; /* these changed nothing */
  size_t refused_count;
  const kvleaf_block_copy* copies;
  size_t copy_count;
  const kvleaf_zero_fill* zero_fills;
  size_t zero_fill_count;
} kvleaf_step;

/* Draws blocks for the next tokens of each request, in order. */
kvleaf_status kvleaf_manager_begin_step(kvleaf_manager* manager, const kvleaf_step_request* batch,
                                        size_t count, kvleaf_step* out);

/* Tokens of a step that stand, for a request whose drafts were rejected. */
typedef struct kvleaf_kept {
  uint64_t request;
  uint32_t tokens;
} kvleaf_kept;
typedef struct kvleaf_request_length {
  uint64_t request;
  uint32_t length;
} kvleaf_request_length;

/* The device is done with the oldest step in flight. kept: null with a count of 0. */
kvleaf_status kvleaf_manager_settle(kvleaf_manager* manager, uint64_t step, const kvleaf_kept* kept,
                                    size_t count);
/* The device work of `step`, and of all begun after it, failed. The array says which length each
 * request goes back to; out and count: or both null. */
kvleaf_status kvleaf_manager_abandon(kvleaf_manager* manager, uint64_t step,
                                     const kvleaf_request_length** out, size_t* count);

kvleaf_status kvleaf_manager_contains(const kvleaf_manager* manager, uint64_t request,
                                      uint32_t* out);
kvleaf_status kvleaf_manager_length(const kvleaf_manager* manager, uint64_t request, uint32_t* out);
kvleaf_status kvleaf_manager_computed(const kvleaf_manager* manager, uint64_t request,
                                      uint32_t* out); /* tokens of settled steps */
kvleaf_status kvleaf_manager_planned(const kvleaf_manager* manager, uint64_t request,
                                     uint32_t* out); /* the same, and of steps in flight */
/* In slot order, 0 where nothing is held. Until the next call that changes the manager. */
kvleaf_status kvleaf_manager_blocks(const kvleaf_manager* manager, uint64_t request, uint32_t leaf,
                                    const uint32_t** out, size_t* count);
/* The block of a state or scratch; 0 before the first step. */
kvleaf_status kvleaf_manager_live_block(const kvleaf_manager* manager, uint64_t request,
                                        uint32_t leaf, uint32_t* out_block);

typedef struct kvleaf_manager_totals {
  size_t struct_size;
  uint64_t requests; /* live */
  uint64_t admitted; /* since it was made; resumed ones not counted */
  uint64_t resumed;  /* admissions of preempted requests */
  uint64_t refused;  /* admissions */
  uint64_t prompt_tokens;
  uint64_t hit_tokens;
  uint64_t step_refusals;
  uint64_t preemptions;
  uint64_t committed_pages; /* findable and in nobody's use now */
  uint64_t segments;        /* nodes of the prefix tree */
  uint64_t twins;
  uint64_t checkpoints;
  uint64_t checkpoints_skipped;
  uint64_t quarantined; /* blocks waiting for a step to settle */
  uint64_t steps_in_flight;
  uint64_t metadata_bytes;
} kvleaf_manager_totals;

kvleaf_status kvleaf_manager_stats(const kvleaf_manager* manager, kvleaf_manager_totals* out);
/* Tokens by which each group shortened joint hits, summed over admissions. */
kvleaf_status kvleaf_manager_lost_tokens(const kvleaf_manager* manager, const char* group,
                                         uint64_t* out);
kvleaf_status kvleaf_manager_audit(const kvleaf_manager* manager);

typedef int32_t kvleaf_event_kind;
enum { KVLEAF_EVENT_STORED = 0, KVLEAF_EVENT_REMOVED = 1, KVLEAF_EVENT_CLEARED = 2 };
typedef struct kvleaf_event {
  kvleaf_event_kind kind;
  uint32_t tokens; /* covered up to the page's end */
  const char* group;
  const char* leaf;
  kvleaf_key key;
  kvleaf_key parent_key; /* of the page before it; zeros at the root */
} kvleaf_event;
/* Recorded since the last call, in order; the array lives until the next. */
kvleaf_status kvleaf_manager_take_events(kvleaf_manager* manager, const kvleaf_event** out,
                                         size_t* count);

/* ---- planner -----------------------------------------------------------------------------------
 */

/* One host set of staged arrays per step in flight, at fixed addresses, used in turn. */
typedef struct kvleaf_planner kvleaf_planner;

typedef struct kvleaf_planner_options {
  size_t struct_size;
  uint32_t max_batch;          /* rows, dummy rows included */
  uint32_t max_step_tokens;    /* tokens of all rows together */
  uint32_t max_encoder_tokens; /* of one row; 0: max_len or 8,192, whichever is more */
} kvleaf_planner_options;

kvleaf_status kvleaf_planner_create(kvleaf_manager* manager, const kvleaf_planner_options* options,
                                    kvleaf_planner** out);
void kvleaf_planner_destroy(kvleaf_planner* planner);

/* One forward's inputs. Valid, with all its arrays, until max_steps_in_flight further plans. */
typedef struct kvleaf_plan kvleaf_plan;

typedef struct kvleaf_plan_info {
  size_t struct_size;
  uint64_t step;
  const uint64_t* rows; /* the served requests in row order */
  size_t row_count;
  const kvleaf_refusal* refused; /* these left the batch */
  size_t refused_count;
  uint32_t batch;                  /* rows, dummy rows included */
  uint32_t num_tokens;             /* of all rows, one per dummy row */
  const int32_t* seq_lens;         /* [batch] */
  const int32_t* cu_seqlens_q;     /* [batch + 1] */
  const kvleaf_block_copy* copies; /* as of kvleaf_step */
  size_t copy_count;
  const kvleaf_zero_fill* zero_fills;
  size_t zero_fill_count;
} kvleaf_plan_info;

/* begin_step, plus the arrays. pad_to: rows to fill the batch to with dummy rows; 0: none. *out is
 * borrowed. */
kvleaf_status kvleaf_planner_plan(kvleaf_planner* planner, const kvleaf_step_request* batch,
                                  size_t count, uint32_t pad_to, const kvleaf_plan** out);
kvleaf_status kvleaf_planner_settle(kvleaf_planner* planner, uint64_t step, const kvleaf_kept* kept,
                                    size_t count);
/* out and count: or both null; as kvleaf_manager_abandon. */
kvleaf_status kvleaf_planner_abandon(kvleaf_planner* planner, uint64_t step,
                                     const kvleaf_request_length** out, size_t* count);

kvleaf_status kvleaf_plan_describe(const kvleaf_plan* plan, kvleaf_plan_info* out);
/* How many staged arrays a leaf has, and each of them. */
kvleaf_status kvleaf_plan_array_count(const kvleaf_plan* plan, uint32_t leaf, size_t* out);
kvleaf_status kvleaf_plan_array_at(const kvleaf_plan* plan, uint32_t leaf, size_t index,
                                   kvleaf_array* out);
/* The array named `key`: "block_table", "state_rows", … */
kvleaf_status kvleaf_plan_array(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                kvleaf_array* out);
/* [num_tokens]: block * slots_per_page + slot in the page; -1 is padding. Empty for leaves that are
 * not written token by token. */
kvleaf_status kvleaf_plan_slot_mapping(const kvleaf_plan* plan, uint32_t leaf, const int64_t** out,
                                       size_t* count);
/* Bytes of the array, counted from its first element, that differ from the previous plan. */
kvleaf_status kvleaf_plan_dirty(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                const kvleaf_byte_range** out, size_t* count);
/* The same entry by entry: three arrays of *count. Of int32 arrays of at most two dimensions. They
 * live until the next call of this function on this plan. */
kvleaf_status kvleaf_plan_changes(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                  const int32_t** rows, const int32_t** columns,
                                  const int32_t** values, size_t* count);

#ifdef __cplusplus
}
#endif

#endif /* KVLEAF_H */
