// Elastic memory: huge blocks leave service and come back. Their ids and bytes stay reserved.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

std::uint64_t BlockPool::huge_blocks() const noexcept {
  std::uint64_t claimed = 0;
  for (const PageClass& page_class : classes_) claimed += page_class.claimed.get();
  return claimed + room();
}

/// The list of empty huge blocks anew, the lowest first.
void BlockPool::relink_empty() {
  first_empty_ = fresh;  // an end that is never reached: empty_ counts
  empty_.set(0);
  for (auto huge = static_cast<std::uint32_t>(huge_.size()); huge-- > 0;) {
    if (huge_[huge].owner == HugeBlock::nobody) push_empty(huge);
  }
}

std::vector<ByteRange> BlockPool::resize(std::uint64_t huge_blocks) {
  require(Work::ready, "resize");
  if (huge_blocks > huge_.size()) {
    throw InvalidArgument(
        fmt::format("resize to {} huge blocks; max_huge_blocks is {}", huge_blocks, huge_.size()));
  }
  const std::uint64_t before = this->huge_blocks();
  std::vector<std::uint32_t> concerned;
  if (huge_blocks >= before) {
    for (std::uint32_t huge = 0; concerned.size() < huge_blocks - before; ++huge) {
      if (huge_[huge].owner != HugeBlock::absent) continue;
      huge_[huge].owner = HugeBlock::nobody;
      concerned.push_back(huge);
    }
    relink_empty();
  } else {
    const Verdict standing = judge({});
    const std::uint64_t spare =
        standing.huge_left - std::min(standing.huge_left, standing.huge_needed);
    const std::uint64_t leaving = before - huge_blocks;
    if (leaving > spare) {
      throw PoolExhausted(
          fmt::format("resize from {} to {} huge blocks: {} are claimed and {} are needed for "
                      "floors and promises; "
                      "at least {} must stay",
                      before, huge_blocks, before - room(), standing.huge_needed, before - spare));
    }
    const auto take = [&](std::uint32_t huge) {
      huge_[huge].owner = HugeBlock::absent;
      if (guard_.on()) guard_.lose(huge);
      concerned.push_back(huge);
    };
    concerned.reserve(leaving);
    for (auto huge = static_cast<std::uint32_t>(huge_.size()); huge-- > 0;) {
      if (concerned.size() < leaving && huge_[huge].owner == HugeBlock::nobody) take(huge);
    }
    relink_empty();
    try {
      while (concerned.size() < leaving) {
        if (empty_.get() == 0) {
          LeastKey<Worth> least{Worth(), 0};
          for (PageClass& page_class : classes_) {
            least = std::min(least, least_idle(page_class),
                             [](const auto& a, const auto& b) { return a.key < b.key; });
          }
          drain(least.index);
        }
        take(pop_empty());
      }
    } catch (...) {
      for (const std::uint32_t huge : concerned) huge_[huge].owner = HugeBlock::nobody;
      relink_empty();
      throw;
    }
  }
  std::sort(concerned.begin(), concerned.end());
  std::vector<ByteRange> ranges;
  for (const std::uint32_t huge : concerned) {
    const std::uint64_t begin = geometry_.null_bytes() + huge * geometry_.huge_bytes();
    if (!ranges.empty() && ranges.back().end == begin) {
      ranges.back().end += geometry_.huge_bytes();
    } else {
      ranges.push_back({begin, begin + geometry_.huge_bytes()});
    }
  }
  return ranges;
}

}  // namespace kvleaf
