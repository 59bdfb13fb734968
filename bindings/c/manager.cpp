// Requests.
#include <algorithm>
#include <memory>

#include "border.h"

namespace kvleaf::c {

void show(std::span<const Refusal> refused, Refusals& into) {
  into.clear();
  for (const Refusal& refusal : refused) {
    into.push_back({refusal.request.value(), refusal.why.c_str()});
  }
}

std::span<const Kept> kept_of(const kvleaf_kept* kept, std::size_t count,
                              std::vector<Kept>& storage) {
  storage.clear();
  for (const kvleaf_kept& row : span_of(kept, count, "kept")) {
    storage.push_back({RequestId(row.request), row.tokens});
  }
  return storage;
}

std::span<const StepRequest> batch_of(const kvleaf_step_request* batch, std::size_t count) {
  return {same<const StepRequest>(span_of(batch, count, "batch").data()), count};
}

void abandon(Managed& managed, StepPlanner* planner, std::uint64_t step,
             const kvleaf_request_length** out, std::size_t* count) {
  if (out != nullptr || count != nullptr) {
    require(out, "out");
    require(count, "count");
  }
  auto lengths =
      planner != nullptr ? planner->abandon(StepId(step)) : managed.manager.abandon(StepId(step));
  managed.lengths = std::move(lengths);
  if (out == nullptr) return;
  *out = same<const kvleaf_request_length>(managed.lengths.data());
  *count = managed.lengths.size();
}

namespace {

BlockManager& core(kvleaf_manager* manager) { return require(manager, "manager").managed->manager; }
const BlockManager& core(const kvleaf_manager* manager) {
  return require(manager, "manager").managed->manager;
}

Retention retention_of(kvleaf_retention retention, std::uint32_t tokens) {
  require_constant("retention", retention, KVLEAF_RETENTION_EVERY);
  switch (retention) {
    case KVLEAF_RETENTION_TAIL: return Retention::tail();
    case KVLEAF_RETENTION_DENSE: return Retention::dense();
    case KVLEAF_RETENTION_SPACED: return Retention::spaced();
    case KVLEAF_RETENTION_EVERY: return Retention::every(tokens);
    default: return ManagerOptions{}.retention;
  }
}

void set_unless_zero(std::uint32_t& option, std::uint32_t given) {
  if (given != 0) option = given;
}

ManagerOptions manager_options(const kvleaf_manager_options* given) {
  const kvleaf_manager_options options = read_struct(given, "options");
  require_constant("eviction", options.eviction, KVLEAF_EVICTION_LRU);
  require_constant("hash", options.hash, KVLEAF_HASH_SHA256);
  ManagerOptions read;
  read.budget_bytes = options.budget_bytes;
  set_unless_zero(read.page_tokens, options.page_tokens);
  read.max_len = options.max_len;
  set_unless_zero(read.max_step_tokens, options.max_step_tokens);
  set_unless_zero(read.max_steps_in_flight, options.max_steps_in_flight);
  if (options.geometry != nullptr) read.geometry = options.geometry->geometry;
  set_unless_zero(read.expected_tokens, options.expected_tokens);
  read.enable_prefix_caching = !flag("disable_prefix_caching", options.disable_prefix_caching);
  read.retention = retention_of(options.retention, options.retention_tokens);
  if (options.eviction != KVLEAF_EVICTION_DEFAULT) {
    read.eviction =
        options.eviction == KVLEAF_EVICTION_LRU ? EvictionOrder::lru : EvictionOrder::value;
  }
  if (options.hash != KVLEAF_HASH_DEFAULT) {
    read.hash = options.hash == KVLEAF_HASH_SHA256 ? KeyHash::sha256 : KeyHash::xxh3_128;
  }
  if (flag("has_seed", options.has_seed)) read.seed = options.seed;
  read.events = flag("events", options.events);
  return read;
}

std::string bytes_of(const void* bytes, std::size_t count, const char* name) {
  const auto given = span_of(static_cast<const char*>(bytes), count, name);
  return {given.begin(), given.end()};
}

AdmitOptions admit_options(const kvleaf_admit_options* given) {
  const kvleaf_admit_options options = read_optional(given, "options");
  AdmitOptions read;
  read.salt = bytes_of(options.salt, options.salt_bytes, "salt");
  if (options.adapter != nullptr) read.adapter = options.adapter;
  if (options.encoder_digest != nullptr) {
    read.encoder = {
        .digest = bytes_of(options.encoder_digest, options.encoder_digest_bytes, "encoder_digest"),
        .tokens = options.encoder_tokens,
        .at = options.encoder_at};
  } else if (options.encoder_tokens != 0) {
    throw InvalidArgument(
        fmt::format("{} encoder tokens, but encoder_digest is null", options.encoder_tokens));
  }
  for (const kvleaf_media_item& item : span_of(options.media, options.media_count, "media")) {
    read.media.push_back({.offset = item.offset,
                          .length = item.length,
                          .digest = bytes_of(item.digest, item.digest_bytes, "media digest"),
                          .whole = flag("whole", item.whole)});
  }
  read.priority = options.priority;
  if (options.guarantee != 0) read.guarantee = options.guarantee;
  if (flag("has_addressable", options.has_addressable)) read.addressable = options.addressable;
  read.partial = flag("partial", options.partial);
  return read;
}

/// Keeps an answer, whose strings it hands out.
void answer(Managed& managed, Admission admission, const Output<kvleaf_admission>& out) {
  std::vector<kvleaf_group_loss> lost;
  for (const GroupLoss& loss : admission.lost) lost.push_back({loss.group.c_str(), loss.tokens});
  // A vector that is moved keeps its elements where they are, so the names stay.
  managed.admission.lost = std::move(admission.lost);
  managed.admission.reason = std::move(admission.reason);
  managed.lost = std::move(lost);
  out.write({.struct_size = 0,
             .hit_tokens = admission.hit_tokens,
             .next_stop = admission.next_stop.value_or(0),
             .encoder_cached = admission.encoder_cached,
             .lost_count = static_cast<std::uint32_t>(managed.lost.size()),
             .lost = managed.lost.data(),
             .reason = managed.admission.reason.c_str()});
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

kvleaf_status kvleaf_manager_create(kvleaf_leaf* const* leaves, size_t count,
                                    const kvleaf_manager_options* options, kvleaf_manager** out) {
  return guarded([&] {
    require(out, "out");
    Leaves regions;
    for (kvleaf_leaf* leaf : span_of(leaves, count, "leaves")) {
      regions.push_back(require(leaf, "leaf").leaf);
    }
    auto made = std::make_unique<kvleaf_manager>();
    made->managed = std::make_shared<Managed>(std::move(regions), manager_options(options));
    *out = made.release();
  });
}

void kvleaf_manager_destroy(kvleaf_manager* manager) { delete manager; }

kvleaf_status kvleaf_manager_geometry(const kvleaf_manager* manager, const kvleaf_geometry** out) {
  return guarded(
      [&] { require(out, "out") = &require(manager, "manager").managed->pool.geometry; });
}

kvleaf_status kvleaf_manager_pool(kvleaf_manager* manager, kvleaf_pool** out) {
  return guarded([&] { require(out, "out") = &require(manager, "manager").managed->pool; });
}

kvleaf_status kvleaf_manager_find_leaf(const kvleaf_manager* manager, const char* leaf_id,
                                       uint32_t* out_leaf) {
  return guarded([&] {
    require(out_leaf, "out_leaf");
    require(leaf_id, "leaf_id");
    *out_leaf = core(manager).find_leaf(leaf_id).value();
  });
}

kvleaf_status kvleaf_manager_tokens_per_page(const kvleaf_manager* manager, uint32_t leaf,
                                             uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    static_cast<void>(core(manager).geometry().leaf(LeafId(leaf)));
    *out = core(manager).tokens_per_page(LeafId(leaf));
  });
}

kvleaf_status kvleaf_manager_longest_request(const kvleaf_manager* manager, uint32_t* out) {
  return guarded([&] { require(out, "out") = core(manager).longest_request(); });
}

// ---- a request's life --------------------------------------------------------------------------

kvleaf_status kvleaf_manager_admit(kvleaf_manager* manager, uint64_t request, const int32_t* tokens,
                                   size_t count, const kvleaf_admit_options* options,
                                   kvleaf_admission* out) {
  return guarded([&] {
    Managed& managed = *require(manager, "manager").managed;
    const auto into = Output<kvleaf_admission>::optional(out, "out");
    answer(managed,
           managed.manager.admit(RequestId(request), span_of(tokens, count, "tokens"),
                                 admit_options(options)),
           into);
  });
}

kvleaf_status kvleaf_manager_probe(kvleaf_manager* manager, const int32_t* tokens, size_t count,
                                   const kvleaf_admit_options* options, kvleaf_admission* out) {
  return guarded([&] {
    Managed& managed = *require(manager, "manager").managed;
    const Output into(out, "out");
    answer(managed, managed.manager.probe(span_of(tokens, count, "tokens"), admit_options(options)),
           into);
  });
}

kvleaf_status kvleaf_manager_append(kvleaf_manager* manager, uint64_t request,
                                    const int32_t* tokens, size_t count) {
  return guarded(
      [&] { core(manager).append(RequestId(request), span_of(tokens, count, "tokens")); });
}

kvleaf_status kvleaf_manager_next_stop(const kvleaf_manager* manager, uint64_t request,
                                       uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = core(manager).next_stop(RequestId(request)).value_or(0);
  });
}

kvleaf_status kvleaf_manager_encoder_filled(kvleaf_manager* manager, uint64_t request) {
  return guarded([&] { core(manager).encoder_filled(RequestId(request)); });
}

kvleaf_status kvleaf_manager_release(kvleaf_manager* manager, uint64_t request,
                                     kvleaf_prefix prefix, const uint32_t* addressable) {
  return guarded([&] {
    static_assert(static_cast<int>(Prefix::keep) == KVLEAF_PREFIX_KEEP &&
                  static_cast<int>(Prefix::drop) == KVLEAF_PREFIX_DROP);
    require_constant("prefix", prefix, KVLEAF_PREFIX_DROP);
    core(manager).release(RequestId(request), static_cast<Prefix>(prefix),
                          addressable == nullptr ? std::nullopt : std::optional(*addressable));
  });
}

kvleaf_status kvleaf_manager_preempt(kvleaf_manager* manager, uint64_t request) {
  return guarded([&] { core(manager).preempt(RequestId(request)); });
}

kvleaf_status kvleaf_manager_fork(kvleaf_manager* manager, uint64_t parent, uint64_t child) {
  return guarded([&] { core(manager).fork(RequestId(parent), RequestId(child)); });
}

kvleaf_status kvleaf_manager_rewind(kvleaf_manager* manager, uint64_t request, uint32_t tokens) {
  return guarded([&] { core(manager).rewind(RequestId(request), tokens); });
}

kvleaf_status kvleaf_manager_reset_cache(kvleaf_manager* manager) {
  return guarded([&] { core(manager).reset_cache(); });
}

// ---- steps -------------------------------------------------------------------------------------

kvleaf_status kvleaf_manager_begin_step(kvleaf_manager* manager, const kvleaf_step_request* batch,
                                        size_t count, kvleaf_step* out) {
  return guarded([&] {
    Managed& managed = *require(manager, "manager").managed;
    const Output into(out, "out");
    const auto rows = batch_of(batch, count);
    Refusals& refused = managed.steps[managed.next_step];
    refused.clear();
    refused.reserve(count);  // so that nothing can fail once the step was begun
    const Step& step = managed.manager.begin_step(rows);
    managed.next_step = (managed.next_step + 1) % managed.steps.size();
    show(step.refused, refused);
    into.write({.struct_size = 0,
                .id = step.id.value(),
                .served = same<const std::uint64_t>(step.served.data()),
                .served_count = step.served.size(),
                .refused = refused.data(),
                .refused_count = refused.size(),
                .copies = same<const kvleaf_block_copy>(step.copies.data()),
                .copy_count = step.copies.size(),
                .zero_fills = same<const kvleaf_zero_fill>(step.zero_fills.data()),
                .zero_fill_count = step.zero_fills.size()});
  });
}

kvleaf_status kvleaf_manager_settle(kvleaf_manager* manager, uint64_t step, const kvleaf_kept* kept,
                                    size_t count) {
  return guarded([&] {
    std::vector<Kept> storage;
    core(manager).settle(StepId(step), kept_of(kept, count, storage));
  });
}

kvleaf_status kvleaf_manager_abandon(kvleaf_manager* manager, uint64_t step,
                                     const kvleaf_request_length** out, size_t* count) {
  return guarded([&] { abandon(*require(manager, "manager").managed, nullptr, step, out, count); });
}

// ---- what it holds -----------------------------------------------------------------------------

kvleaf_status kvleaf_manager_contains(const kvleaf_manager* manager, uint64_t request,
                                      uint32_t* out) {
  return guarded([&] { require(out, "out") = core(manager).contains(RequestId(request)); });
}

kvleaf_status kvleaf_manager_length(const kvleaf_manager* manager, uint64_t request,
                                    uint32_t* out) {
  return guarded([&] { require(out, "out") = core(manager).length(RequestId(request)); });
}

kvleaf_status kvleaf_manager_computed(const kvleaf_manager* manager, uint64_t request,
                                      uint32_t* out) {
  return guarded([&] { require(out, "out") = core(manager).computed(RequestId(request)); });
}

kvleaf_status kvleaf_manager_planned(const kvleaf_manager* manager, uint64_t request,
                                     uint32_t* out) {
  return guarded([&] { require(out, "out") = core(manager).planned(RequestId(request)); });
}

kvleaf_status kvleaf_manager_blocks(const kvleaf_manager* manager, uint64_t request, uint32_t leaf,
                                    const uint32_t** out, size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    static_cast<void>(core(manager).geometry().leaf(LeafId(leaf)));
    const auto blocks = core(manager).blocks(RequestId(request), LeafId(leaf));
    *out = same<const std::uint32_t>(blocks.data());
    *count = blocks.size();
  });
}

kvleaf_status kvleaf_manager_live_block(const kvleaf_manager* manager, uint64_t request,
                                        uint32_t leaf, uint32_t* out_block) {
  return guarded([&] {
    require(out_block, "out_block");
    static_cast<void>(core(manager).geometry().leaf(LeafId(leaf)));
    *out_block =
        core(manager).live_block(RequestId(request), LeafId(leaf)).value_or(null_block).value();
  });
}

kvleaf_status kvleaf_manager_stats(const kvleaf_manager* manager, kvleaf_manager_totals* out) {
  return guarded([&] {
    const Output into(out, "out");
    const ManagerStats stats = core(manager).stats();
    into.write({.struct_size = 0,
                .requests = stats.requests,
                .admitted = stats.admitted,
                .resumed = stats.resumed,
                .refused = stats.refused,
                .prompt_tokens = stats.prompt_tokens,
                .hit_tokens = stats.hit_tokens,
                .step_refusals = stats.step_refusals,
                .preemptions = stats.preemptions,
                .committed_pages = stats.committed_pages,
                .segments = stats.segments,
                .twins = stats.twins,
                .checkpoints = stats.checkpoints,
                .checkpoints_skipped = stats.checkpoints_skipped,
                .quarantined = stats.quarantined,
                .steps_in_flight = stats.steps_in_flight,
                .metadata_bytes = stats.metadata_bytes});
  });
}

kvleaf_status kvleaf_manager_lost_tokens(const kvleaf_manager* manager, const char* group,
                                         uint64_t* out) {
  return guarded([&] {
    require(out, "out");
    require(group, "group");
    const ManagerStats stats = core(manager).stats();
    std::string names;
    for (const GroupStats& one : stats.groups) {
      if (one.group == group) {
        *out = one.lost_tokens;
        return;
      }
      names += fmt::format("{}{}", names.empty() ? "" : ", ", one.group);
    }
    throw InvalidArgument(fmt::format("no group '{}'; there are: {}", group, names));
  });
}

kvleaf_status kvleaf_manager_audit(const kvleaf_manager* manager) {
  return guarded([&] { core(manager).audit(); });
}

kvleaf_status kvleaf_manager_take_events(kvleaf_manager* manager, const kvleaf_event** out,
                                         size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    static_assert(static_cast<int>(Event::Kind::stored) == KVLEAF_EVENT_STORED &&
                  static_cast<int>(Event::Kind::removed) == KVLEAF_EVENT_REMOVED &&
                  static_cast<int>(Event::Kind::cleared) == KVLEAF_EVENT_CLEARED);
    Managed& managed = *require(manager, "manager").managed;
    managed.events = managed.manager.take_events();
    managed.shown_events.clear();
    for (const Event& event : managed.events) {
      kvleaf_event& shown = managed.shown_events.emplace_back();
      shown = {.kind = static_cast<kvleaf_event_kind>(event.kind),
               .tokens = event.tokens,
               .group = event.group.c_str(),
               .leaf = event.leaf.c_str(),
               .key = {},
               .parent_key = {}};
      std::copy(event.key.begin(), event.key.end(), shown.key.bytes);
      std::copy(event.parent_key.begin(), event.parent_key.end(), shown.parent_key.bytes);
    }
    *out = managed.shown_events.data();
    *count = managed.shown_events.size();
  });
}
