/* A continuous-batching runtime in C. Requests arrive, share what their texts have in common, are
 * computed in chunks beside others that decode, are preempted when memory runs out, and go on
 * later. The next step is planned while the last one still runs, before its tokens are known.
 *
 * The "model" is a toy, but its memory is real: keys and values of all tokens, of a window, and a
 * recurrent state, all in one arena and reached only through the arrays of each step. What it says
 * depends on every byte it reads, so each token is compared with one computed from the text alone.
 *
 *   cc embed_in_c.c $(pkg-config --cflags --libs kvleaf_c)
 */
#include <kvleaf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { page_tokens = 8, window_tokens = 48, chunk_tokens = 64, max_len = 512 };
enum { max_batch = 8, requests = 60, budget = 12 << 10 };
enum { full, window, state, leaf_count }; /* leaves, in the order given */

static void must(kvleaf_status status, const char* what) {
  if (status == KVLEAF_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, kvleaf_status_name(status), kvleaf_last_error());
  exit(1);
}

/* ---- requests ----------------------------------------------------------------------------------
 */

struct request {
  uint64_t id;
  int32_t text[max_len]; /* the prompt, and what was said so far */
  uint32_t length;       /* tokens known */
  uint32_t wanted;       /* tokens in the end */
  uint32_t arrives;      /* at this step of the runtime */
  uint32_t planned;      /* tokens that steps were planned for */
};

struct runtime {
  kvleaf_manager* manager;
  kvleaf_planner* planner;
  unsigned char* arena;
  kvleaf_leaf_geometry views[leaf_count];
  struct request* waiting[requests]; /* by arrival; preempted ones first */
  struct request* active[max_batch]; /* admitted, the oldest first */
  size_t waiting_count, active_count;
  unsigned steps, preemptions, pipelined, wrong;
};

/* A trace: prompts that begin with one of three system prompts, or go on with an earlier talk. */
static void make_trace(struct request* trace) {
  uint32_t seed = 7, i, t;
  for (i = 0; i < requests; ++i) {
    struct request* request = &trace[i];
    const struct request* earlier;
    uint32_t shared, own;
    seed = seed * 1664525u + 1013904223u;
    earlier = i >= 12 && seed >> 31 ? &trace[i - 12] : NULL;
    own = 5 + (seed >> 20) % 60;
    shared = earlier != NULL ? earlier->length : 40 + 60 * (seed >> 28 & 1);
    if (shared + own + 40 > max_len) shared = max_len - own - 40;
    for (t = 0; t < shared; ++t) {
      request->text[t] =
          earlier != NULL ? earlier->text[t] : (int32_t)(seed >> 28 & 1) * 500 + (int32_t)t;
    }
    for (t = 0; t < own; ++t) request->text[shared + t] = (int32_t)(1000 * i + t);
    request->id = i + 1;
    request->length = shared + own;
    request->wanted = request->length + 8 + (seed >> 12) % 32;
    request->arrives = 3 * i;
  }
}

/* ---- the model ---------------------------------------------------------------------------------
 */

/* What the toy says: a recurrence over all tokens, and sums over all and over the window. */
static int32_t say(int64_t recurrence, int64_t all, int64_t recent) {
  return (int32_t)((recurrence + 3 * all + 7 * recent) % 30000);
}
static int64_t advance(int64_t recurrence, int32_t token) {
  return (recurrence * 31 + token) % 1000003;
}
static int64_t weight(int32_t token, int32_t position) {
  return (int64_t)token * (position % 13 + 1);
}

/* The same without any cache, from the first `length` tokens of the text. */
static int32_t said_without_cache(const int32_t* text, uint32_t length) {
  int64_t recurrence = 0, all = 0, recent = 0;
  uint32_t i;
  for (i = 0; i < length; ++i) {
    recurrence = advance(recurrence, text[i]);
    all += weight(text[i], (int32_t)i);
    if (i + window_tokens >= length) recent += weight(text[i], (int32_t)i);
  }
  return say(recurrence, all, recent);
}

static unsigned char* page(const struct runtime* self, uint32_t leaf, int64_t block) {
  const kvleaf_leaf_geometry* view = &self->views[leaf];
  return self->arena + view->base_offset + (uint64_t)block * view->page_stride;
}

/* A page of attention holds the keys of its tokens, then their values, four bytes each. */
static void write_entry(const struct runtime* self, uint32_t leaf, int64_t slot, int32_t token,
                        int32_t position) {
  unsigned char* at = page(self, leaf, slot / page_tokens) + slot % page_tokens * 4;
  memcpy(at, &token, 4);
  memcpy(at + page_tokens * 4, &position, 4);
}

/* Reads positions [begin, end) of one row through its block table. */
static int64_t attend(const struct runtime* self, uint32_t leaf, const int32_t* table,
                      uint32_t begin, uint32_t end) {
  int64_t sum = 0;
  uint32_t i;
  for (i = begin; i < end; ++i) {
    const unsigned char* at = page(self, leaf, table[i / page_tokens]) + i % page_tokens * 4;
    int32_t token, position;
    memcpy(&token, at, 4);
    memcpy(&position, at + page_tokens * 4, 4);
    sum += weight(token, position);
  }
  return sum;
}

/* One forward, as a device would run it: from the plan's arrays and the tokens alone. said[row]
 * receives the token after each row's last. */
static void forward(const struct runtime* self, const kvleaf_plan* plan, const int32_t* tokens,
                    int32_t* said) {
  kvleaf_plan_info info = {.struct_size = sizeof info};
  kvleaf_array tables[leaf_count];
  const int64_t* slots[2];
  size_t i, count;
  uint32_t leaf, row;
  must(kvleaf_plan_describe(plan, &info), "describe");
  must(kvleaf_plan_array(plan, full, "block_table", &tables[full]), "block table");
  must(kvleaf_plan_array(plan, window, "block_table", &tables[window]), "block table");
  must(kvleaf_plan_array(plan, state, "state_rows", &tables[state]), "state rows");
  for (i = 0; i < info.copy_count; ++i) {
    const kvleaf_block_copy* copy = &info.copies[i];
    memcpy(page(self, copy->leaf, copy->dst), page(self, copy->leaf, copy->src),
           self->views[copy->leaf].bytes_per_page);
  }
  for (i = 0; i < info.zero_fill_count; ++i) {
    const kvleaf_zero_fill* fill = &info.zero_fills[i];
    memset(page(self, fill->leaf, fill->block), 0, self->views[fill->leaf].bytes_per_page);
  }
  for (leaf = full; leaf <= window; ++leaf) {
    must(kvleaf_plan_slot_mapping(plan, leaf, &slots[leaf], &count), "slot mapping");
  }
  for (row = 0; row < info.batch; ++row) {
    const int32_t begin = info.cu_seqlens_q[row], end = info.cu_seqlens_q[row + 1];
    const uint32_t length = (uint32_t)info.seq_lens[row];
    const int32_t* rows[2];
    unsigned char* memory = page(self, state, ((const int32_t*)tables[state].data)[row]);
    int64_t recurrence;
    int32_t at;
    memcpy(&recurrence, memory, sizeof recurrence);
    for (at = begin; at < end; ++at) {
      const int32_t position = (int32_t)length - (end - at);
      recurrence = advance(recurrence, tokens[at]);
      write_entry(self, full, slots[full][at], tokens[at], position);
      write_entry(self, window, slots[window][at], tokens[at], position);
    }
    memcpy(memory, &recurrence, sizeof recurrence);
    for (leaf = full; leaf <= window; ++leaf) {
      rows[leaf] = (const int32_t*)tables[leaf].data + row * tables[leaf].strides[0];
    }
    said[row] = say(recurrence, attend(self, full, rows[full], 0, length),
                    attend(self, window, rows[window],
                           length > window_tokens ? length - window_tokens : 0, length));
  }
}

/* ---- the runtime -------------------------------------------------------------------------------
 */

/* A step that was planned and not waited for yet. */
struct flight {
  const kvleaf_plan* plan; /* null: none */
  struct request* rows[max_batch];
  uint32_t begin[max_batch]; /* the first token that the step computes of each row */
};

static void take_out(struct request** list, size_t* count, size_t index) {
  memmove(list + index, list + index + 1, (--*count - index) * sizeof *list);
}

/* Admits what has arrived, in order, as long as there is room. */
static void admit(struct runtime* self) {
  while (self->waiting_count != 0 && self->active_count < max_batch &&
         self->waiting[0]->arrives <= self->steps) {
    struct request* request = self->waiting[0];
    kvleaf_admission admission = {.struct_size = sizeof admission};
    kvleaf_status status = kvleaf_manager_admit(self->manager, request->id, request->text,
                                                request->length, NULL, &admission);
    if (status == KVLEAF_POOL_EXHAUSTED) return; /* an active one will end first */
    must(status, "admit");
    request->planned = admission.hit_tokens;
    self->active[self->active_count++] = request;
    take_out(self->waiting, &self->waiting_count, 0);
  }
}

/* Plans the next step of all that have something to compute: a chunk of a prompt, or one token,
 * which the step in flight is about to say. Returns whether somebody found no memory. */
static int plan(struct runtime* self, struct flight* flight) {
  kvleaf_step_request batch[max_batch];
  kvleaf_plan_info info = {.struct_size = sizeof info};
  size_t rows = 0, i, at;
  flight->plan = NULL;
  for (i = 0; i < self->active_count; ++i) {
    const struct request* request = self->active[i];
    uint32_t stop;
    if (request->planned + 1 >= request->wanted) continue; /* its last token is on its way */
    must(kvleaf_manager_next_stop(self->manager, request->id, &stop), "next stop");
    if (stop <= request->planned || stop > request->length) stop = request->length;
    if (stop <= request->planned) stop = request->planned + 1;
    if (stop > request->planned + chunk_tokens) stop = request->planned + chunk_tokens;
    batch[rows].request = request->id;
    batch[rows++].new_tokens = stop - request->planned;
  }
  if (rows == 0) return 0;
  must(kvleaf_planner_plan(self->planner, batch, rows, 0, &flight->plan), "plan");
  must(kvleaf_plan_describe(flight->plan, &info), "describe");
  for (i = 0; i < info.row_count; ++i) {
    struct request* request = NULL;
    for (at = 0; at < self->active_count; ++at) {
      if (self->active[at]->id == info.rows[i]) request = self->active[at];
    }
    flight->rows[i] = request;
    flight->begin[i] = request->planned;
    request->planned = (uint32_t)info.seq_lens[i];
  }
  return info.refused_count != 0;
}

/* Waits for a step: runs the model, which is the device here, and takes in what it said. */
static void wait_for(struct runtime* self, struct flight* flight) {
  int32_t tokens[max_batch * chunk_tokens], said[max_batch];
  kvleaf_plan_info info = {.struct_size = sizeof info};
  size_t i, at;
  if (flight->plan == NULL) return;
  must(kvleaf_plan_describe(flight->plan, &info), "describe");
  for (i = 0; i < info.row_count; ++i) { /* all known now: earlier steps have been waited for */
    const int32_t count = info.cu_seqlens_q[i + 1] - info.cu_seqlens_q[i];
    memcpy(tokens + info.cu_seqlens_q[i], flight->rows[i]->text + flight->begin[i],
           (size_t)count * sizeof *tokens);
  }
  forward(self, flight->plan, tokens, said);
  ++self->steps;
  for (i = 0; i < info.row_count; ++i) {
    struct request* request = flight->rows[i];
    if ((uint32_t)info.seq_lens[i] < request->length) continue; /* its prompt goes on */
    if (said[i] != said_without_cache(request->text, request->length)) ++self->wrong;
    request->text[request->length++] = said[i];
    must(kvleaf_manager_append(self->manager, request->id, &said[i], 1), "append");
  }
  must(kvleaf_planner_settle(self->planner, info.step, NULL, 0), "settle");
  flight->plan = NULL;
  for (at = 0; at < self->active_count;) {
    if (self->active[at]->length == self->active[at]->wanted) {
      must(kvleaf_manager_release(self->manager, self->active[at]->id, KVLEAF_PREFIX_KEEP, NULL),
           "release");
      take_out(self->active, &self->active_count, at);
    } else {
      ++at;
    }
  }
}

/* Gives the memory of the youngest to the others; it comes back with all its tokens. */
static void preempt(struct runtime* self) {
  struct request* youngest;
  if (self->active_count < 2) return;
  youngest = self->active[--self->active_count];
  must(kvleaf_manager_preempt(self->manager, youngest->id), "preempt");
  memmove(self->waiting + 1, self->waiting, self->waiting_count++ * sizeof *self->waiting);
  self->waiting[0] = youngest;
  ++self->preemptions;
}

static void serve(struct runtime* self) {
  struct flight flights[2] = {{NULL}, {NULL}};
  struct flight *running = &flights[0], *next = &flights[1], *done;
  while (self->waiting_count != 0 || self->active_count != 0) {
    int refused;
    admit(self);
    refused = plan(self, next);
    self->pipelined += running->plan != NULL && next->plan != NULL;
    if (running->plan == NULL && next->plan == NULL)
      ++self->steps; /* nobody is here: time passes */
    wait_for(self, running);
    done = running, running = next, next = done;
    if (refused) {
      wait_for(self, running);
      preempt(self);
    }
  }
}

static void make_runtime(struct runtime* self) {
  static const uint32_t shape[1] = {1};
  static const kvleaf_slab slab = {"recurrence", shape, 1, KVLEAF_INT64};
  kvleaf_attention_options attention = {.struct_size = sizeof attention,
                                        .layers = 1,
                                        .kv_heads = 1,
                                        .head_dim = 1,
                                        .dtype = KVLEAF_INT32,
                                        .tokens_per_page = page_tokens};
  kvleaf_window_options reach = {.struct_size = sizeof reach, .window = window_tokens};
  kvleaf_state_options recurrent = {.struct_size = sizeof recurrent,
                                    .layers = 1,
                                    .slabs = &slab,
                                    .slab_count = 1,
                                    .tokens_per_page = page_tokens};
  kvleaf_manager_options options = {.struct_size = sizeof options,
                                    .budget_bytes = budget,
                                    .page_tokens = page_tokens,
                                    .max_len = max_len,
                                    .max_step_tokens = chunk_tokens};
  kvleaf_planner_options bounds = {.struct_size = sizeof bounds,
                                   .max_batch = max_batch,
                                   .max_step_tokens = max_batch * chunk_tokens};
  kvleaf_geometry_info info = {.struct_size = sizeof info};
  const kvleaf_geometry* geometry;
  kvleaf_leaf* leaves[leaf_count];
  uint32_t i;
  must(kvleaf_full_attention_leaf("full", &attention, &leaves[full]), "full");
  must(kvleaf_sliding_window_leaf("window", &reach, &attention, &leaves[window]), "window");
  must(kvleaf_recurrent_state_leaf("state", &recurrent, &leaves[state]), "state");
  must(kvleaf_manager_create(leaves, leaf_count, &options, &self->manager), "manager");
  must(kvleaf_planner_create(self->manager, &bounds, &self->planner), "planner");
  must(kvleaf_manager_geometry(self->manager, &geometry), "geometry");
  must(kvleaf_geometry_describe(geometry, &info), "geometry");
  for (i = 0; i < leaf_count; ++i) {
    self->views[i].struct_size = sizeof self->views[i];
    must(kvleaf_geometry_leaf(geometry, i, &self->views[i]), "geometry");
    kvleaf_leaf_destroy(leaves[i]);
  }
  self->arena = calloc(info.arena_bytes, 1);
  if (self->arena == NULL) must(KVLEAF_OUT_OF_MEMORY, "arena");
}

int main(void) {
  static struct request trace[requests];
  static struct runtime self;
  kvleaf_manager_totals totals = {.struct_size = sizeof totals};
  size_t i;
  make_trace(trace);
  make_runtime(&self);
  for (i = 0; i < requests; ++i) self.waiting[self.waiting_count++] = &trace[i];
  serve(&self);
  must(kvleaf_manager_audit(self.manager), "audit");
  must(kvleaf_manager_stats(self.manager, &totals), "stats");
  printf("%u requests in %u steps, %u of them planned while another ran; %u preemptions\n",
         (unsigned)totals.admitted, self.steps, self.pipelined, self.preemptions);
  printf("%u of %u prompt tokens reused; tokens that differ from those without a cache: %u\n",
         (unsigned)totals.hit_tokens, (unsigned)totals.prompt_tokens, self.wrong);
  kvleaf_planner_destroy(self.planner);
  kvleaf_manager_destroy(self.manager);
  free(self.arena);
  /* So that the example cannot become one that shows nothing. */
  return self.wrong == 0 && totals.hit_tokens > 0 && self.preemptions > 0 && self.pipelined > 0 ? 0
                                                                                                : 1;
}
