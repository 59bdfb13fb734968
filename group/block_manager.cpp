#include "kvleaf/group/block_manager.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {
namespace {

std::uint32_t resolved_page(const KVLeafRegion& leaf, std::uint32_t page_tokens) {
  return leaf.tokens_per_page().value_or(page_tokens);
}

std::uint64_t random_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

void check_options(const Leaves& leaves, const ManagerOptions& o) {
  if (leaves.empty())
    throw InvalidArgument("a block manager needs at least one leaf; none was given");
  if (o.page_tokens == 0) throw InvalidArgument("page_tokens is 0; it must be at least 1");
  if (o.max_len == 0) throw InvalidArgument("max_len is 0; give the tokens of the longest request");
  if (o.max_len > (1u << 31)) {
    throw InvalidArgument(fmt::format("max_len is {}; at most 2^31 tokens are served", o.max_len));
  }
  if (o.max_step_tokens == 0) throw InvalidArgument("max_step_tokens is 0; it must be at least 1");
  if (o.max_steps_in_flight == 0 || o.max_steps_in_flight > 8) {
    throw InvalidArgument(
        fmt::format("max_steps_in_flight is {}; it must be 1 to 8", o.max_steps_in_flight));
  }
  if (o.retention.kind == Retention::Kind::every && o.retention.tokens == 0) {
    throw InvalidArgument("retention every 0 tokens; give at least 1, or tail, dense or spaced");
  }
  std::set<std::string> names;
  for (const Leaf& leaf : leaves) {
    if (leaf == nullptr) throw InvalidArgument("a leaf is null");
    if (!names.insert(leaf->leaf_id()).second) {
      throw InvalidArgument(
          fmt::format("two leaves are called '{}'; ids are unique in a cache", leaf->leaf_id()));
    }
    const std::uint32_t P = resolved_page(*leaf, o.page_tokens);
    if (P % o.page_tokens != 0) {
      throw InvalidArgument(
          fmt::format("leaf '{}' has pages of {} tokens; they must be a multiple of page_tokens {}",
                      leaf->leaf_id(), P, o.page_tokens));
    }
  }
}

}  // namespace

std::vector<PageSpec> page_specs(const Leaves& leaves, std::uint32_t page_tokens,
                                 std::uint32_t expected_tokens) {
  std::vector<PageSpec> specs;
  for (const Leaf& leaf : leaves) {
    PageSpec spec = PageSpec::of(*leaf);
    const std::uint32_t P = resolved_page(*leaf, page_tokens);
    const std::uint32_t blocks =
        leaf->blocks_to_reserve(ceil_div(std::max(expected_tokens, 1u), P), P, {false, 1});
    spec.weight =
        static_cast<double>(std::max(blocks, 1u)) * static_cast<double>(spec.bytes_per_page);
    specs.push_back(std::move(spec));
  }
  return specs;
}

BlockManager::Impl::Impl(Leaves leaves, ManagerOptions options)
    : leaves_(std::move(leaves)), options_(std::move(options)) {
  check_options(leaves_, options_);
  if (!options_.seed) {
    options_.seed = options_.hash == KeyHash::xxh3_128 ? random_seed() : 0;
  }
  const std::uint32_t page = options_.page_tokens;
  std::uint32_t tree_leaves = 0;
  for (std::uint32_t i = 0; i < leaves_.size(); ++i) {
    const KVLeafRegion& leaf = *leaves_[i];
    const KVCacheGroupId& id = leaf.group_id();
    LeafInfo info;
    info.id = LeafId{i};
    info.leaf = &leaf;
    info.pattern = id.pattern.tabulated(options_.max_len);
    info.writing = id.writing;
    info.tokens_per_page = resolved_page(leaf, page);
    info.pages = info.tokens_per_page / page;
    info.ahead = id.pattern.ahead() > 0;
    auto group = std::find_if(groups_.begin(), groups_.end(),
                              [&](const GroupInfo& g) { return g.name == id.name; });
    if (group == groups_.end()) {
      groups_.push_back({id.name, id.pattern, id.writing, {}, 0});
      group = groups_.end() - 1;
    } else if (!(group->pattern == id.pattern) || group->writing != id.writing) {
      throw InvalidArgument(
          fmt::format("leaf '{}' is of group '{}' with pattern {} and writing {}, but leaf '{}' of "
                      "that group has {} and {}",
                      leaf.leaf_id(), id.name, id.pattern.to_string(), name_of(id.writing),
                      leaves_[group->leaves.front()]->leaf_id(), group->pattern.to_string(),
                      name_of(group->writing)));
    }
    info.group = static_cast<std::uint32_t>(group - groups_.begin());
    group->leaves.push_back(i);
    const bool text = info.writing == Writing::append || info.writing == Writing::in_place;
    if (text && leaf.cacheable() && options_.enable_prefix_caching) {
      info.tree = tree_leaves++;
      const std::uint64_t unit = std::lcm<std::uint64_t>(unit_, info.tokens_per_page);
      // Past max_len no boundary suits all leaves: nothing can be reused, and nothing is refused
      // for it.
      unit_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(unit, 1u << 31));
      any_ahead_ = any_ahead_ || info.ahead;
    }
    info.needs_all =
        info.writing == Writing::append && info.pattern.tail_begin(options_.max_len) == 0;
    auto& of_kind = info.writing == Writing::append       ? text_
                    : info.writing == Writing::in_place   ? states_
                    : info.writing == Writing::write_once ? encoders_
                                                          : scratch_;
    info.kind_index = static_cast<std::uint32_t>(of_kind.size());
    of_kind.push_back(i);
    info_.push_back(std::move(info));
  }
  if (tree_leaves > 64) {
    throw InvalidArgument(fmt::format("{} leaves are cached by page; at most 64 are", tree_leaves));
  }
  caching_ = options_.enable_prefix_caching && tree_leaves > 0;
  in_chunk_ = caching_;
  bool any_cached_state = false;
  for (const std::uint32_t leaf : states_) {
    if (!info_[leaf].tree) continue;
    any_cached_state = true;
    in_chunk_ = in_chunk_ && info_[leaf].leaf->emits_in_chunk();
  }
  in_chunk_ = in_chunk_ && any_cached_state;

  // A window whose pages at one boundary cost no more than the prefix that they complete, at the
  // typical length. A larger one would push out what it completes.
  const auto bytes_held = [&](const LeafInfo& info) {
    const ReserveOptions one_by_one{false, 1};
    return std::uint64_t{info.leaf->blocks_to_reserve(
               ceil_div(std::max(options_.expected_tokens, 1u), info.tokens_per_page),
               info.tokens_per_page, one_by_one)} *
           info.leaf->bytes_per_page();
  };
  std::uint64_t whole = 0;
  std::uint64_t windows = 0;
  for (const LeafInfo& info : info_) {
    if (info.tree && info.writing == Writing::append)
      (info.needs_all ? whole : windows) += bytes_held(info);
  }
  for (LeafInfo& info : info_) {
    info.completes =
        info.tree && info.writing == Writing::append && !info.needs_all && windows <= whole;
  }

  Geometry geometry = options_.geometry
                          ? *options_.geometry
                          : plan_geometry(options_.budget_bytes,
                                          page_specs(leaves_, page, options_.expected_tokens));
  if (geometry.leaves().size() != leaves_.size()) {
    throw InvalidArgument(fmt::format("the geometry has {} pages for {} leaves",
                                      geometry.leaves().size(), leaves_.size()));
  }
  for (std::uint32_t i = 0; i < leaves_.size(); ++i) {
    const LeafGeometry& g = geometry.leaf(LeafId{i});
    if (g.name != leaves_[i]->leaf_id() || g.bytes_per_page != leaves_[i]->bytes_per_page()) {
      throw InvalidArgument(fmt::format(
          "page {} of the geometry is '{}' of {} bytes; leaf {} is '{}' of {} bytes", i, g.name,
          g.bytes_per_page, i, leaves_[i]->leaf_id(), leaves_[i]->bytes_per_page()));
    }
    leaves_[i]->bind(g.page_stride);
  }
  std::uint64_t pages = 0;  // of the tree, at most: each holds at least one block of some leaf
  for (const LeafInfo& info : info_) {
    if (info.tree) pages = std::max(pages, geometry.leaf(info.id).blocks);
  }
  last_writer_ = std::make_unique<LastWriter>(geometry);
  pool_ = std::make_unique<BlockPool>(
      std::move(geometry), PoolOptions{.index = KeyIndex::none, .guarded = options_.guarded});
  pool_->on_evict([this](LeafId leaf, BlockId block, PageKey key) { evicted(leaf, block, key); });
  // Where states are, or windows larger than what they complete, a page that is gone is not worth
  // proving: what would resume behind it is gone as well, and pages alone serve nobody. (Measured:
  // it costs hits.)
  const bool remember =
      caching_ && options_.eviction == EvictionOrder::value && states_.empty() && windows <= whole;
  tree_ = std::make_unique<PrefixTree>(
      PrefixTree::Options{.page_tokens = page,
                          .leaves = tree_leaves,
                          .page_keys = options_.events,
                          .ahead_tokens = any_ahead_,
                          .expected_pages = caching_ ? pages : 0,
                          .history_pages = remember ? pages : 0,
                          .hasher = PageHasher(options_.hash, *options_.seed)});
  tree_->on_split([this](SegmentId lower, SegmentId upper, std::uint32_t first_of_lower) {
    for (const auto& [id, request] : requests_) {
      if (request->cursor.segment == lower && request->cursor.pages <= first_of_lower &&
          request->publish) {
        tree_->pin(upper);
        request->cursor.segment = upper;
        tree_->unpin(lower);
      }
    }
    for (const LeafInfo& info : info_) {
      if (!info.tree) continue;
      const std::uint32_t mask = tree_->mask(upper, *info.tree);
      const std::uint32_t first = tree_->first_page(upper);
      for (std::uint32_t bits = mask; bits != 0; bits &= bits - 1) {
        const std::uint32_t page = first + static_cast<std::uint32_t>(std::countr_zero(bits));
        pool_->rekey(info.id, tree_->block(upper, page, *info.tree), {upper.value(), page});
      }
    }
  });
  steps_.resize(options_.max_steps_in_flight);
  wanted_.resize(leaves_.size());
}

BlockManager::Impl::~Impl() = default;

Request* BlockManager::Impl::find(RequestId id) const noexcept {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second.get();
}

Request& BlockManager::Impl::get(RequestId id) const {
  if (Request* request = find(id)) return *request;
  throw RequestError(
      fmt::format("request {} is not live; {} requests are", id.value(), requests_.size()));
}

StepRecord* BlockManager::Impl::record_of(std::uint64_t step) noexcept {
  if (step < first_step_ || step >= next_step_) return nullptr;
  return &steps_[step % steps_.size()];
}

// ---- the public face
// -----------------------------------------------------------------------------

BlockManager::BlockManager(Leaves leaves, ManagerOptions options)
    : impl_(std::make_unique<Impl>(std::move(leaves), std::move(options))) {}
BlockManager::~BlockManager() = default;

const ManagerOptions& BlockManager::options() const noexcept { return impl_->options_; }
const Leaves& BlockManager::leaves() const noexcept { return impl_->leaves_; }
const Geometry& BlockManager::geometry() const noexcept { return impl_->pool_->geometry(); }
BlockPool& BlockManager::pool() noexcept { return *impl_->pool_; }
const BlockPool& BlockManager::pool() const noexcept { return *impl_->pool_; }

LeafId BlockManager::find_leaf(std::string_view leaf_id) const {
  std::vector<std::string_view> names;
  for (std::uint32_t i = 0; i < impl_->leaves_.size(); ++i) {
    names.push_back(impl_->leaves_[i]->leaf_id());
    if (names.back() == leaf_id) return LeafId{i};
  }
  throw InvalidArgument(
      fmt::format("no leaf is called '{}'; there are {}", leaf_id, fmt::join(names, ", ")));
}

std::uint32_t BlockManager::tokens_per_page(LeafId leaf) const {
  return impl_->info_.at(leaf.value()).tokens_per_page;
}
std::uint32_t BlockManager::longest_request() const { return impl_->longest_request(); }

Admission BlockManager::admit(RequestId request, std::span<const Token> tokens,
                              const AdmitOptions& options) {
  return impl_->admit(request, tokens, options);
}
Admission BlockManager::probe(std::span<const Token> tokens, const AdmitOptions& options) const {
  return impl_->probe(tokens, options);
}

void BlockManager::append(RequestId request, std::span<const Token> tokens) {
  Request& r = impl_->get(request);
  if (r.tokens.size() + tokens.size() > impl_->options_.max_len) {
    throw RequestError(fmt::format("request {} knows {} tokens; {} more pass max_len {}",
                                   request.value(), r.known(), tokens.size(),
                                   impl_->options_.max_len));
  }
  r.tokens.insert(r.tokens.end(), tokens.begin(), tokens.end());
  impl_->commit(r);  // pages whose step has settled and whose last id was missing
}

std::optional<std::uint32_t> BlockManager::next_stop(RequestId request) const {
  return impl_->next_stop(impl_->get(request));
}
void BlockManager::encoder_filled(RequestId request) { impl_->encoder_filled(impl_->get(request)); }
void BlockManager::release(RequestId request, Prefix prefix,
                           std::optional<std::uint32_t> addressable) {
  impl_->release(request, prefix, addressable);
}
void BlockManager::preempt(RequestId request) { impl_->preempt(request); }
const Step& BlockManager::begin_step(std::span<const StepRequest> batch) {
  return impl_->begin_step(batch);
}
void BlockManager::settle(StepId step, std::span<const Kept> kept) { impl_->settle(step, kept); }
std::vector<std::pair<RequestId, std::uint32_t>> BlockManager::abandon(StepId step) {
  return impl_->abandon(step);
}
void BlockManager::fork(RequestId parent, RequestId child) { impl_->fork(parent, child); }
void BlockManager::rewind(RequestId request, std::uint32_t tokens) {
  impl_->rewind(request, tokens);
}
void BlockManager::reset_cache() { impl_->reset_cache(); }

bool BlockManager::contains(RequestId request) const noexcept {
  return impl_->requests_.contains(request);
}
std::uint32_t BlockManager::length(RequestId request) const { return impl_->get(request).known(); }
std::uint32_t BlockManager::computed(RequestId request) const {
  return impl_->get(request).computed;
}
std::uint32_t BlockManager::planned(RequestId request) const { return impl_->get(request).planned; }

std::span<const BlockId> BlockManager::blocks(RequestId request, LeafId leaf) const {
  return impl_->get(request).rows.at(leaf.value()).slots;
}

std::optional<BlockId> BlockManager::live_block(RequestId request, LeafId leaf) const {
  Request& r = impl_->get(request);
  const LeafInfo& info = impl_->info_.at(leaf.value());
  if (info.writing == Writing::in_place) {
    State& state = r.states[info.kind_index];
    if (state.ring.empty() || state.at(r.planned) == null_block) return {};
    return state.at(r.planned);
  }
  if (info.writing == Writing::exclusive) return r.scratch[info.kind_index];
  throw RequestError(fmt::format(
      "leaf '{}' keeps a row of blocks, not one live block; ask blocks()", info.leaf->leaf_id()));
}

ManagerStats BlockManager::stats() const { return impl_->stats(); }
void BlockManager::audit() const { impl_->audit(); }
std::vector<Event> BlockManager::take_events() { return std::exchange(impl_->events_, {}); }

}  // namespace kvleaf
