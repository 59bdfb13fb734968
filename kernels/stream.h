// Copies and clears that go around the caches. A plain memcpy reads every line of its destination
// before it writes it; once a list of copies is too long for the caches that costs a third of the
// speed, and memcpy itself cannot know, since it sees one page at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvleaf::kernels {

enum class Store : std::uint8_t {
  cached,    // memcpy, memset
  streamed,  // non-temporal stores; end_stream() before others may read
};

/// How a list that copies or clears `total_bytes` in all is best written.
Store store_for_copies(std::uint64_t total_bytes) noexcept;
Store store_for_clears(std::uint64_t total_bytes) noexcept;

void copy_bytes(std::byte* dst, const std::byte* src, std::size_t bytes, Store store) noexcept;
void clear_bytes(std::byte* dst, std::size_t bytes, Store store) noexcept;

/// Orders streamed stores before all later ones.
void end_stream(Store store) noexcept;

}  // namespace kvleaf::kernels
