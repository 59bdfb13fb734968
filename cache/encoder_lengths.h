// EncoderLengths: how many tokens the encoder inputs had that were filled lately, by digest. The
// pool knows how many were reserved for one, not how many there were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvleaf {

class EncoderLengths {
 public:
  /// Keeps the `most` used last.
  explicit EncoderLengths(std::size_t most) : most_(most) {}

  /// 0: not known.
  std::uint32_t find(const std::string& digest) {
    const auto at = of_.find(digest);
    if (at == of_.end()) return 0;
    entries_.splice(entries_.end(), entries_, at->second);
    return at->second->second;
  }

  void remember(const std::string& digest, std::uint32_t tokens) {
    const auto at = of_.find(digest);
    if (at != of_.end()) {
      at->second->second = tokens;
      entries_.splice(entries_.end(), entries_, at->second);
      return;
    }
    entries_.emplace_back(digest, tokens);
    of_.emplace(digest, std::prev(entries_.end()));
    if (entries_.size() > most_) {
      of_.erase(entries_.front().first);
      entries_.pop_front();
    }
  }

 private:
  using Entries = std::list<std::pair<std::string, std::uint32_t>>;
  std::size_t most_;
  Entries entries_;  // the most recently used last
  std::unordered_map<std::string, Entries::iterator> of_;
};

}  // namespace kvleaf
