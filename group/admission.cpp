// Admission: the answer to a prompt, and what of it is to be kept.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {
namespace {

/// With states or small windows `tail` keeps one more boundary of a prompt: the last multiple of so
/// many tokens. Less finds fewer prompts that leave another one some way before its end, more
/// computes more again.
constexpr std::uint32_t tail_grid = 512;

/// Extra keys of the pages in which media items and the encoder's input begin.
PageExtras page_extras(const AdmitOptions& options, std::uint32_t page_tokens) {
  PageExtras extras;
  const auto add = [&](std::uint32_t at, std::string_view kind, std::string_view digest,
                       std::uint64_t length) {
    const std::uint32_t page = at / page_tokens;
    auto place = std::lower_bound(extras.begin(), extras.end(), page,
                                  [](const PageExtra& e, std::uint32_t p) { return e.page < p; });
    if (place == extras.end() || place->page != page) place = extras.insert(place, {page, {}});
    append_unambiguously(place->key, kind);
    append_unambiguously(place->key, digest);
    append_unambiguously(place->key, fmt::format("{}+{}", at % page_tokens, length));
  };
  if (options.encoder)
    add(options.encoder->at, "encoder", options.encoder->digest, options.encoder->tokens);
  for (const MediaItem& item : options.media) add(item.offset, "media", item.digest, item.length);
  return extras;
}

}  // namespace

void BlockManager::Impl::check_admission(std::span<const Token> tokens,
                                         const AdmitOptions& options) const {
  if (tokens.empty()) throw RequestError("a request needs at least one token; none was given");
  if (tokens.size() > options_.max_len) {
    throw RequestError(
        fmt::format("a prompt of {} tokens passes max_len {}", tokens.size(), options_.max_len));
  }
  if (options.guarantee &&
      (*options.guarantee > options_.max_len || *options.guarantee < tokens.size())) {
    throw RequestError(
        fmt::format("a guarantee of {} tokens; it must lie between the prompt's {} and max_len {}",
                    *options.guarantee, tokens.size(), options_.max_len));
  }
  std::uint64_t end = 0;
  for (const MediaItem& item : options.media) {
    const std::uint64_t item_end = std::uint64_t{item.offset} + item.length;
    if (item.length == 0 || item.offset < end || item_end > tokens.size()) {
      throw RequestError(
          fmt::format("media item at [{}, {}): items must be ascending, not overlapping, not empty "
                      "and inside the prompt's {} "
                      "tokens",
                      item.offset, item_end, tokens.size()));
    }
    end = item_end;
  }
  if (options.encoder) {
    if (encoders_.empty()) {
      throw RequestError("an encoder input was given, but no leaf is written by an encoder");
    }
    if (options.encoder->tokens == 0 || options.encoder->at >= tokens.size()) {
      throw RequestError(
          fmt::format("an encoder of {} tokens at position {}: it needs at least one token, and a "
                      "position inside the prompt's {}",
                      options.encoder->tokens, options.encoder->at, tokens.size()));
    }
  }
}

void BlockManager::Impl::plan_kept(Request& r, std::uint32_t junction) const {
  r.kept.clear();
  if (!caching_) return;
  const auto keep = [&](std::uint64_t n) {
    const std::uint32_t boundary = boundary_outside(
        static_cast<std::uint32_t>(std::min<std::uint64_t>(n, r.prompt - 1)), unit_, r.uncut);
    if (boundary > 0 && boundary <= r.addressable) r.kept.push_back(boundary);
  };
  keep(r.prompt - 1);
  if (junction > 0) keep(junction);
  // A prompt that goes on from this one rarely repeats its very end: a template's last tokens, a
  // block of another cache. A state some way before is worth its memory, and a window that costs
  // less than the prefix it completes (docs/retention.md).
  const bool pays = std::any_of(info_.begin(), info_.end(), [](const LeafInfo& info) {
    return info.completes || info.writing == Writing::in_place;
  });
  if (options_.retention.kind == Retention::Kind::tail && pays) {
    const std::uint64_t grid = std::uint64_t{ceil_div(tail_grid, unit_)} * unit_;
    keep((r.prompt - 1) / grid * grid);
  }
  if (options_.retention.kind == Retention::Kind::spaced) {
    const std::uint64_t last = (r.prompt - 1) / unit_;
    for (std::uint64_t pages = 1; pages <= last; pages *= 2) {
      keep(pages * unit_);           // from the start
      keep((last - pages) * unit_);  // from the end
    }
  }
  std::sort(r.kept.begin(), r.kept.end());
  r.kept.erase(std::unique(r.kept.begin(), r.kept.end()), r.kept.end());
}

std::optional<std::uint32_t> BlockManager::Impl::next_stop(const Request& r) const {
  if (states_.empty() || !caching_ || !r.publish) return {};
  if (in_chunk_) return {};  // wherever a chunk ends, its boundaries are emitted
  // The next boundary behind what is planned that is worth a checkpoint, if it lies before the
  // known end.
  std::uint32_t stop = std::numeric_limits<std::uint32_t>::max();
  const auto offer = [&](std::uint64_t n) {
    if (n > r.planned && n < stop) stop = static_cast<std::uint32_t>(n);
  };
  for (const std::uint32_t n : r.kept) offer(n);
  const std::uint32_t known = std::min(r.known(), r.addressable);
  const auto next = [&](std::uint64_t step) {  // multiples of step, up to what is known
    std::uint64_t n = (r.planned / step + 1) * step;
    while (n <= known && boundary_outside(static_cast<std::uint32_t>(n), unit_, r.uncut) != n)
      n += step;
    if (n <= known) offer(n);
  };
  if (options_.retention.kind == Retention::Kind::dense) next(unit_);
  if (options_.retention.kind == Retention::Kind::every)
    next(std::uint64_t{ceil_div(options_.retention.tokens, unit_)} * unit_);
  offer(boundary_outside(known, unit_, r.uncut));
  if (stop > r.known()) return {};
  return stop;
}

void BlockManager::Impl::describe(Request& r, std::span<const Token> tokens,
                                  const AdmitOptions& options) const {
  r.prompt = static_cast<std::uint32_t>(tokens.size());
  r.addressable = options.addressable.value_or(std::numeric_limits<std::uint32_t>::max());
  r.priority = std::clamp(options.priority, -128, 127);
  r.guarantee = options.guarantee;
  r.extras = page_extras(options, options_.page_tokens);
  if (options.encoder) r.begins.push_back(options.encoder->at);
  for (const MediaItem& item : options.media) {
    r.begins.push_back(item.offset);
    if (item.whole) r.uncut.push_back({item.offset, item.offset + item.length});
  }
}

void BlockManager::Impl::count_admission(const Request& r, const Admission& admission) {
  const auto preempted = preempted_.find(r.id);
  if (preempted != preempted_.end()) {
    ++counters_.resumed;
    preempted_.erase(preempted);
    return;
  }
  ++counters_.admitted;
  counters_.prompt_tokens += r.prompt;
  counters_.hit_tokens += r.hit;
  for (const GroupLoss& loss : admission.lost) {
    std::find_if(groups_.begin(), groups_.end(), [&](const GroupInfo& g) {
      return g.name == loss.group;
    })->lost_tokens += loss.tokens;
  }
}

Admission BlockManager::Impl::answer(RequestId id, std::span<const Token> tokens,
                                     const AdmitOptions& options, bool keep) {
  check_admission(tokens, options);
  if (keep && requests_.contains(id)) {
    throw RequestError(fmt::format(
        "request {} is live already; release it first, or choose another id", id.value()));
  }
  std::unique_ptr<Request> owned = make_request(id);
  Request& r = *owned;
  try {
    describe(r, tokens, options);
    Found& found = found_;
    find(tokens, options, r, found);
    Claimed claimed = claim_deepest(r, found, options);

    Admission admission;
    admission.hit_tokens = r.hit;
    admission.encoder_cached = claimed.encoder_cached;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const bool in_play = std::any_of(found.residency.begin(), found.residency.end(),
                                       [&](const LeafResidency& leaf) { return leaf.group == g; });
      if (!in_play) continue;
      const std::uint32_t without = joint_hit(found.residency, found.limit, unit_, r.uncut, g);
      if (without > found.hit) admission.lost.push_back({groups_[g].name, without - found.hit});
    }
    if (claimed.hit < found.hit) {
      admission.reason =
          fmt::format("a hit of {} tokens would not fit: {}", found.hit, claimed.why);
    } else if (!admission.lost.empty() || r.hit == 0) {
      admission.reason = reason_of(found, tokens, options);
    }
    plan_kept(r, found.junction);
    r.tokens.assign(tokens.begin(), tokens.end());
    admission.next_stop = next_stop(r);

    if (!keep) {
      unclaim(r);
      unpin_encoder(claimed.encoder);
      retire(std::move(owned));
      return admission;
    }

    // What is taken and evicted now must not take the path away: its end holds all of it.
    std::optional<SegmentId> path_end;
    if (!found.path.parts.empty()) path_end = found.path.parts.back().segment;
    if (path_end) tree_->pin(*path_end);
    if (claimed.steals) take_checkpoints(r);
    if (r.guarantee) {  // from now on nobody may take what it was promised
      guaranteed_.push_back(&r);
      form_promises();
    }
    if (options.encoder) {
      use_encoder(r, claimed.encoder != nullptr ? *claimed.encoder : *make_encoder(options));
    }
    if (caching_) enter_tree(r, found, claimed.hit, tokens, options);
    if (path_end) tree_->unpin(*path_end);
    if (r.planned < r.prompt) prompts_.push_back(&r);
    requests_.emplace(id, std::move(owned));
    count_admission(r, admission);
    ++clock_;
    return admission;
  } catch (const PoolExhausted&) {
    if (keep) ++counters_.refused;
    retire(std::move(owned));
    throw;
  } catch (...) {
    if (owned != nullptr) {
      std::erase(guaranteed_, owned.get());
      retire(std::move(owned));
    }
    throw;
  }
}

Admission BlockManager::Impl::admit(RequestId id, std::span<const Token> tokens,
                                    const AdmitOptions& options) {
  return answer(id, tokens, options, true);
}

Admission BlockManager::Impl::probe(std::span<const Token> tokens, const AdmitOptions& options) {
  return answer(RequestId{std::numeric_limits<std::uint64_t>::max()}, tokens, options, false);
}

}  // namespace kvleaf
