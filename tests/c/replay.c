/* Replays a trace of operations through the C border; see replay.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvleaf.h"
#include "replay.h"

enum { most_ids = 4096 };
static int32_t tokens[most_ids][replay_max_len + 64];
static uint32_t known[most_ids];
static const char* const leaf_names[3] = {"full", "window", "state"};

static void must(kvleaf_status status) {
  if (status == KVLEAF_OK) return;
  fprintf(stderr, "%s\n", kvleaf_last_error());
  exit(1);
}

static const char* error_name(kvleaf_status status) {
  static const char* const names[] = {"ok",
                                      "InvalidArgument",
                                      "GeometryError",
                                      "PoolExhausted",
                                      "BlockError",
                                      "InvariantError",
                                      "RequestError",
                                      "StepError",
                                      "PlanShapeError"};
  return status >= 0 && status <= KVLEAF_PLAN_SHAPE_ERROR ? names[status] : "other";
}

static int said(const char* operation, kvleaf_status status) {
  if (status != KVLEAF_OK) printf("%s: %s\n", operation, error_name(status));
  return status == KVLEAF_OK;
}

static void print_admission(const kvleaf_admission* admission) {
  uint32_t i;
  printf("admit: hit %u stop %u lost", (unsigned)admission->hit_tokens,
         (unsigned)admission->next_stop);
  for (i = 0; i < admission->lost_count; ++i) {
    printf(" %s=%u", admission->lost[i].group, (unsigned)admission->lost[i].tokens);
  }
  printf(" because '%s'\n", admission->reason);
}

static void print_plan(const kvleaf_plan* plan, const kvleaf_plan_info* info) {
  uint32_t leaf;
  size_t i;
  printf("step %u: rows", (unsigned)info->step);
  for (i = 0; i < info->row_count; ++i) printf(" %u", (unsigned)info->rows[i]);
  printf(" refused");
  for (i = 0; i < info->refused_count; ++i) printf(" %u", (unsigned)info->refused[i].request);
  printf(" lens");
  for (i = 0; i < info->batch; ++i) printf(" %d", (int)info->seq_lens[i]);
  for (leaf = 0; leaf < 3; ++leaf) {
    kvleaf_array array;
    const int64_t* slots;
    size_t count;
    int64_t row, column;
    printf(" %s", leaf_names[leaf]);
    if (kvleaf_plan_array(plan, leaf, leaf == 2 ? "state_rows" : "block_table", &array) != 0)
      continue;
    for (row = 0; row < array.shape[0]; ++row) {
      int64_t columns = array.rank == 2 ? array.shape[1] : 1;
      for (column = 0; column < columns; ++column) {
        printf(" %d", (int)((const int32_t*)array.data)[row * array.strides[0] + column]);
      }
    }
    if (kvleaf_plan_slot_mapping(plan, leaf, &slots, &count) != 0) continue;
    printf(" slots");
    for (i = 0; i < count; ++i) printf(" %d", (int)slots[i]);
  }
  printf(" copies");
  for (i = 0; i < info->copy_count; ++i) {
    printf(" %u:%u>%u", (unsigned)info->copies[i].leaf, (unsigned)info->copies[i].src,
           (unsigned)info->copies[i].dst);
  }
  printf(" clears");
  for (i = 0; i < info->zero_fill_count; ++i) {
    printf(" %u:%u", (unsigned)info->zero_fills[i].leaf, (unsigned)info->zero_fills[i].block);
  }
  printf("\n");
}

static kvleaf_manager* make_manager(void) {
  static const uint32_t shape[1] = {96};
  static const kvleaf_slab slab = {"s", shape, 1, KVLEAF_FLOAT32};
  kvleaf_attention_options attention = {.struct_size = sizeof attention,
                                        .layers = 2,
                                        .kv_heads = 1,
                                        .head_dim = 8,
                                        .dtype = KVLEAF_FLOAT32,
                                        .tokens_per_page = replay_page_tokens};
  kvleaf_window_options window = {.struct_size = sizeof window, .window = replay_window};
  kvleaf_state_options state = {.struct_size = sizeof state,
                                .layers = 1,
                                .slabs = &slab,
                                .slab_count = 1,
                                .tokens_per_page = replay_page_tokens};
  kvleaf_manager_options options = {.struct_size = sizeof options,
                                    .budget_bytes = replay_budget,
                                    .page_tokens = replay_page_tokens,
                                    .max_len = replay_max_len,
                                    .max_step_tokens = replay_max_step_tokens};
  kvleaf_leaf* leaves[3];
  kvleaf_manager* manager = NULL;
  int i;
  must(kvleaf_full_attention_leaf("full", &attention, &leaves[0]));
  must(kvleaf_sliding_window_leaf("window", &window, &attention, &leaves[1]));
  must(kvleaf_recurrent_state_leaf("state", &state, &leaves[2]));
  must(kvleaf_manager_create(leaves, 3, &options, &manager));
  for (i = 0; i < 3; ++i) kvleaf_leaf_destroy(leaves[i]);
  return manager;
}

int main(int argc, char** argv) {
  kvleaf_manager* manager = make_manager();
  kvleaf_planner_options options = {.struct_size = sizeof options,
                                    .max_batch = replay_max_batch,
                                    .max_step_tokens = replay_step_tokens};
  kvleaf_planner* planner = NULL;
  kvleaf_manager_totals totals = {.struct_size = sizeof totals};
  uint64_t steps[4];
  size_t in_flight = 0, i;
  char line[256];
  FILE* trace = argc == 2 ? fopen(argv[1], "r") : NULL;
  if (trace == NULL || manager == NULL) return 2;
  must(kvleaf_planner_create(manager, &options, &planner));

  while (fgets(line, sizeof line, trace) != NULL) {
    const char* operation = strtok(line, " \n");
    unsigned given[16];
    size_t count = 0;
    char* word;
    while ((word = strtok(NULL, " \n")) != NULL) given[count++] = (unsigned)strtoul(word, NULL, 10);
    if (strcmp(operation, "admit") == 0) {
      kvleaf_admission admission = {.struct_size = sizeof admission};
      int32_t* text = tokens[given[0]];
      for (i = 0; i < given[2]; ++i) {
        text[i] = (int32_t)(given[1] + i + (i >= given[3] ? replay_fork_shift : 0));
      }
      known[given[0]] = given[2];
      if (said("admit",
               kvleaf_manager_admit(manager, given[0], text, given[2], NULL, &admission))) {
        print_admission(&admission);
      }
    } else if (strcmp(operation, "resume") == 0) {
      kvleaf_admission admission = {.struct_size = sizeof admission};
      if (said("admit", kvleaf_manager_admit(manager, given[0], tokens[given[0]], known[given[0]],
                                             NULL, &admission))) {
        print_admission(&admission);
      }
    } else if (strcmp(operation, "append") == 0) {
      int32_t* end = tokens[given[0]] + known[given[0]];
      for (i = 0; i < given[2]; ++i) end[i] = (int32_t)(given[1] + i);
      if (said("append", kvleaf_manager_append(manager, given[0], end, given[2]))) {
        known[given[0]] += given[2];
        printf("append\n");
      }
    } else if (strcmp(operation, "step") == 0) {
      kvleaf_step_request batch[replay_max_batch];
      size_t rows = 0;
      for (i = 0; i + 1 < count; i += 2) {
        uint32_t length = 0, planned = 0;
        if (kvleaf_manager_length(manager, given[i], &length) != KVLEAF_OK ||
            kvleaf_manager_planned(manager, given[i], &planned) != KVLEAF_OK || length == planned) {
          continue;
        }
        batch[rows].request = given[i];
        batch[rows].new_tokens = given[i + 1] < length - planned ? given[i + 1] : length - planned;
        ++rows;
      }
      if (rows != 0) {
        const kvleaf_plan* plan = NULL;
        kvleaf_plan_info info = {.struct_size = sizeof info};
        if (said("step", kvleaf_planner_plan(planner, batch, rows, 0, &plan))) {
          must(kvleaf_plan_describe(plan, &info));
          steps[in_flight++] = info.step;
          print_plan(plan, &info);
        }
      }
    } else if (strcmp(operation, "settle") == 0 && in_flight != 0) {
      if (said("settle", kvleaf_planner_settle(planner, steps[0], NULL, 0))) {
        printf("settle\n");
        for (i = 1; i < in_flight; ++i) steps[i - 1] = steps[i];
        --in_flight;
      }
    } else if (strcmp(operation, "abandon") == 0 && in_flight != 0) {
      const kvleaf_request_length* lengths;
      if (said("abandon", kvleaf_planner_abandon(planner, steps[0], &lengths, &count))) {
        printf("abandon");
        for (i = 0; i < count; ++i) {
          printf(" %u=%u", (unsigned)lengths[i].request, (unsigned)lengths[i].length);
        }
        printf("\n");
        in_flight = 0;
      }
    } else if (strcmp(operation, "fork") == 0) {
      memcpy(tokens[given[1]], tokens[given[0]], sizeof tokens[0]);
      known[given[1]] = known[given[0]];
      if (said("fork", kvleaf_manager_fork(manager, given[0], given[1]))) printf("fork\n");
    } else if (strcmp(operation, "rewind") == 0) {
      if (said("rewind", kvleaf_manager_rewind(manager, given[0], given[1]))) {
        known[given[0]] = given[1];
        printf("rewind\n");
      }
    } else if (strcmp(operation, "preempt") == 0) {
      if (said("preempt", kvleaf_manager_preempt(manager, given[0]))) printf("preempt\n");
    } else if (strcmp(operation, "release") == 0) {
      if (said("release",
               kvleaf_manager_release(manager, given[0],
                                      given[1] ? KVLEAF_PREFIX_KEEP : KVLEAF_PREFIX_DROP, NULL))) {
        printf("release\n");
      }
    }
  }
  fclose(trace);
  must(kvleaf_manager_audit(manager));
  must(kvleaf_manager_stats(manager, &totals));
  printf("admitted %u refused %u hit %u of %u checkpoints %u cached %u\n",
         (unsigned)totals.admitted, (unsigned)totals.refused, (unsigned)totals.hit_tokens,
         (unsigned)totals.prompt_tokens, (unsigned)totals.checkpoints,
         (unsigned)totals.committed_pages);
  kvleaf_planner_destroy(planner);
  kvleaf_manager_destroy(manager);
  return 0;
}
