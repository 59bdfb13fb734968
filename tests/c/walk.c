/* Walks every function of kvleaf.h: what it answers, how it fails, and that a failure writes no
 * output and says why with the numbers. One argument: a folder of model configurations. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdlib.h>

#include "check.h"

/* ---- what the tests are made of ----------------------------------------------------------------
 */

static kvleaf_leaf* full_leaf(const char* id) {
  kvleaf_attention_options options = {.struct_size = sizeof options,
                                      .layers = 2,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .dtype = KVLEAF_FLOAT32,
                                      .tokens_per_page = 4};
  kvleaf_leaf* leaf = NULL;
  OK(kvleaf_full_attention_leaf(id, &options, &leaf));
  return leaf;
}

static kvleaf_leaf* window_leaf(const char* id, uint32_t window, uint32_t compact) {
  kvleaf_attention_options options = {.struct_size = sizeof options,
                                      .layers = 2,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .dtype = KVLEAF_FLOAT32,
                                      .tokens_per_page = 4};
  kvleaf_window_options reach = {.struct_size = sizeof reach, .window = window, .compact = compact};
  kvleaf_leaf* leaf = NULL;
  OK(kvleaf_sliding_window_leaf(id, &reach, &options, &leaf));
  return leaf;
}

static kvleaf_leaf* state_leaf(const char* id, kvleaf_state_table table) {
  static const uint32_t shape[2] = {4, 8};
  static const kvleaf_slab slabs[1] = {{"recurrent", shape, 2, KVLEAF_DTYPE_DEFAULT}};
  kvleaf_state_options options = {.struct_size = sizeof options,
                                  .layers = 3,
                                  .slabs = slabs,
                                  .slab_count = 1,
                                  .table = table,
                                  .tokens_per_page = 4};
  kvleaf_leaf* leaf = NULL;
  OK(kvleaf_recurrent_state_leaf(id, &options, &leaf));
  return leaf;
}

/* Geometry G-13 of the catalogue in small: pages of 64 and 128 bytes, ratios 2 and 1. */
static kvleaf_geometry* two_pages(uint64_t huge_blocks) {
  kvleaf_page_spec pages[2] = {
      {.struct_size = sizeof pages[0], .name = "small", .bytes_per_page = 64},
      {.struct_size = sizeof pages[0], .name = "large", .bytes_per_page = 128}};
  static const uint64_t ratios[2] = {2, 1};
  kvleaf_geometry* geometry = NULL;
  OK(kvleaf_geometry_by_hand(pages, 2, 128, huge_blocks, ratios, 0, &geometry));
  return geometry;
}

static kvleaf_key key_of(unsigned char byte) {
  kvleaf_key key;
  memset(key.bytes, byte, sizeof key.bytes);
  return key;
}

static kvleaf_manager* manager_of(kvleaf_leaf** leaves, size_t count, uint64_t budget) {
  kvleaf_manager_options options = {.struct_size = sizeof options,
                                    .budget_bytes = budget,
                                    .page_tokens = 4,
                                    .max_len = 256,
                                    .max_step_tokens = 64,
                                    .events = 1};
  kvleaf_manager* manager = NULL;
  OK(kvleaf_manager_create(leaves, count, &options, &manager));
  return manager;
}

static const int32_t* tokens_from(int32_t first) {
  static int32_t tokens[256];
  int i;
  for (i = 0; i < 256; ++i) tokens[i] = first + i;
  return tokens;
}

/* ---- versions and errors -----------------------------------------------------------------------
 */

static void* fail_elsewhere(void* message_before) {
  strcpy(message_before, kvleaf_last_error());
  (void)kvleaf_pool_audit(NULL);
  return strstr(kvleaf_last_error(), "pool is a null pointer") != NULL ? message_before : NULL;
}

static void versions_and_errors(void) {
  pthread_t thread;
  char before[64] = "x";
  void* right = NULL;
  uint32_t leaf = 77;
  CHECK(kvleaf_abi_version() == KVLEAF_ABI_VERSION);
  CHECK(strchr(kvleaf_version(), '.') != NULL);
  CHECK(strcmp(kvleaf_status_name(KVLEAF_POOL_EXHAUSTED), "pool exhausted") == 0);
  CHECK(strcmp(kvleaf_status_name(KVLEAF_OTHER_ERROR), "other error") == 0);
  CHECK(strcmp(kvleaf_status_name(KVLEAF_DEVICE_ERROR), "device error") == 0);
  CHECK(strcmp(kvleaf_status_name(-1), "unknown status") == 0);
  CHECK(strcmp(kvleaf_status_name(99), "unknown status") == 0);
  /* B-01: null handles and outputs. */
  FAILS(KVLEAF_INVALID_ARGUMENT, "geometry is a null pointer",
        kvleaf_geometry_find(NULL, "x", &leaf));
  CHECK(leaf == 77);
  /* Each thread has a message of its own. */
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, before) == 0);
  CHECK(pthread_join(thread, &right) == 0);
  CHECK(before[0] == '\0' && right == before);
  CHECK(strcmp(kvleaf_last_error(), "geometry is a null pointer") == 0);
  kvleaf_set_error(NULL);
  CHECK(strcmp(kvleaf_last_error(), "geometry is a null pointer") == 0);
  kvleaf_leaf_destroy(NULL);
  kvleaf_leaves_destroy(NULL, 0);
  kvleaf_geometry_destroy(NULL);
  kvleaf_pool_destroy(NULL);
  kvleaf_manager_destroy(NULL);
  kvleaf_planner_destroy(NULL);
}

/* ---- leaves ------------------------------------------------------------------------------------
 */

static uint32_t halves(void* user_data, uint32_t n) {
  ++*(int*)user_data;
  return n / 2;
}

static void patterns(void) {
  int calls = 0;
  kvleaf_slot_reach reach = {7, 7, 7};
  kvleaf_pattern pattern = {.kind = KVLEAF_PATTERN_WINDOW, .tokens = 1024, .head = 4};
  OK(kvleaf_pattern_reach(&pattern, 2000, 16, 0, &reach));
  CHECK(reach.head_end == 1 && reach.tail_begin == 977 / 16 && reach.end == 125);
  pattern.kind = KVLEAF_PATTERN_FULL;
  OK(kvleaf_pattern_reach(&pattern, 40, 16, 0, &reach)); /* L-01 */
  CHECK(reach.end - reach.tail_begin + reach.head_end == 3);
  pattern.kind = KVLEAF_PATTERN_CHUNK;
  pattern.tokens = 8;
  OK(kvleaf_pattern_reach(&pattern, 15, 4, 0, &reach)); /* W-05 */
  CHECK(reach.tail_begin == 2 && reach.end == 4);
  pattern.kind = KVLEAF_PATTERN_POINT;
  OK(kvleaf_pattern_reach(&pattern, 8, 4, 0, &reach));
  CHECK(reach.tail_begin == 1 && reach.end >= 2);
  pattern.kind = KVLEAF_PATTERN_ENCODER;
  OK(kvleaf_pattern_reach(&pattern, 3, 32, 1500, &reach)); /* */
  CHECK(reach.end == 47);
  pattern.kind = KVLEAF_PATTERN_NONE;
  OK(kvleaf_pattern_reach(&pattern, 3, 32, 0, &reach));
  CHECK(reach.head_end == 0 && reach.tail_begin == reach.end);
  pattern.kind = KVLEAF_PATTERN_CUSTOM;
  pattern.tail_begin = halves;
  pattern.user_data = &calls;
  pattern.head = 0;
  OK(kvleaf_pattern_reach(&pattern, 64, 16, 0, &reach));
  CHECK(reach.tail_begin == 2 && calls > 0);

  memset(&reach, 7, sizeof reach);
  pattern.kind = 7;
  FAILS(KVLEAF_INVALID_ARGUMENT, "pattern kind is 7|0 to 6",
        kvleaf_pattern_reach(&pattern, 1, 1, 0, &reach));
  pattern.kind = KVLEAF_PATTERN_WINDOW;
  pattern.tokens = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "0", kvleaf_pattern_reach(&pattern, 1, 1, 0, &reach));
  pattern.kind = KVLEAF_PATTERN_CUSTOM;
  pattern.tail_begin = NULL;
  FAILS(KVLEAF_INVALID_ARGUMENT, "", kvleaf_pattern_reach(&pattern, 1, 1, 0, &reach));
  FAILS(KVLEAF_INVALID_ARGUMENT, "pattern", kvleaf_pattern_reach(NULL, 1, 1, 0, &reach));
  CHECK(reach.head_end == 0x07070707 && reach.end == 0x07070707);
}

static void describe(const kvleaf_leaf* leaf, const char* id, const char* group, uint64_t bytes,
                     kvleaf_writing writing, uint32_t cacheable) {
  kvleaf_leaf_info info = {.struct_size = sizeof info};
  OK(kvleaf_leaf_describe(leaf, &info));
  CHECK(strcmp(info.leaf_id, id) == 0);
  CHECK(strcmp(info.group, group) == 0);
  CHECK(info.bytes_per_page == bytes);
  CHECK(info.writing == writing);
  CHECK(info.cacheable == cacheable);
}

static void shipped_leaves(void) {
  kvleaf_attention_options options = {.struct_size = sizeof options,
                                      .layers = 2,
                                      .kv_heads = 4,
                                      .head_dim = 8,
                                      .tokens_per_page = 16};
  kvleaf_latent_options latent = {
      .struct_size = sizeof latent, .layers = 3, .width = 10, .tokens_per_page = 64};
  kvleaf_window_options window = {.struct_size = sizeof window, .window = 100, .sinks = 4};
  kvleaf_state_options state = {.struct_size = sizeof state, .layers = 1};
  kvleaf_leaf_info info = {.struct_size = sizeof info};
  kvleaf_leaf *leaf = NULL, *other = NULL;
  uint32_t blocks = 99;

  OK(kvleaf_full_attention_leaf("full", &options, &leaf));
  describe(leaf, "full", "full", 2 * 16 * 2 * 4 * 8 * 2, KVLEAF_WRITING_APPEND, 1);
  OK(kvleaf_leaf_blocks_to_reserve(leaf, 10, 16, 0, 1, &blocks));
  CHECK(blocks == 10);
  FAILS(KVLEAF_INVALID_ARGUMENT, "enable_prefix_caching is 2",
        kvleaf_leaf_blocks_to_reserve(leaf, 9, 16, 2, 1, &blocks));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf", kvleaf_leaf_blocks_to_reserve(NULL, 9, 16, 0, 1, &blocks));
  CHECK(blocks == 10);
  OK(kvleaf_scales_leaf(leaf, 4, KVLEAF_DTYPE_DEFAULT, &other));
  describe(other, "full.scales", "full", 2 * 16 * 2 * 4 * 2 * 4, KVLEAF_WRITING_APPEND, 1);
  kvleaf_leaf_destroy(other);
  other = NULL;
  FAILS(KVLEAF_INVALID_ARGUMENT, "full|3", kvleaf_scales_leaf(leaf, 3, 0, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "dtype is 10", kvleaf_scales_leaf(leaf, 4, 10, &other));
  kvleaf_leaf_destroy(leaf);
  leaf = NULL;

  options.has_value_head_dim = 1;
  options.value_head_dim = 0; /* V is K */
  options.dtype = KVLEAF_FLOAT8_E4M3;
  OK(kvleaf_chunked_attention_leaf("chunk", 8192, &options, &leaf));
  describe(leaf, "chunk", "chunk_8192", 2 * 16 * 4 * 8, KVLEAF_WRITING_APPEND, 1);
  kvleaf_leaf_destroy(leaf);
  OK(kvleaf_sliding_window_leaf("window", &window, &options, &leaf));
  describe(leaf, "window", "window_100_sinks_4", 2 * 16 * 4 * 8, KVLEAF_WRITING_APPEND, 1);
  OK(kvleaf_leaf_blocks_to_reserve(leaf, 1000, 16, 0, 1, &blocks));
  CHECK(blocks == 1 + 8); /* L-04: ceil(4/16) + ceil(99/16) + 1 */
  kvleaf_leaf_destroy(leaf);
  OK(kvleaf_latent_attention_leaf("latent", &latent, &leaf));
  describe(leaf, "latent", "full", 3 * 64 * 10 * 2, KVLEAF_WRITING_APPEND, 1);
  kvleaf_leaf_destroy(leaf);
  OK(kvleaf_cross_attention_leaf("cross", &options, NULL, &leaf));
  describe(leaf, "cross", "encoder", 2 * 16 * 4 * 8, KVLEAF_WRITING_WRITE_ONCE, 1);
  kvleaf_leaf_destroy(leaf);
  OK(kvleaf_scratch_leaf("work", 1000, 1, "mine", &leaf));
  describe(leaf, "work", "mine", 1000, KVLEAF_WRITING_PRIVATE, 0);
  FAILS(KVLEAF_INVALID_ARGUMENT, "work|no attention leaf", kvleaf_scales_leaf(leaf, 4, 0, &other));
  kvleaf_leaf_destroy(leaf);
  OK(kvleaf_scratch_leaf("work", 1000, 0, NULL, &leaf));
  OK(kvleaf_leaf_describe(leaf, &info));
  CHECK(info.stride_alignment == 0 && strcmp(info.group, "scratch") == 0);
  kvleaf_leaf_destroy(leaf);
  leaf = state_leaf("state", KVLEAF_STATE_TABLE_DEFAULT);
  describe(leaf, "state", "state", 3 * 4 * 8 * 4, KVLEAF_WRITING_IN_PLACE, 1);
  OK(kvleaf_leaf_describe(leaf, &info));
  CHECK(info.stride_alignment == 256 && info.layers == 3 && info.rollback == 0 &&
        info.tokens_per_page == 4 && info.state_kernel == KVLEAF_KERNEL_IN_PLACE);
  OK(kvleaf_leaf_blocks_to_reserve(leaf, 1000, 16, 1, 1, &blocks)); /* L-05 */
  CHECK(blocks == 2);
  kvleaf_leaf_destroy(leaf);

  /* L-12, and what C alone can get wrong. */
  leaf = NULL;
  options.tokens_per_page = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "full", kvleaf_full_attention_leaf("full", &options, &leaf));
  options.tokens_per_page = 16;
  options.slots_per_page = 5;
  FAILS(KVLEAF_INVALID_ARGUMENT, "5|16", kvleaf_full_attention_leaf("full", &options, &leaf));
  options.slots_per_page = 0;
  options.dtype = -1;
  FAILS(KVLEAF_INVALID_ARGUMENT, "dtype is -1|0 to 9",
        kvleaf_full_attention_leaf("full", &options, &leaf));
  options.dtype = 0;
  options.table = 3;
  FAILS(KVLEAF_INVALID_ARGUMENT, "table is 3|0 to 2",
        kvleaf_chunked_attention_leaf("c", 1, &options, &leaf));
  options.table = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "", kvleaf_chunked_attention_leaf("c", 0, &options, &leaf));
  window.window = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "w", kvleaf_sliding_window_leaf("w", &window, &options, &leaf));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf_id", kvleaf_full_attention_leaf(NULL, &options, &leaf));
  FAILS(KVLEAF_INVALID_ARGUMENT, "options", kvleaf_latent_attention_leaf("x", NULL, &leaf));
  FAILS(KVLEAF_INVALID_ARGUMENT, "options", kvleaf_cross_attention_leaf("x", NULL, NULL, &leaf));
  FAILS(KVLEAF_INVALID_ARGUMENT, "out", kvleaf_full_attention_leaf("x", &options, NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "work", kvleaf_scratch_leaf("work", 0, 1, NULL, &leaf));
  FAILS(KVLEAF_INVALID_ARGUMENT, "s", kvleaf_recurrent_state_leaf("s", &state, &leaf));
  state.slab_count = 2;
  FAILS(KVLEAF_INVALID_ARGUMENT, "slabs|2", kvleaf_recurrent_state_leaf("s", &state, &leaf));
  state.table = 4;
  FAILS(KVLEAF_INVALID_ARGUMENT, "4", kvleaf_recurrent_state_leaf("s", &state, &leaf));
  options.struct_size = 8;
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size of options is 8",
        kvleaf_full_attention_leaf("x", &options, &leaf));
  CHECK(leaf == NULL && other == NULL);
  memset(&info, 0, sizeof info);
  leaf = full_leaf("f");
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size of out is 0", kvleaf_leaf_describe(leaf, &info));
  CHECK(info.leaf_id == NULL);
  kvleaf_leaf_destroy(leaf);
}

static void staged_inputs(void) {
  kvleaf_leaf* leaf = window_leaf("window", 8, 1);
  kvleaf_leaf* rows = state_leaf("state", KVLEAF_STATE_ROWS);
  kvleaf_staged_input inputs[8];
  size_t count = 99;
  OK(kvleaf_leaf_staged_input_shapes(leaf, 3, 5, inputs, 8, &count));
  CHECK(count == 2 && strcmp(inputs[0].key, "block_table") == 0 && inputs[0].rank == 2 &&
        inputs[0].shape[0] == 3 && inputs[0].shape[1] == 5 && inputs[0].shape[2] == 0 &&
        inputs[0].dtype == KVLEAF_INT32);
  CHECK(strcmp(inputs[1].key, "first_slot") == 0 && inputs[1].rank == 1);
  count = 99;
  FAILS(KVLEAF_INVALID_ARGUMENT, "room for 1|there are 2",
        kvleaf_leaf_staged_input_shapes(leaf, 3, 5, inputs, 1, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "room for 0",
        kvleaf_leaf_staged_input_shapes(leaf, 3, 5, NULL, 8, &count));
  CHECK(count == 99);

  {
    int32_t table[2][4] = {{7, 7, 7, 7}, {7, 7, 7, 7}};
    int32_t first[2] = {7, 7};
    static const uint32_t blocks[5] = {0, 0, 11, 12, 13};
    kvleaf_row_plan plans[2];
    kvleaf_array arrays[2] = {{"block_table", KVLEAF_INT32, 2, table, {2, 4, 0, 0}, {4, 1, 0, 0}},
                              {"first_slot", KVLEAF_INT32, 1, first, {2, 0, 0, 0}, {1, 0, 0, 0}}};
    plans[0].blocks = blocks, plans[0].count = 5;
    plans[1].blocks = NULL, plans[1].count = 0;
    FAILS(KVLEAF_PLAN_SHAPE_ERROR, "", kvleaf_leaf_write_staged_inputs(leaf, plans, 2, arrays, 1));
    arrays[1].rank = 5;
    FAILS(KVLEAF_INVALID_ARGUMENT, "rank of an array is 5",
          kvleaf_leaf_write_staged_inputs(leaf, plans, 2, arrays, 2));
    arrays[1].rank = 1;
    plans[1].count = 1;
    FAILS(KVLEAF_INVALID_ARGUMENT, "blocks is a null pointer",
          kvleaf_leaf_write_staged_inputs(leaf, plans, 2, arrays, 2));
    plans[1].count = 0;
    CHECK(table[0][0] == 7 && first[1] == 7);
    OK(kvleaf_leaf_write_staged_inputs(leaf, plans, 2, arrays, 2));
    CHECK(first[0] == 2 && table[0][0] == 11 && table[0][2] == 13 && table[0][3] == 0 &&
          table[1][0] == 0);
  }
  {
    kvleaf_bound_rows span[2], from[2], to[2];
    count = 99;
    OK(kvleaf_leaf_bound_row_span(rows, 5, span, 2, &count)); /* N-10: 3 layers, 3 rows a block */
    CHECK(count == 1 && strcmp(span[0].key, "recurrent") == 0 && span[0].begin == 15 &&
          span[0].end == 18);
    OK(kvleaf_leaf_bound_row_copies(rows, 1, 2, from, to, 2, &count));
    CHECK(count == 1 && from[0].begin == 3 && to[0].begin == 6 && to[0].end == 9);
    OK(kvleaf_leaf_bound_row_span(leaf, 5, NULL, 0, &count));
    CHECK(count == 0);
    count = 99;
    FAILS(KVLEAF_INVALID_ARGUMENT, "room for 0",
          kvleaf_leaf_bound_row_span(rows, 5, span, 0, &count));
    FAILS(KVLEAF_INVALID_ARGUMENT, "room for 0",
          kvleaf_leaf_bound_row_copies(rows, 1, 2, from, NULL, 2, &count));
    CHECK(count == 99);
  }
  kvleaf_leaf_destroy(leaf);
  kvleaf_leaf_destroy(rows);
}

static void configurations(const char* folder) {
  char path[1024];
  kvleaf_leaf** leaves = NULL;
  size_t count = 0;
  kvleaf_leaf_info info = {.struct_size = sizeof info};
  kvleaf_leaves_options options = {.struct_size = sizeof options, .kv_dtype = KVLEAF_INT8};
  const char* json =
      "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
      "\"num_attention_heads\": 4, \"num_key_value_heads\": 2}";
  snprintf(path, sizeof path, "%s/gemma-3-27b.json", folder);
  OK(kvleaf_leaves_from_config(path, NULL, &leaves, &count)); /* M-01 */
  CHECK(count == 2);
  if (count == 2) {
    OK(kvleaf_leaf_describe(leaves[0], &info));
    CHECK(info.bytes_per_page == 1310720 || info.bytes_per_page == 6815744);
    CHECK(info.layers == 10 || info.layers == 52);
  }
  kvleaf_leaves_destroy(leaves, count);

  OK(kvleaf_leaves_from_json(json, strlen(json), NULL, &leaves, &count));
  CHECK(count == 1);
  OK(kvleaf_leaf_describe(leaves[0], &info));
  CHECK(info.bytes_per_page == 2 * 16 * 2 * 2 * 16 * 2);
  kvleaf_leaves_destroy(leaves, count);
  options.scales_granularity = 8;
  options.tokens_per_page = 32;
  OK(kvleaf_leaves_from_json(json, strlen(json), &options, &leaves, &count));
  CHECK(count == 2);
  OK(kvleaf_leaf_describe(leaves[0], &info));
  CHECK(info.bytes_per_page == 2 * 32 * 2 * 2 * 16);
  kvleaf_leaves_destroy(leaves, count);

  leaves = NULL, count = 99;
  options.tensor_parallel = 1;
  options.kv_dtype = 12;
  FAILS(KVLEAF_INVALID_ARGUMENT, "kv_dtype is 12",
        kvleaf_leaves_from_json(json, strlen(json), &options, &leaves, &count));
  FAILS(KVLEAF_CONFIG_ERROR, "model_type", kvleaf_leaves_from_json("{}", 2, NULL, &leaves, &count));
  snprintf(path, sizeof path, "%s/no-such-model.json", folder);
  FAILS(KVLEAF_CONFIG_ERROR, "no-such-model.json",
        kvleaf_leaves_from_config(path, NULL, &leaves, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "path", kvleaf_leaves_from_config(NULL, NULL, &leaves, &count));
  CHECK(leaves == NULL && count == 99);
}

/* ---- geometry ----------------------------------------------------------------------------------
 */

static void geometries(void) {
  kvleaf_page_spec pages[3] = {{.struct_size = sizeof pages[0],
                                .name = "a",
                                .bytes_per_page = 3145728,
                                .stride_alignment = 512,
                                .weight = .5},
                               {.struct_size = sizeof pages[0],
                                .name = "b",
                                .bytes_per_page = 663552,
                                .stride_alignment = 36864,
                                .weight = .05},
                               {.struct_size = sizeof pages[0],
                                .name = "c",
                                .bytes_per_page = 9437184,
                                .stride_alignment = 524288,
                                .weight = .45}};
  kvleaf_geometry *geometry = NULL, *other = NULL;
  kvleaf_geometry_info info = {.struct_size = sizeof info};
  kvleaf_leaf_geometry leaf = {.struct_size = sizeof leaf};
  kvleaf_byte_range range = {7, 7};
  uint32_t number = 77;
  static const uint64_t ratios[2] = {2, 3};

  OK(kvleaf_plan_geometry(51ull << 20, pages, 3, 0, 1, &geometry)); /* G-03 */
  OK(kvleaf_geometry_describe(geometry, &info));
  CHECK(info.huge_bytes == 9437184 && info.huge_blocks == 4 && info.null_bytes == 9437184 &&
        info.leaves == 3 && info.page_classes == 3 && info.budget_bytes == 51ull << 20 &&
        info.arena_bytes == 5 * 9437184ull && info.cost > 0 && info.cost < 1);
  OK(kvleaf_geometry_leaf(geometry, 1, &leaf));
  CHECK(strcmp(leaf.name, "b") == 0 && leaf.ratio == 8 && leaf.page_stride == 1179648 &&
        leaf.blocks == 32 && leaf.base_offset == 9437184 - 1179648 && leaf.has_ceiling == 0);
  OK(kvleaf_geometry_find(geometry, "c", &number));
  CHECK(number == 2);
  OK(kvleaf_geometry_byte_range(geometry, 1, 9, &range));
  CHECK(range.begin == 2 * 9437184ull && range.end == range.begin + 663552);
  OK(kvleaf_geometry_huge_block_of(geometry, 1, 9, &number));
  CHECK(number == 1);
  OK(kvleaf_geometry_resized(geometry, 7, &other));
  OK(kvleaf_geometry_describe(other, &info));
  CHECK(info.huge_blocks == 7);
  kvleaf_geometry_destroy(other);

  other = NULL, number = 77, range.begin = 7;
  FAILS(KVLEAF_GEOMETRY_ERROR, "37748736", /* 36 MiB, G-03 */
        kvleaf_plan_geometry((36ull << 20) - 1, pages, 3, 0, 1, &other));
  FAILS(KVLEAF_GEOMETRY_ERROR, "c",
        kvleaf_plan_geometry(51ull << 20, pages, 3, 1 << 20, 1, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "d|a, b, c", kvleaf_geometry_find(geometry, "d", &number));
  FAILS(KVLEAF_BLOCK_ERROR, "33", kvleaf_geometry_byte_range(geometry, 1, 33, &range));
  FAILS(KVLEAF_INVALID_ARGUMENT, "3", kvleaf_geometry_byte_range(geometry, 3, 1, &range));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_geometry_huge_block_of(geometry, 1, 0, &number));
  FAILS(KVLEAF_INVALID_ARGUMENT, "huge block", kvleaf_geometry_resized(geometry, 0, &other));
  FAILS(KVLEAF_GEOMETRY_ERROR, "", kvleaf_geometry_by_hand(pages, 2, 100, 3, ratios, 0, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "ratios",
        kvleaf_geometry_by_hand(pages, 2, 1, 3, NULL, 0, &other));
  leaf.ratio = 77;
  FAILS(KVLEAF_INVALID_ARGUMENT, "3", kvleaf_geometry_leaf(geometry, 3, &leaf));
  pages[1].struct_size = 8;
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size of pages is 8",
        kvleaf_plan_geometry(51ull << 20, pages, 3, 0, 1, &other));
  pages[1].struct_size = sizeof pages[0];
  pages[1].name = NULL;
  FAILS(KVLEAF_INVALID_ARGUMENT, "name of a page",
        kvleaf_plan_geometry(51ull << 20, pages, 3, 0, 1, &other));
  CHECK(other == NULL && number == 77 && range.begin == 7 && leaf.ratio == 77);
  kvleaf_geometry_destroy(geometry);
}

static void pages_of_leaves(void) {
  kvleaf_leaf* leaves[2] = {full_leaf("full"), state_leaf("state", 0)};
  kvleaf_page_spec pages[2] = {{.struct_size = sizeof pages[0]}, {.struct_size = sizeof pages[0]}};
  kvleaf_page_spec page = {.struct_size = sizeof page};
  OK(kvleaf_page_spec_of(leaves[1], &page));
  CHECK(strcmp(page.name, "state") == 0 && page.bytes_per_page == 384 &&
        page.stride_alignment == 256 && page.weight == 1 && page.one_per_request == 1);
  /* 512 slots of 512 bytes, and one state. */
  OK(kvleaf_page_specs(leaves, 2, 4, 2048, pages));
  CHECK(pages[0].weight == 512.0 * 512 && pages[1].weight == 384);
  memset(&page, 0, sizeof page);
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size", kvleaf_page_spec_of(leaves[1], &page));
  pages[0].weight = 77;
  pages[1].struct_size = sizeof pages[0] + 8;
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size", kvleaf_page_specs(leaves, 2, 4, 2048, pages));
  CHECK(page.name == NULL && pages[0].weight == 77);
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);
}

/* ---- arena -------------------------------------------------------------------------------------
 */

/* The beginning of DLPack's structures, as its document has them. */
struct DLManagedTensor {
  struct {
    void* data;
    struct {
      int32_t type, id;
    } device;
    int32_t ndim;
    struct {
      uint8_t code, bits;
      uint16_t lanes;
    } dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  } tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
};

static int released;
static void release(void* memory) {
  ++released;
  free(memory);
}

static void arenas(void) {
  kvleaf_geometry* geometry = two_pages(3); /* a null region of 128 bytes, then 3 times 128 */
  kvleaf_arena *arena = NULL, *other = NULL;
  struct DLManagedTensor *view = NULL, *whole = NULL;
  static const int64_t shape[2] = {4, 8}, wide[2] = {9, 8};
  const kvleaf_byte_range some = {0, 128}, beyond = {0, 1 << 20};
  uint64_t bytes = 7;
  void *data = NULL, *page = NULL;
  unsigned char* first;

  OK(kvleaf_arena_create(geometry, KVLEAF_MEMORY_HOST, 0, &arena));
  OK(kvleaf_arena_bytes(arena, &data, &bytes));
  CHECK(bytes == 512 && data != NULL);
  OK(kvleaf_arena_page(arena, 0, 1, &page));
  CHECK((char*)page - (char*)data == 128);
  memset(page, 42, 64);

  OK(kvleaf_arena_view(arena, 0, KVLEAF_BFLOAT16, shape, 2, 0, &view));
  CHECK(view->tensor.ndim == 3 && view->tensor.shape[0] == 7 && view->tensor.shape[1] == 4 &&
        view->tensor.shape[2] == 8 && view->tensor.strides[0] == 32 &&
        view->tensor.strides[1] == 8 && view->tensor.strides[2] == 1);
  CHECK(view->tensor.device.type == 1 && view->tensor.dtype.code == 4 &&
        view->tensor.dtype.bits == 16 && view->tensor.dtype.lanes == 1);
  OK(kvleaf_arena_unmap(arena, &some, 1, &bytes));
  CHECK(bytes == 0); /* less than a page of the system */
  OK(kvleaf_arena_map(arena, &some, 1, &bytes));
  CHECK(bytes == 0);

  bytes = 7;
  FAILS(KVLEAF_INVALID_ARGUMENT, "1048576|512", kvleaf_arena_unmap(arena, &beyond, 1, &bytes));
  FAILS(KVLEAF_INVALID_ARGUMENT, "1048576|512", kvleaf_arena_map(arena, &beyond, 1, &bytes));
  FAILS(KVLEAF_BLOCK_ERROR, "7", kvleaf_arena_page(arena, 0, 7, &page));
  FAILS(KVLEAF_INVALID_ARGUMENT, "[9, 8]|64 B",
        kvleaf_arena_view(arena, 0, KVLEAF_UINT8, wide, 2, 0, &whole));
  FAILS(KVLEAF_INVALID_ARGUMENT, "page_shape",
        kvleaf_arena_view(arena, 0, KVLEAF_UINT8, NULL, 2, 0, &whole));
  FAILS(KVLEAF_INVALID_ARGUMENT, "memory is 3", kvleaf_arena_create(geometry, 3, 0, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "device is 1",
        kvleaf_arena_create(geometry, KVLEAF_MEMORY_HOST, 1, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "device is -1",
        kvleaf_arena_create(geometry, KVLEAF_MEMORY_CUDA, -1, &other));
  FAILS(KVLEAF_DEVICE_ERROR, "512 B|CUDA device 4095",
        kvleaf_arena_create(geometry, KVLEAF_MEMORY_CUDA, 4095, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "arena is a null", kvleaf_arena_bytes(NULL, &data, &bytes));
  CHECK(other == NULL && whole == NULL && bytes == 7);

  /* A view keeps the memory of an arena that is gone. */
  first = (unsigned char*)view->tensor.data;
  kvleaf_arena_destroy(arena);
  CHECK(first[64] == 42 && first[0] == 0);
  view->deleter(view);

  /* Memory of the caller: kept by him when refused, given back once when done. */
  data = calloc(1, 512);
  FAILS(KVLEAF_INVALID_ARGUMENT, "511 B|512 B",
        kvleaf_arena_over(geometry, KVLEAF_MEMORY_HOST, 0, data, 511, release, data, &other));
  FAILS(KVLEAF_INVALID_ARGUMENT, "data is a null",
        kvleaf_arena_over(geometry, KVLEAF_MEMORY_HOST, 0, NULL, 512, release, data, &other));
  CHECK(other == NULL && released == 0);
  OK(kvleaf_arena_over(geometry, KVLEAF_MEMORY_HOST, 0, data, 512, release, data, &arena));
  OK(kvleaf_arena_page(arena, 1, 3, &page));
  CHECK((char*)page - (char*)data == 384);
  bytes = 7;
  FAILS(KVLEAF_INVALID_ARGUMENT, "unmap", kvleaf_arena_unmap(arena, &some, 1, &bytes));

  /* And as another framework's tensor. */
  OK(kvleaf_arena_view(arena, 1, KVLEAF_DTYPE_DEFAULT, NULL, 0, 0, &whole));
  CHECK(whole->tensor.ndim == 2 && whole->tensor.shape[0] == 4 && whole->tensor.shape[1] == 128);
  FAILS(KVLEAF_INVALID_ARGUMENT, "uint8 [4, 128]|uint8 [512]",
        kvleaf_arena_over_dlpack(geometry, whole, &other));
  CHECK(other == NULL);
  whole->tensor.ndim = 1; /* the whole arena as one row of bytes */
  whole->tensor.shape[0] = 512, whole->tensor.strides[0] = 1;
  OK(kvleaf_arena_over_dlpack(geometry, whole, &other));
  kvleaf_arena_destroy(arena);
  CHECK(released == 0);
  OK(kvleaf_arena_bytes(other, &page, &bytes));
  CHECK(page == data && bytes == 512);
  kvleaf_arena_destroy(other);
  CHECK(released == 1);
  kvleaf_arena_destroy(NULL);
  kvleaf_geometry_destroy(geometry);
}

/* ---- pool --------------------------------------------------------------------------------------
 */

struct evictions {
  kvleaf_pool* pool;
  int count;
  uint32_t leaf, block;
  kvleaf_key key;
  kvleaf_status inside, answer;
};

static kvleaf_status on_evict(void* user_data, uint32_t leaf, uint32_t block,
                              const kvleaf_key* key) {
  struct evictions* evictions = user_data;
  uint32_t ignored;
  ++evictions->count;
  evictions->leaf = leaf, evictions->block = block, evictions->key = *key;
  evictions->inside = kvleaf_pool_allocate(evictions->pool, 0, 0, -1, &ignored);
  if (evictions->answer != KVLEAF_OK) kvleaf_set_error("no more");
  return evictions->answer;
}

static void pool_blocks(void) {
  kvleaf_geometry* geometry = two_pages(3);
  const kvleaf_geometry* borrowed = NULL;
  kvleaf_geometry_info info = {.struct_size = sizeof info};
  kvleaf_pool* pool = NULL;
  kvleaf_pool_totals totals = {.struct_size = sizeof totals};
  kvleaf_leaf_stats stats = {.struct_size = sizeof stats};
  kvleaf_demand demand[2] = {{0, KVLEAF_FATE_CACHE, 2, -1}, {1, KVLEAF_FATE_REQUEST, 1, -1}};
  uint64_t wanted[2] = {0, 3};
  uint64_t value = 5;
  uint32_t block = 77, blocks[4] = {77, 77, 77, 77}, answer = 77;

  FAILS(KVLEAF_INVALID_ARGUMENT, "2|3", kvleaf_pool_create(geometry, 2, &pool));
  FAILS(KVLEAF_INVALID_ARGUMENT, "geometry", kvleaf_pool_create(NULL, 0, &pool));
  CHECK(pool == NULL);
  OK(kvleaf_pool_create(geometry, 0, &pool));
  kvleaf_geometry_destroy(geometry);
  OK(kvleaf_pool_geometry(pool, &borrowed));
  OK(kvleaf_geometry_describe(borrowed, &info));
  CHECK(info.huge_blocks == 3);

  OK(kvleaf_pool_can_allocate(pool, wanted, 2, &answer));
  CHECK(answer == 1);
  OK(kvleaf_pool_allocate(pool, 0, KVLEAF_FATE_REQUEST, -1, &block));
  CHECK(block >= 1 && block <= 6);
  OK(kvleaf_pool_can_allocate(pool, wanted, 2, &answer)); /* P-07 */
  CHECK(answer == 0);
  OK(kvleaf_pool_allocate_all(pool, demand, 2, blocks, 3));
  CHECK(blocks[0] != blocks[1] && blocks[2] >= 1 && blocks[2] <= 3);
  OK(kvleaf_pool_stats(pool, &totals));
  CHECK(totals.huge_blocks == 3 && totals.empty == 0 && totals.claimed == 3 && totals.idle == 0 &&
        totals.metadata_bytes > 0);
  OK(kvleaf_pool_leaf_stats(pool, 0, &stats));
  CHECK(stats.live == 3 && stats.cached == 0 && stats.clean == 1);

  /* Refusals write nothing and name what was wanted and what is there. */
  block = 77;
  FAILS(KVLEAF_POOL_EXHAUSTED, "1 of leaf 'large'|1 huge blocks|0 are empty or idle",
        kvleaf_pool_allocate(pool, 1, 0, -1, &block));
  blocks[3] = 77;
  FAILS(KVLEAF_POOL_EXHAUSTED, "4 of leaf 'small'",
        kvleaf_pool_allocate_many(pool, 0, 4, 0, -1, blocks + 3));
  FAILS(KVLEAF_POOL_EXHAUSTED, "2 of leaf 'small', 1 of leaf 'large'",
        kvleaf_pool_allocate_all(pool, demand, 2, blocks + 1, 3));
  FAILS(KVLEAF_POOL_EXHAUSTED, "18446744073709551615 of leaf 'small'", /* P-21 */
        kvleaf_pool_allocate_many(pool, 0, SIZE_MAX, 0, -1, blocks + 3));
  demand[1].leaf = 2;
  FAILS(KVLEAF_INVALID_ARGUMENT, "index 2|2 leaves",
        kvleaf_pool_allocate_all(pool, demand, 2, blocks + 1, 3));
  demand[1].leaf = 0, demand[1].blocks = 0, demand[0].blocks = 1;
  FAILS(KVLEAF_INVALID_ARGUMENT, "for 1 blocks|block_count is 2",
        kvleaf_pool_allocate_all(pool, demand, 2, blocks + 2, 2));
  demand[1].fate = 2;
  FAILS(KVLEAF_INVALID_ARGUMENT, "fate is 2",
        kvleaf_pool_allocate_all(pool, demand, 2, blocks + 2, 1));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 9", kvleaf_pool_allocate(pool, 9, 0, -1, &block));
  answer = 77;
  FAILS(KVLEAF_INVALID_ARGUMENT, "3|2", kvleaf_pool_can_allocate(pool, wanted, 3, &answer));
  CHECK(block == 77 && blocks[3] == 77 && blocks[1] != 77 && answer == 77);
  OK(kvleaf_pool_audit(pool));

  /* References. P-19. */
  OK(kvleaf_pool_touch(pool, 0, blocks[0], NULL));
  OK(kvleaf_pool_references(pool, 0, blocks[0], &answer));
  CHECK(answer == 2);
  OK(kvleaf_pool_free(pool, 0, blocks[0]));
  OK(kvleaf_pool_free_many(pool, 0, blocks, 2));
  FAILS(KVLEAF_BLOCK_ERROR, "free|small", kvleaf_pool_free(pool, 0, blocks[0]));
  FAILS(KVLEAF_BLOCK_ERROR, "null block", kvleaf_pool_free(pool, 0, 0));
  FAILS(KVLEAF_BLOCK_ERROR, "touch", kvleaf_pool_touch(pool, 0, blocks[1], &value));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_touch_many(pool, 0, blocks, 2, NULL));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_free_many(pool, 0, blocks, 2));
  OK(kvleaf_pool_audit(pool));
  OK(kvleaf_pool_allocate_many(pool, 0, 2, KVLEAF_FATE_CACHE, 0, blocks));
  OK(kvleaf_pool_touch_many(pool, 0, blocks, 2, NULL));
  OK(kvleaf_pool_free_many(pool, 0, blocks, 2));
  OK(kvleaf_pool_leaf_stats(pool, 0, &stats));
  CHECK(stats.live == 3);
  FAILS(KVLEAF_INVALID_ARGUMENT, "index 2", kvleaf_pool_leaf_stats(pool, 2, &stats));
  FAILS(KVLEAF_INVALID_ARGUMENT, "pool", kvleaf_pool_stats(NULL, &totals));
  CHECK(stats.live == 3);
  kvleaf_pool_destroy(pool);
}

static void pool_cache(void) {
  kvleaf_geometry* geometry = two_pages(1);
  kvleaf_pool* pool = NULL;
  struct evictions evictions = {0};
  kvleaf_key keys[2], found_not;
  uint64_t values[2] = {20, 10}, value = 77;
  uint32_t blocks[2] = {0, 0}, block = 77, answer = 77;
  keys[0] = key_of(1), keys[1] = key_of(2), found_not = key_of(3);
  OK(kvleaf_pool_create(geometry, 0, &pool));
  kvleaf_geometry_destroy(geometry);
  evictions.pool = pool;
  OK(kvleaf_pool_on_evict(pool, on_evict, &evictions));

  OK(kvleaf_pool_allocate_many(pool, 0, 2, KVLEAF_FATE_CACHE, -1, blocks));
  OK(kvleaf_pool_commit_many(pool, 0, blocks, keys, 2, values));
  OK(kvleaf_pool_committed(pool, 0, blocks[1], &answer));
  CHECK(answer == 1);
  OK(kvleaf_pool_value(pool, 0, blocks[1], &value));
  CHECK(value == 10);
  OK(kvleaf_pool_find(pool, 0, &keys[1], &block));
  CHECK(block == blocks[1]);
  OK(kvleaf_pool_find(pool, 0, &found_not, &block));
  CHECK(block == 0);
  OK(kvleaf_pool_rekey(pool, 0, blocks[1], &found_not));
  OK(kvleaf_pool_find(pool, 0, &found_not, &block));
  CHECK(block == blocks[1]);
  OK(kvleaf_pool_revalue(pool, 0, blocks[1], 30));
  value = 77, answer = 77;
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_commit(pool, 0, blocks[1], &keys[1], NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "key", kvleaf_pool_commit(pool, 0, blocks[1], NULL, NULL));
  FAILS(KVLEAF_BLOCK_ERROR, "null block", kvleaf_pool_value(pool, 0, 0, &value));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_revalue(pool, 0, 0, 1));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_rekey(pool, 0, 0, &keys[0]));
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_uncommit(pool, 0, 0));
  FAILS(KVLEAF_INVALID_ARGUMENT, "keys", kvleaf_pool_commit_many(pool, 0, blocks, NULL, 2, NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 5", kvleaf_pool_references(pool, 5, 1, &answer));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 5", kvleaf_pool_committed(pool, 5, 1, &answer));
  CHECK(value == 77 && answer == 77);

  /* P-04: the least valuable goes, its owner is told, and may not allocate from there. */
  OK(kvleaf_pool_free_many(pool, 0, blocks, 2));
  OK(kvleaf_pool_allocate(pool, 0, KVLEAF_FATE_CACHE, -1, &block));
  CHECK(block == blocks[0] && evictions.count == 1 && evictions.leaf == 0 &&
        evictions.block == blocks[0] && memcmp(&evictions.key, &keys[0], sizeof keys[0]) == 0);
  CHECK(evictions.inside == KVLEAF_INVALID_ARGUMENT);

  /* A-08, P-20: an owner that fails makes the allocation fail, and nothing is taken. */
  evictions.answer = 4242;
  block = 77;
  FAILS(KVLEAF_CALLBACK_ERROR, "on_evict|4242|no more",
        kvleaf_pool_allocate(pool, 0, KVLEAF_FATE_CACHE, -1, &block));
  CHECK(block == 77 && evictions.count == 2);
  OK(kvleaf_pool_audit(pool));
  OK(kvleaf_pool_on_evict(pool, NULL, NULL));
  OK(kvleaf_pool_allocate(pool, 0, KVLEAF_FATE_CACHE, -1, &block));
  OK(kvleaf_pool_commit(pool, 0, block, &keys[0], &value));
  OK(kvleaf_pool_uncommit(pool, 0, block));
  OK(kvleaf_pool_committed(pool, 0, block, &answer));
  CHECK(answer == 0);
  FAILS(KVLEAF_INVALID_ARGUMENT, "pool", kvleaf_pool_on_evict(NULL, on_evict, &evictions));
  FAILS(KVLEAF_INVALID_ARGUMENT, "key", kvleaf_pool_find(pool, 0, NULL, &block));
  kvleaf_pool_destroy(pool);
}

static void pool_arena(void) {
  kvleaf_geometry* geometry = two_pages(2);
  kvleaf_pool* pool = NULL;
  const kvleaf_byte_range* ranges = NULL;
  const kvleaf_block_move* moves = NULL;
  uint32_t blocks[4], src, dst, kept;
  size_t count = 99;
  OK(kvleaf_pool_create(geometry, 4, &pool));
  kvleaf_geometry_destroy(geometry);
  OK(kvleaf_pool_resize(pool, 4, &ranges, &count));
  CHECK(count == 1 && ranges[0].end - ranges[0].begin == 256);
  OK(kvleaf_pool_resize(pool, 2, &ranges, &count));
  CHECK(count == 1 && ranges[0].end - ranges[0].begin == 256);

  /* Two huge blocks half used: one move empties one. */
  OK(kvleaf_pool_allocate_many(pool, 0, 4, KVLEAF_FATE_CACHE, -1, blocks));
  OK(kvleaf_pool_free(pool, 0, blocks[0]));
  OK(kvleaf_pool_free(pool, 0, blocks[3]));
  OK(kvleaf_pool_plan_compaction(pool, 0, 1 << 20, &moves, &count));
  CHECK(count == 1 && moves[0].leaf == 0);
  src = moves[0].src, dst = moves[0].dst;
  CHECK((src == blocks[1] || src == blocks[2]) && (dst == blocks[0] || dst == blocks[3]));
  OK(kvleaf_pool_move(pool, 0, src, dst));
  OK(kvleaf_pool_references(pool, 0, dst, &kept));
  CHECK(kept == 1);
  FAILS(KVLEAF_BLOCK_ERROR, "", kvleaf_pool_move(pool, 0, src, dst));
  OK(kvleaf_pool_plan_compaction(pool, 0, 1 << 20, &moves, &count));
  CHECK(count == 0);
  ranges = NULL, count = 99;
  FAILS(KVLEAF_INVALID_ARGUMENT, "5|4", kvleaf_pool_resize(pool, 5, &ranges, &count));
  OK(kvleaf_pool_allocate(pool, 1, KVLEAF_FATE_CACHE, -1, &kept));
  FAILS(KVLEAF_POOL_EXHAUSTED, "2", kvleaf_pool_resize(pool, 1, &ranges, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 2", kvleaf_pool_plan_compaction(pool, 2, 1, &moves, &count));
  CHECK(ranges == NULL && count == 99);
  OK(kvleaf_pool_audit(pool));
  kvleaf_pool_destroy(pool);
}

/* ---- requests ----------------------------------------------------------------------------------
 */

/* One step of one request, settled. */
static void compute(kvleaf_manager* manager, uint64_t request, uint32_t new_tokens) {
  kvleaf_step_request row = {request, new_tokens};
  kvleaf_step step = {.struct_size = sizeof step};
  OK(kvleaf_manager_begin_step(manager, &row, 1, &step));
  CHECK(step.served_count == 1 && step.served[0] == request && step.refused_count == 0);
  OK(kvleaf_manager_settle(manager, step.id, NULL, 0));
}

static void manager_requests(void) {
  kvleaf_leaf* leaves[2] = {full_leaf("full"), window_leaf("window", 8, 0)};
  kvleaf_manager* manager = NULL;
  const kvleaf_geometry* geometry = NULL;
  kvleaf_pool* pool = NULL;
  kvleaf_admission admission = {.struct_size = sizeof admission};
  kvleaf_admit_options options = {.struct_size = sizeof options};
  kvleaf_manager_totals totals = {.struct_size = sizeof totals};
  kvleaf_manager_options bad = {
      .struct_size = sizeof bad, .budget_bytes = 64, .page_tokens = 4, .max_len = 256};
  const kvleaf_event* events = NULL;
  const uint32_t* blocks = NULL;
  uint64_t lost = 77;
  uint32_t number = 77, live = 77;
  size_t count = 99;

  FAILS(KVLEAF_GEOMETRY_ERROR, "64|full", kvleaf_manager_create(leaves, 2, &bad, &manager));
  bad.budget_bytes = 1 << 20, bad.max_len = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "max_len", kvleaf_manager_create(leaves, 2, &bad, &manager));
  bad.max_len = 256, bad.page_tokens = 3;
  FAILS(KVLEAF_INVALID_ARGUMENT, "full|4|3", kvleaf_manager_create(leaves, 2, &bad, &manager));
  bad.page_tokens = 4, bad.retention = 9;
  FAILS(KVLEAF_INVALID_ARGUMENT, "retention is 9",
        kvleaf_manager_create(leaves, 2, &bad, &manager));
  bad.retention = 0, bad.hash = 3;
  FAILS(KVLEAF_INVALID_ARGUMENT, "hash is 3", kvleaf_manager_create(leaves, 2, &bad, &manager));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaves", kvleaf_manager_create(NULL, 2, &bad, &manager));
  CHECK(manager == NULL);

  manager = manager_of(leaves, 2, 64 << 10);
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);
  OK(kvleaf_manager_geometry(manager, &geometry));
  OK(kvleaf_manager_find_leaf(manager, "window", &number));
  CHECK(number == 1);
  FAILS(KVLEAF_INVALID_ARGUMENT, "cross|full", kvleaf_manager_find_leaf(manager, "cross", &number));
  OK(kvleaf_manager_tokens_per_page(manager, 1, &number));
  CHECK(number == 4);
  FAILS(KVLEAF_INVALID_ARGUMENT, "2", kvleaf_manager_tokens_per_page(manager, 2, &number));
  OK(kvleaf_manager_longest_request(manager, &number));
  CHECK(number > 100 && number <= 256);
  OK(kvleaf_manager_pool(manager, &pool));
  FAILS(KVLEAF_INVALID_ARGUMENT, "kvleaf_manager", kvleaf_pool_on_evict(pool, on_evict, NULL));
  kvleaf_pool_destroy(pool); /* borrowed: nothing happens */

  /* A prompt of 22 tokens, computed in two steps; another finds its 20 first. */
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 22, NULL, &admission));
  CHECK(admission.hit_tokens == 0 && admission.reason != NULL && admission.encoder_cached == 0);
  OK(kvleaf_manager_contains(manager, 1, &number));
  CHECK(number == 1);
  OK(kvleaf_manager_next_stop(manager, 1, &number));
  CHECK(number == admission.next_stop);
  compute(manager, 1, 16);
  OK(kvleaf_manager_computed(manager, 1, &number));
  CHECK(number == 16);
  compute(manager, 1, 6);
  OK(kvleaf_manager_length(manager, 1, &number));
  CHECK(number == 22);
  OK(kvleaf_manager_blocks(manager, 1, 0, &blocks, &count));
  CHECK(count == 6 && blocks[0] != 0 && blocks[5] != 0);
  OK(kvleaf_manager_blocks(manager, 1, 1, &blocks,
                           &count)); /* W-01: what the window left is null */
  CHECK(count == 6 && blocks[0] == 0 && blocks[5] != 0);
  FAILS(KVLEAF_REQUEST_ERROR, "full", kvleaf_manager_live_block(manager, 1, 0, &live));
  OK(kvleaf_manager_probe(manager, tokens_from(0), 22, NULL, &admission));
  CHECK(admission.hit_tokens == 20 && admission.lost_count == 0);
  OK(kvleaf_manager_admit(manager, 2, tokens_from(0), 22, NULL, &admission));
  CHECK(admission.hit_tokens == 20);
  OK(kvleaf_manager_fork(manager, 1, 3)); /* F-01: the full pages are shared */
  OK(kvleaf_manager_length(manager, 3, &number));
  CHECK(number == 22);

  /* The salt keeps requests apart, and the reason says so. */
  options.salt = "tenant", options.salt_bytes = 6;
  OK(kvleaf_manager_probe(manager, tokens_from(0), 22, &options, &admission));
  CHECK(admission.hit_tokens == 0 && strstr(admission.reason, "salt") != NULL);
  options.has_addressable = 1, options.addressable = 8, options.salt_bytes = 0;
  OK(kvleaf_manager_probe(manager, tokens_from(0), 22, &options, &admission));
  CHECK(admission.hit_tokens <= 8);

  /* Failures change nothing. */
  admission.hit_tokens = 77, number = 77, live = 77;
  FAILS(KVLEAF_REQUEST_ERROR, "1",
        kvleaf_manager_admit(manager, 1, tokens_from(0), 22, NULL, &admission));
  FAILS(KVLEAF_REQUEST_ERROR, "300|256",
        kvleaf_manager_probe(manager, tokens_from(0), 300, NULL, &admission));
  options.encoder_tokens = 5;
  FAILS(KVLEAF_INVALID_ARGUMENT, "5 encoder tokens",
        kvleaf_manager_admit(manager, 9, tokens_from(0), 22, &options, &admission));
  options.encoder_tokens = 0, options.media_count = 1;
  FAILS(KVLEAF_INVALID_ARGUMENT, "media",
        kvleaf_manager_probe(manager, tokens_from(0), 22, &options, &admission));
  options.media_count = 0, options.partial = 7;
  FAILS(KVLEAF_INVALID_ARGUMENT, "partial is 7",
        kvleaf_manager_probe(manager, tokens_from(0), 22, &options, &admission));
  FAILS(KVLEAF_INVALID_ARGUMENT, "tokens",
        kvleaf_manager_admit(manager, 9, NULL, 22, NULL, &admission));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_length(manager, 9, &number));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_computed(manager, 9, &number));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_planned(manager, 9, &number));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_next_stop(manager, 9, &number));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_blocks(manager, 9, 0, &blocks, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "9", kvleaf_manager_blocks(manager, 1, 9, &blocks, &count));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_live_block(manager, 9, 0, &live));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_append(manager, 9, tokens_from(0), 1));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_fork(manager, 9, 10));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_rewind(manager, 9, 1));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_preempt(manager, 9));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_encoder_filled(manager, 9));
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_manager_release(manager, 9, KVLEAF_PREFIX_KEEP, NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "prefix is 2", kvleaf_manager_release(manager, 1, 2, NULL));
  OK(kvleaf_manager_contains(manager, 9, &number));
  CHECK(admission.hit_tokens == 77 && number == 0 && live == 77);
  OK(kvleaf_manager_audit(manager));

  /* F-02: rewind keeps the page it ends in; F-06: a preempted request comes back. */
  OK(kvleaf_manager_rewind(manager, 1, 21));
  OK(kvleaf_manager_length(manager, 1, &number));
  CHECK(number == 21);
  OK(kvleaf_manager_append(manager, 1, tokens_from(21), 1));
  OK(kvleaf_manager_preempt(manager, 1));
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 22, NULL, NULL));
  OK(kvleaf_manager_stats(manager, &totals));
  CHECK(totals.requests == 3 && totals.resumed == 1 && totals.preemptions == 1 &&
        totals.hit_tokens == 20 && totals.steps_in_flight == 0 && totals.metadata_bytes > 0);
  OK(kvleaf_manager_lost_tokens(manager, "window_8", &lost));
  CHECK(lost == 0);
  lost = 77;
  FAILS(KVLEAF_INVALID_ARGUMENT, "no group 'x'|full, window_8",
        kvleaf_manager_lost_tokens(manager, "x", &lost));
  CHECK(lost == 77);

  /* What was stored was told, parent before child. */
  OK(kvleaf_manager_take_events(manager, &events, &count));
  CHECK(count > 0 && events[0].kind == KVLEAF_EVENT_STORED && events[0].tokens == 4 &&
        events[0].group != NULL && events[0].leaf != NULL);
  OK(kvleaf_manager_take_events(manager, &events, &count));
  CHECK(count == 0);
  events = NULL, count = 99;
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_take_events(NULL, &events, &count));
  CHECK(events == NULL && count == 99);

  number = 8;
  OK(kvleaf_manager_release(manager, 1, KVLEAF_PREFIX_KEEP, &number));
  OK(kvleaf_manager_release(manager, 2, KVLEAF_PREFIX_DROP, NULL));
  OK(kvleaf_manager_release(manager, 3, KVLEAF_PREFIX_DROP, NULL));
  OK(kvleaf_manager_reset_cache(manager));
  OK(kvleaf_manager_probe(manager, tokens_from(0), 22, NULL, &admission));
  CHECK(admission.hit_tokens == 0);
  OK(kvleaf_manager_stats(manager, &totals));
  CHECK(totals.committed_pages == 0 && totals.requests == 0);
  OK(kvleaf_manager_audit(manager));
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_audit(NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_reset_cache(NULL));
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_pool(NULL, &pool));
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_geometry(NULL, &geometry));
  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_manager_longest_request(NULL, &number));
  FAILS(KVLEAF_INVALID_ARGUMENT, "out", kvleaf_manager_contains(manager, 1, NULL));
  totals.struct_size = 3;
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size", kvleaf_manager_stats(manager, &totals));
  kvleaf_manager_destroy(manager);
}

static void manager_steps(void) {
  kvleaf_leaf* leaves[2] = {full_leaf("full"), state_leaf("state", 0)};
  kvleaf_manager* manager = manager_of(leaves, 2, 32 << 10);
  kvleaf_step_request batch[2] = {{1, 10}, {2, 10}};
  kvleaf_step step = {.struct_size = sizeof step}, second = {.struct_size = sizeof second};
  kvleaf_step untouched = {.struct_size = sizeof untouched, .id = 77};
  kvleaf_kept kept = {1, 2};
  const kvleaf_request_length* lengths = NULL;
  uint32_t number = 77;
  size_t count = 99;
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);

  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 20, NULL, NULL));
  OK(kvleaf_manager_admit(manager, 2, tokens_from(500), 20, NULL, NULL));
  OK(kvleaf_manager_begin_step(manager, batch, 2, &step));
  CHECK(step.served_count == 2 && step.served[1] == 2 && step.refused_count == 0);
  CHECK(step.zero_fill_count == 2 && step.zero_fills[0].leaf == 1); /* S-13 */
  OK(kvleaf_manager_planned(manager, 2, &number));
  CHECK(number == 10);
  OK(kvleaf_manager_live_block(manager, 2, 1, &number));
  CHECK(number != 0);
  OK(kvleaf_manager_begin_step(manager, batch, 2, &second));
  FAILS(KVLEAF_STEP_ERROR, "2", kvleaf_manager_begin_step(manager, batch, 1, &untouched));
  FAILS(KVLEAF_STEP_ERROR, "", kvleaf_manager_settle(manager, second.id, NULL, 0)); /* */
  FAILS(KVLEAF_REQUEST_ERROR, "", kvleaf_manager_settle(manager, step.id, &(kvleaf_kept){9, 1}, 1));
  FAILS(KVLEAF_INVALID_ARGUMENT, "kept", kvleaf_manager_settle(manager, step.id, NULL, 1));
  OK(kvleaf_manager_settle(manager, step.id, NULL, 0));
  FAILS(KVLEAF_STEP_ERROR, "", kvleaf_manager_abandon(manager, step.id, &lengths, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "count",
        kvleaf_manager_abandon(manager, second.id, &lengths, NULL));
  CHECK(lengths == NULL && count == 99 && untouched.id == 77);
  OK(kvleaf_manager_abandon(manager, second.id, &lengths, &count));
  CHECK(count == 2 && lengths[0].request == 1 && lengths[0].length <= 10);

  batch[0].new_tokens = 0;
  FAILS(KVLEAF_REQUEST_ERROR, "1", kvleaf_manager_begin_step(manager, batch, 1, &untouched));
  batch[0].new_tokens = 65;
  FAILS(KVLEAF_REQUEST_ERROR, "65|64", kvleaf_manager_begin_step(manager, batch, 1, &untouched));
  batch[0].new_tokens = 4, batch[1] = batch[0];
  FAILS(KVLEAF_REQUEST_ERROR, "1", kvleaf_manager_begin_step(manager, batch, 2, &untouched));
  FAILS(KVLEAF_INVALID_ARGUMENT, "batch", kvleaf_manager_begin_step(manager, NULL, 2, &untouched));
  untouched.struct_size = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "struct_size",
        kvleaf_manager_begin_step(manager, batch, 1, &untouched));
  CHECK(untouched.id == 77);

  /* Drafts of which two of four stand; then a step whose caller wants no lengths. */
  OK(kvleaf_manager_release(manager, 2, KVLEAF_PREFIX_DROP, NULL));
  OK(kvleaf_manager_release(manager, 1, KVLEAF_PREFIX_DROP, NULL));
  kvleaf_manager_destroy(manager);
  leaves[0] = full_leaf("full");
  manager = manager_of(leaves, 1, 32 << 10);
  kvleaf_leaf_destroy(leaves[0]);
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 8, NULL, NULL));
  compute(manager, 1, 8);
  OK(kvleaf_manager_append(manager, 1, tokens_from(8), 4));
  batch[0].new_tokens = 4;
  OK(kvleaf_manager_begin_step(manager, batch, 1, &step));
  OK(kvleaf_manager_settle(manager, step.id, &kept, 1));
  OK(kvleaf_manager_computed(manager, 1, &number));
  CHECK(number == 10);
  OK(kvleaf_manager_begin_step(manager, batch, 1, &step));
  OK(kvleaf_manager_abandon(manager, step.id, NULL, NULL));

  /* N-07: who does not fit is named, with the numbers; the other is served. */
  number = 0;
  OK(kvleaf_manager_longest_request(manager, &number));
  kvleaf_manager_destroy(manager);
  leaves[0] = full_leaf("full");
  manager = manager_of(leaves, 1, 5 * 512 + 512);
  kvleaf_leaf_destroy(leaves[0]);
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 4, NULL, NULL));
  OK(kvleaf_manager_admit(manager, 2, tokens_from(900), 8, NULL, NULL));
  compute(manager, 1, 4);
  compute(manager, 2, 8);
  OK(kvleaf_manager_append(manager, 1, tokens_from(4), 8));
  OK(kvleaf_manager_append(manager, 2, tokens_from(908), 8));
  batch[0].request = 1, batch[0].new_tokens = 8;
  batch[1].request = 2, batch[1].new_tokens = 8;
  OK(kvleaf_manager_begin_step(manager, batch, 2, &step));
  CHECK(step.served_count == 1 && step.served[0] == 1 && step.refused_count == 1);
  CHECK(step.refused_count == 1 && step.refused[0].request == 2 &&
        strpbrk(step.refused[0].why, "0123456789") != NULL);
  OK(kvleaf_manager_settle(manager, step.id, NULL, 0));
  FAILS(KVLEAF_POOL_EXHAUSTED, "",
        kvleaf_manager_admit(manager, 3, tokens_from(70), 8, NULL, NULL));
  OK(kvleaf_manager_audit(manager));
  kvleaf_manager_destroy(manager);
}

static void manager_encoder(void) {
  kvleaf_attention_options options = {.struct_size = sizeof options,
                                      .layers = 1,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .tokens_per_page = 4};
  kvleaf_leaf* leaves[2] = {full_leaf("full"), NULL};
  kvleaf_manager* manager;
  kvleaf_admission admission = {.struct_size = sizeof admission};
  kvleaf_media_item media = {8, 4, "cat", 3, 1};
  kvleaf_admit_options admit = {.struct_size = sizeof admit,
                                .adapter = "a@1",
                                .encoder_digest = "photo",
                                .encoder_digest_bytes = 5,
                                .encoder_tokens = 10,
                                .media = &media,
                                .media_count = 1,
                                .priority = 3,
                                .guarantee = 40};
  kvleaf_step_request row = {1, 12};
  kvleaf_step step = {.struct_size = sizeof step, .id = 77};
  const uint32_t* blocks = NULL;
  size_t count = 99;
  OK(kvleaf_cross_attention_leaf("cross", &options, NULL, &leaves[1]));
  manager = manager_of(leaves, 2, 32 << 10);
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 20, &admit, &admission));
  CHECK(admission.encoder_cached == 0);
  OK(kvleaf_manager_blocks(manager, 1, 1, &blocks, &count));
  CHECK(count == 3);
  row.new_tokens = 10; /* ends inside the whole item */
  OK(kvleaf_manager_encoder_filled(manager, 1));
  FAILS(KVLEAF_REQUEST_ERROR, "1", kvleaf_manager_begin_step(manager, &row, 1, &step));
  CHECK(step.id == 77);
  row.new_tokens = 12;
  compute(manager, 1, 12);
  OK(kvleaf_manager_probe(manager, tokens_from(0), 20, &admit, &admission)); /* */
  CHECK(admission.encoder_cached == 1 && admission.hit_tokens == 12);
  OK(kvleaf_manager_audit(manager));
  kvleaf_manager_destroy(manager);
}

/* N-12: bytes that last served another leaf are cleared in the step that first uses them, and once.
 * `owner` says, per byte of the arena, which leaf used it last. */
static unsigned cleared_blocks(kvleaf_manager* manager, const kvleaf_step* step, uint64_t request,
                               unsigned char* owner) {
  const kvleaf_geometry* geometry = NULL;
  unsigned cleared = 0;
  uint32_t leaf;
  OK(kvleaf_manager_geometry(manager, &geometry));
  for (leaf = 0; leaf < 2; ++leaf) {
    const uint32_t* blocks = NULL;
    uint32_t live = 0;
    size_t count = 1, i, fill;
    if (leaf == 0) OK(kvleaf_manager_blocks(manager, request, 0, &blocks, &count));
    if (leaf == 1) OK(kvleaf_manager_live_block(manager, request, 1, &live));
    for (i = 0; i < count; ++i) {
      uint32_t block = leaf == 0 ? blocks[i] : live;
      kvleaf_byte_range range;
      int foreign = 0, listed = 0;
      uint64_t byte;
      OK(kvleaf_geometry_byte_range(geometry, leaf, block, &range));
      for (byte = range.begin; byte < range.end; ++byte) {
        foreign |= owner[byte] != 0 && owner[byte] != leaf + 1;
        owner[byte] = (unsigned char)(leaf + 1);
      }
      for (fill = 0; fill < step->zero_fill_count; ++fill) {
        listed += step->zero_fills[fill].leaf == leaf && step->zero_fills[fill].block == block;
      }
      if (foreign) CHECK(listed == 1);
      if (!foreign && leaf == 0) CHECK(listed == 0);
      cleared += leaf == 0 && foreign;
    }
  }
  return cleared;
}

static void bytes_change_leaf(void) {
  kvleaf_leaf* leaves[2] = {full_leaf("full"), state_leaf("state", 0)};
  kvleaf_manager* manager = manager_of(leaves, 2, 12 << 10);
  static unsigned char owner[12 << 10];
  kvleaf_step step = {.struct_size = sizeof step};
  unsigned cleared = 0;
  uint64_t request;
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);
  for (request = 1; request <= 60; ++request) {
    /* Three short ones at a time, then a long one, so that blocks change hands. */
    uint32_t length = request % 4 == 0 ? 40 : 4;
    kvleaf_step_request row = {request, length};
    OK(kvleaf_manager_admit(manager, request, tokens_from((int32_t)(request * 300)), length, NULL,
                            NULL));
    OK(kvleaf_manager_begin_step(manager, &row, 1, &step));
    CHECK(step.served_count == 1);
    cleared += cleared_blocks(manager, &step, request, owner);
    OK(kvleaf_manager_settle(manager, step.id, NULL, 0));
    if (request % 4 == 0) {
      uint64_t ended;
      for (ended = request - 3; ended <= request; ++ended) {
        OK(kvleaf_manager_release(manager, ended, KVLEAF_PREFIX_DROP, NULL));
      }
    }
  }
  CHECK(cleared > 0);
  OK(kvleaf_manager_audit(manager));
  kvleaf_manager_destroy(manager);
}

/* ---- planner -----------------------------------------------------------------------------------
 */

static void planner_arrays(void) {
  kvleaf_leaf* leaves[2] = {full_leaf("full"), state_leaf("state", 0)};
  kvleaf_manager* manager = manager_of(leaves, 2, 64 << 10);
  kvleaf_planner* planner = NULL;
  kvleaf_planner_options options = {
      .struct_size = sizeof options, .max_batch = 4, .max_step_tokens = 40};
  kvleaf_step_request batch[2] = {{1, 10}, {2, 7}};
  const kvleaf_plan *plan = NULL, *none = NULL;
  kvleaf_plan_info info = {.struct_size = sizeof info};
  kvleaf_array array, again;
  const int64_t* slots = NULL;
  const int32_t *rows = NULL, *columns = NULL, *values = NULL;
  const kvleaf_byte_range* dirty = NULL;
  const kvleaf_request_length* lengths = NULL;
  const uint32_t* blocks = NULL;
  size_t count = 99, i;
  const int32_t* table;

  FAILS(KVLEAF_INVALID_ARGUMENT, "manager", kvleaf_planner_create(NULL, &options, &planner));
  options.max_batch = 0;
  FAILS(KVLEAF_PLAN_SHAPE_ERROR, "0", kvleaf_planner_create(manager, &options, &planner));
  options.max_batch = 4;
  CHECK(planner == NULL);
  OK(kvleaf_planner_create(manager, &options, &planner));
  kvleaf_leaf_destroy(leaves[0]);
  kvleaf_leaf_destroy(leaves[1]);
  OK(kvleaf_manager_admit(manager, 1, tokens_from(0), 10, NULL, NULL));
  OK(kvleaf_manager_admit(manager, 2, tokens_from(300), 20, NULL, NULL));

  OK(kvleaf_planner_plan(planner, batch, 2, 3, &plan));
  OK(kvleaf_plan_describe(plan, &info));
  CHECK(info.row_count == 2 && info.rows[0] == 1 && info.rows[1] == 2 && info.batch == 3 &&
        info.num_tokens == 18 && info.refused_count == 0 && info.zero_fill_count == 2 &&
        info.copy_count == 0);
  CHECK(info.seq_lens[0] == 10 && info.seq_lens[1] == 7 && info.seq_lens[2] == 1); /* N-11 */
  CHECK(info.cu_seqlens_q[0] == 0 && info.cu_seqlens_q[1] == 10 && info.cu_seqlens_q[2] == 17 &&
        info.cu_seqlens_q[3] == 18);
  OK(kvleaf_plan_array_count(plan, 0, &count));
  CHECK(count == 1);
  OK(kvleaf_plan_array_at(plan, 0, 0, &array));
  OK(kvleaf_plan_array(plan, 0, "block_table", &again));
  CHECK(array.data == again.data && strcmp(array.key, "block_table") == 0 && array.rank == 2 &&
        array.shape[0] == 3 && array.dtype == KVLEAF_INT32 && array.strides[1] == 1);
  OK(kvleaf_manager_blocks(manager, 1, 0, &blocks, &count));
  table = array.data;
  CHECK(count == 3 && (uint32_t)table[0] == blocks[0] && (uint32_t)table[2] == blocks[2]);
  CHECK(table[2 * array.strides[0]] == 0); /* N-03: the dummy row */
  OK(kvleaf_plan_slot_mapping(plan, 0, &slots, &count));
  CHECK(count == 18 && slots[0] == (int64_t)blocks[0] * 4 &&
        slots[9] == (int64_t)blocks[2] * 4 + 1 && slots[17] == -1);
  OK(kvleaf_plan_slot_mapping(plan, 1, &slots, &count));
  CHECK(count == 0);
  OK(kvleaf_plan_array(plan, 1, "state_rows", &array));
  CHECK(array.rank == 1 && ((const int32_t*)array.data)[0] > 0 &&
        ((const int32_t*)array.data)[2] == -1);
  OK(kvleaf_plan_dirty(plan, 0, "block_table", &dirty, &count));
  CHECK(count >= 1 && dirty[0].begin == 0);
  OK(kvleaf_plan_changes(plan, 0, "block_table", &rows, &columns, &values, &count));
  CHECK(count >= 5);
  for (i = 0; i < count; ++i) {
    CHECK(table[rows[i] * again.strides[0] + columns[i]] == values[i]);
  }

  /* Failures: nothing begun, nothing written. */
  FAILS(KVLEAF_PLAN_SHAPE_ERROR, "5|4", kvleaf_planner_plan(planner, batch, 2, 5, &none));
  batch[0].new_tokens = 41;
  FAILS(KVLEAF_PLAN_SHAPE_ERROR, "40", kvleaf_planner_plan(planner, batch, 1, 0, &none));
  batch[0].request = 9, batch[0].new_tokens = 1;
  FAILS(KVLEAF_REQUEST_ERROR, "9", kvleaf_planner_plan(planner, batch, 1, 0, &none));
  FAILS(KVLEAF_INVALID_ARGUMENT, "planner", kvleaf_planner_plan(NULL, batch, 1, 0, &none));
  memset(&again, 0, sizeof again);
  FAILS(KVLEAF_PLAN_SHAPE_ERROR, "nothing|block_table",
        kvleaf_plan_array(plan, 0, "nothing", &again));
  FAILS(KVLEAF_INVALID_ARGUMENT, "array 1|there are 1", kvleaf_plan_array_at(plan, 0, 1, &again));
  count = 99, rows = NULL, dirty = NULL, slots = NULL;
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 2", kvleaf_plan_array_count(plan, 2, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 2", kvleaf_plan_slot_mapping(plan, 2, &slots, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "leaf 2", kvleaf_plan_dirty(plan, 2, "x", &dirty, &count));
  FAILS(KVLEAF_PLAN_SHAPE_ERROR, "x",
        kvleaf_plan_changes(plan, 0, "x", &rows, &columns, &values, &count));
  FAILS(KVLEAF_INVALID_ARGUMENT, "plan", kvleaf_plan_describe(NULL, &info));
  CHECK(none == NULL && again.data == NULL && count == 99 && rows == NULL && dirty == NULL &&
        slots == NULL);

  FAILS(KVLEAF_STEP_ERROR, "", kvleaf_planner_settle(planner, info.step + 1, NULL, 0));
  OK(kvleaf_planner_settle(planner, info.step, NULL, 0));
  batch[0].request = 2, batch[0].new_tokens = 5;
  OK(kvleaf_planner_plan(planner, batch, 1, 0, &plan));
  OK(kvleaf_plan_describe(plan, &info));
  FAILS(KVLEAF_INVALID_ARGUMENT, "out", kvleaf_planner_abandon(planner, info.step, NULL, &count));
  OK(kvleaf_planner_abandon(planner, info.step, &lengths, &count));
  CHECK(count == 1 && lengths[0].request == 2);
  FAILS(KVLEAF_STEP_ERROR, "", kvleaf_planner_abandon(planner, info.step, NULL, NULL));

  /* The handles may be destroyed in any order. */
  kvleaf_manager_destroy(manager);
  batch[0].request = 2, batch[0].new_tokens = 1;
  OK(kvleaf_planner_plan(planner, batch, 1, 0, &plan));
  kvleaf_planner_destroy(planner);
}

/* ---- a leaf kind written in C ------------------------------------------------------------------
 */

/* L-13: a window of 8 tokens with a table of its own, which is to do what the shipped one does. */
struct window_kind {
  int destroyed, full_writes, delta_writes, binds;
  kvleaf_status failure;
};

static uint32_t window_tail(void* user_data, uint32_t n) {
  (void)user_data;
  return n < 8 ? 0 : n - 7;
}
static void window_destroy(void* user_data) { ++((struct window_kind*)user_data)->destroyed; }
static uint32_t window_slots(void* user_data, uint32_t tokens_per_page) {
  (void)user_data;
  return tokens_per_page;
}
static uint32_t window_reserve(void* user_data, uint32_t num_blocks, uint32_t tokens_per_page,
                               uint32_t caching, uint32_t step_tokens) {
  uint32_t most = (8 + step_tokens - 2 + tokens_per_page - 1) / tokens_per_page + 1;
  (void)user_data, (void)caching;
  return num_blocks < most ? num_blocks : most;
}
static kvleaf_status window_shapes(void* user_data, uint32_t batch, uint32_t num_blocks,
                                   kvleaf_staged_input* into, size_t* count) {
  (void)user_data;
  into[0].key = "my_table", into[0].dtype = KVLEAF_INT32, into[0].rank = 2;
  into[0].shape[0] = batch, into[0].shape[1] = num_blocks;
  *count = 1;
  return KVLEAF_OK;
}
static kvleaf_status window_write(void* user_data, const kvleaf_row_plan* plans, size_t rows,
                                  const kvleaf_array* arrays, size_t array_count) {
  struct window_kind* kind = user_data;
  size_t row;
  int64_t column;
  if (kind->failure != KVLEAF_OK) {
    kvleaf_set_error("the table is on strike");
    return kind->failure;
  }
  ++kind->full_writes;
  if (array_count != 1) return 1;
  for (row = 0; row < rows; ++row) {
    int32_t* table = (int32_t*)arrays[0].data + (int64_t)row * arrays[0].strides[0];
    for (column = 0; column < arrays[0].shape[1]; ++column) {
      table[column] = (size_t)column < plans[row].count ? (int32_t)plans[row].blocks[column] : 0;
    }
  }
  return KVLEAF_OK;
}
static kvleaf_status window_delta(void* user_data, const kvleaf_row_delta* deltas, size_t rows,
                                  const kvleaf_array* arrays, size_t array_count,
                                  const kvleaf_staging* staging) {
  struct window_kind* kind = user_data;
  size_t row;
  if (kind->failure != KVLEAF_OK) {
    kvleaf_set_error("the table is on strike");
    return kind->failure;
  }
  ++kind->delta_writes;
  kvleaf_staging_reports_changes(staging);
  for (row = 0; row < rows; ++row) {
    const kvleaf_row_delta* delta = &deltas[row];
    int64_t first = (int64_t)row * arrays[0].strides[0], column;
    int64_t begin = delta->padding || delta->new_owner ? 0 : delta->first_changed_slot;
    int64_t end = delta->padding ? 0 : delta->first_changed_slot + (int64_t)delta->block_count;
    for (column = begin; column < arrays[0].shape[1]; ++column) {
      int32_t block = column < end ? (int32_t)delta->blocks[column - delta->first_changed_slot] : 0;
      int32_t* entry = (int32_t*)arrays[0].data + first + column;
      if (*entry == block) continue;
      *entry = block;
      kvleaf_staging_changed(staging, 0, first + column, 1);
    }
  }
  return array_count == 1 ? KVLEAF_OK : 1;
}
static kvleaf_status window_span(void* user_data, uint32_t block, kvleaf_bound_rows* into,
                                 size_t* count) {
  (void)user_data;
  into[0].key = "mine", into[0].begin = 2 * block, into[0].end = 2 * block + 2;
  *count = 1;
  return block == 99 ? 7 : KVLEAF_OK;
}
static kvleaf_status window_copies(void* user_data, uint32_t src, uint32_t dst,
                                   kvleaf_bound_rows* from, kvleaf_bound_rows* to, size_t* count) {
  return window_span(user_data, src, from, count) + window_span(user_data, dst, to, count);
}
static kvleaf_status window_bind(void* user_data, uint64_t page_stride) {
  ++((struct window_kind*)user_data)->binds;
  return page_stride >= 512 ? KVLEAF_OK : 1;
}

static void leaf_written_in_c(void) {
  struct window_kind mine = {0};
  kvleaf_leaf_kind kind = {.struct_size = sizeof kind,
                           .leaf_id = "mine",
                           .group = "window in C",
                           .pattern = {.kind = KVLEAF_PATTERN_CUSTOM, .tail_begin = window_tail},
                           .writing = KVLEAF_WRITING_APPEND,
                           .tokens_per_page = 4,
                           .bytes_per_page = 512,
                           .stride_alignment = 1,
                           .layers = 2,
                           .user_data = &mine,
                           .destroy = window_destroy,
                           .slots_per_page = window_slots,
                           .blocks_to_reserve = window_reserve,
                           .staged_input_shapes = window_shapes,
                           .write_staged_inputs = window_write,
                           .write_staged_delta = window_delta,
                           .bound_row_span = window_span,
                           .bound_row_copies = window_copies,
                           .bind = window_bind};
  kvleaf_leaf* leaves[3] = {NULL, window_leaf("shipped", 8, 0), full_leaf("full")};
  kvleaf_manager* manager;
  kvleaf_planner* planner = NULL;
  kvleaf_planner_options options = {
      .struct_size = sizeof options, .max_batch = 4, .max_step_tokens = 128};
  const kvleaf_plan* plan = NULL;
  kvleaf_plan_info info = {.struct_size = sizeof info};
  kvleaf_bound_rows from[1], to[1];
  kvleaf_manager_totals totals = {.struct_size = sizeof totals};
  kvleaf_array a, b;
  size_t count = 99;
  uint32_t seed = 1, live[4] = {0}, length[4] = {0}, next = 0;
  int round;

  kind.pattern.kind = 9;
  FAILS(KVLEAF_INVALID_ARGUMENT, "pattern kind is 9", kvleaf_custom_leaf(&kind, &leaves[0]));
  kind.pattern.kind = KVLEAF_PATTERN_CUSTOM;
  kind.group = NULL;
  FAILS(KVLEAF_INVALID_ARGUMENT, "group", kvleaf_custom_leaf(&kind, &leaves[0]));
  kind.group = "window in C", kind.bytes_per_page = 0;
  FAILS(KVLEAF_INVALID_ARGUMENT, "mine|0 bytes", kvleaf_custom_leaf(&kind, &leaves[0]));
  kind.bytes_per_page = 512, kind.writing = 4;
  FAILS(KVLEAF_INVALID_ARGUMENT, "writing is 4", kvleaf_custom_leaf(&kind, &leaves[0]));
  kind.writing = KVLEAF_WRITING_APPEND;
  CHECK(leaves[0] == NULL && mine.destroyed == 0);
  OK(kvleaf_custom_leaf(&kind, &leaves[0]));
  describe(leaves[0], "mine", "window in C", 512, KVLEAF_WRITING_APPEND, 1);
  OK(kvleaf_leaf_bound_row_span(leaves[0], 4, to, 1, &count));
  CHECK(count == 1 && strcmp(to[0].key, "mine") == 0 && to[0].begin == 8);
  FAILS(KVLEAF_CALLBACK_ERROR, "mine|bound_row_span|status 7",
        kvleaf_leaf_bound_row_span(leaves[0], 99, to, 1, &count));
  OK(kvleaf_leaf_bound_row_copies(leaves[0], 3, 4, from, to, 1, &count));
  CHECK(from[0].begin == 6 && to[0].end == 10);

  manager = manager_of(leaves, 3, 64 << 10);
  CHECK(mine.binds == 1);
  OK(kvleaf_planner_create(manager, &options, &planner));
  for (round = 0; round < 3; ++round) kvleaf_leaf_destroy(leaves[round]);

  /* A thousand random steps over four requests: its table is always the shipped one's. */
  for (round = 0; round < 1000; ++round) {
    kvleaf_step_request batch[4];
    uint32_t rows = 0, slot;
    for (slot = 0; slot < 4; ++slot) {
      seed = seed * 1664525u + 1013904223u;
      if (live[slot] != 0 && (length[slot] > 180 || seed >> 28 == 0)) {
        OK(kvleaf_manager_release(manager, live[slot], (int32_t)(seed >> 20 & 1), NULL));
        live[slot] = 0;
      }
      if (live[slot] == 0 && (seed >> 24 & 3) == 0) {
        uint32_t known = 1 + (seed >> 8) % 30;
        if (kvleaf_manager_admit(manager, ++next, tokens_from((int32_t)(seed >> 12 & 3)), known,
                                 NULL, NULL) != KVLEAF_OK) {
          continue;
        }
        live[slot] = next, length[slot] = known;
      }
      if (live[slot] != 0 && (seed >> 26 & 1) == 0) {
        uint32_t done, wanted = 1 + (seed >> 4) % 12;
        OK(kvleaf_manager_computed(manager, live[slot], &done));
        if (done == length[slot]) {
          OK(kvleaf_manager_append(manager, live[slot], tokens_from((int32_t)length[slot]),
                                   wanted));
          length[slot] += wanted;
        }
        if (wanted > length[slot] - done) wanted = length[slot] - done;
        batch[rows].request = live[slot], batch[rows].new_tokens = wanted;
        ++rows;
      }
    }
    if (rows == 0) continue;
    OK(kvleaf_planner_plan(planner, batch, rows, 0, &plan));
    OK(kvleaf_plan_describe(plan, &info));
    OK(kvleaf_plan_array(plan, 0, "my_table", &a));
    OK(kvleaf_plan_array(plan, 1, "block_table", &b));
    CHECK(a.shape[0] == b.shape[0] && a.shape[1] == b.shape[1]);
    {
      int64_t row, column;
      int same = 1;
      for (row = 0; row < a.shape[0]; ++row) {
        for (column = 0; column < a.shape[1]; ++column) {
          int32_t x = ((int32_t*)a.data)[row * a.strides[0] + column];
          int32_t y = ((int32_t*)b.data)[row * b.strides[0] + column];
          same &= (x == 0) == (y == 0);
        }
      }
      CHECK(same);
    }
    OK(kvleaf_planner_settle(planner, info.step, NULL, 0));
  }
  CHECK(mine.delta_writes > 300);
  OK(kvleaf_manager_audit(manager));

  /* B-03 for C: a callback that fails in plan is told with its words, and no step was begun. */
  while (live[0] == 0) {
    OK(kvleaf_manager_admit(manager, ++next, tokens_from(7), 5, NULL, NULL));
    live[0] = next;
  }
  {
    kvleaf_step_request row = {live[0], 1};
    const kvleaf_plan* none = NULL;
    uint32_t done = 0;
    OK(kvleaf_manager_append(manager, live[0], tokens_from(3), 1));
    OK(kvleaf_manager_planned(manager, live[0], &done));
    mine.failure = 4711;
    FAILS(KVLEAF_CALLBACK_ERROR, "leaf 'mine'|write_staged|4711|on strike",
          kvleaf_planner_plan(planner, &row, 1, 0, &none));
    CHECK(none == NULL);
    OK(kvleaf_manager_stats(manager, &totals));
    CHECK(totals.steps_in_flight == 0);
    mine.failure = KVLEAF_OK;
    OK(kvleaf_planner_plan(planner, &row, 1, 0, &plan));
    OK(kvleaf_plan_describe(plan, &info));
    OK(kvleaf_plan_array(plan, 0, "my_table", &a));
    OK(kvleaf_plan_array(plan, 1, "block_table", &b));
    CHECK((((int32_t*)a.data)[done / 4] == 0) == (((int32_t*)b.data)[done / 4] == 0));
    OK(kvleaf_planner_settle(planner, info.step, NULL, 0));
  }
  OK(kvleaf_manager_audit(manager));
  CHECK(mine.destroyed == 0);
  kvleaf_manager_destroy(manager);
  kvleaf_planner_destroy(planner);
  CHECK(mine.destroyed == 1);
}

/* ---- structs that grow -------------------------------------------------------------------------
 */

static void grown_structs(void) {
  /* As a program made with a later header has them: options with a member more, and an answer. */
  struct {
    kvleaf_window_options known;
    uint64_t later;
  } window = {{.struct_size = sizeof window, .window = 8}, 0};
  struct {
    kvleaf_geometry_info known;
    uint64_t later;
  } info = {{.struct_size = sizeof info}, 77};
  kvleaf_attention_options options = {.struct_size = sizeof options,
                                      .layers = 1,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .tokens_per_page = 4};
  kvleaf_leaf* leaf = NULL;
  kvleaf_geometry* geometry = two_pages(2);
  OK(kvleaf_sliding_window_leaf("w", &window.known, &options, &leaf));
  kvleaf_leaf_destroy(leaf);
  leaf = NULL;
  window.later = 1;
  FAILS(KVLEAF_INVALID_ARGUMENT, "made for a newer kvleaf",
        kvleaf_sliding_window_leaf("w", &window.known, &options, &leaf));
  CHECK(leaf == NULL);
  OK(kvleaf_geometry_describe(geometry, &info.known));
  CHECK(info.known.struct_size == sizeof info && info.known.huge_blocks == 2 && info.later == 0);
  kvleaf_geometry_destroy(geometry);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s FOLDER_OF_MODEL_CONFIGURATIONS\n", argv[0]);
    return 2;
  }
  versions_and_errors();
  patterns();
  shipped_leaves();
  staged_inputs();
  configurations(argv[1]);
  geometries();
  arenas();
  pages_of_leaves();
  pool_blocks();
  pool_cache();
  pool_arena();
  manager_requests();
  manager_steps();
  manager_encoder();
  bytes_change_leaf();
  planner_arrays();
  leaf_written_in_c();
  grown_structs();
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}
