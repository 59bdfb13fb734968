#include "kvleaf/kernels/stream.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvleaf::kernels {

namespace {

// Measured on a Xeon with 2 MiB of L2 per core. A memset does not wait for what it overwrites, so
// it loses less by plain stores.
constexpr std::uint64_t streamed_copies_from = std::uint64_t{2} << 20;
constexpr std::uint64_t streamed_clears_from = std::uint64_t{32} << 20;
constexpr std::size_t least_streamed = 512;  // a shorter piece is mostly its unaligned ends

#if defined(__SSE2__)

constexpr std::size_t line = 64;
constexpr std::size_t stretch = 4096;  // hardware prefetchers stop at the end of a memory page,
constexpr std::size_t stretches = 4;   // so several are read side by side

void stream_line(std::byte* dst, const std::byte* src) noexcept {
  const auto* from = reinterpret_cast<const __m128i*>(src);
  auto* to = reinterpret_cast<__m128i*>(dst);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

// Bytes before the first whole line of the destination.
std::size_t bytes_to_line(const std::byte* dst, std::size_t bytes) noexcept {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(dst) % line;
  return std::min(bytes, past == 0 ? 0 : line - past);
}

void stream_copy(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept {
  std::size_t at = bytes_to_line(dst, bytes);
  std::memcpy(dst, src, at);
  for (; bytes - at >= stretches * stretch; at += stretches * stretch) {
    for (std::size_t inside = 0; inside < stretch; inside += line) {
      for (std::size_t i = 0; i < stretches; ++i) {
        const std::size_t offset = at + i * stretch + inside;
        stream_line(dst + offset, src + offset);
      }
    }
  }
  for (; bytes - at >= line; at += line) stream_line(dst + at, src + at);
  std::memcpy(dst + at, src + at, bytes - at);
}

void stream_clear(std::byte* dst, std::size_t bytes) noexcept {
  std::size_t at = bytes_to_line(dst, bytes);
  std::memset(dst, 0, at);
  const __m128i zero = _mm_setzero_si128();
  for (; bytes - at >= line; at += line) {
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, zero);
  }
  std::memset(dst + at, 0, bytes - at);
}

#else  // other processors: memcpy and memset are what there is

void stream_copy(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept {
  std::memcpy(dst, src, bytes);
}
void stream_clear(std::byte* dst, std::size_t bytes) noexcept { std::memset(dst, 0, bytes); }

#endif

}  // namespace

Store store_for_copies(std::uint64_t total_bytes) noexcept {
  return total_bytes >= streamed_copies_from ? Store::streamed : Store::cached;
}

Store store_for_clears(std::uint64_t total_bytes) noexcept {
  return total_bytes >= streamed_clears_from ? Store::streamed : Store::cached;
}

void copy_bytes(std::byte* dst, const std::byte* src, std::size_t bytes, Store store) noexcept {
  if (store == Store::streamed && bytes >= least_streamed) return stream_copy(dst, src, bytes);
  std::memcpy(dst, src, bytes);
}

void clear_bytes(std::byte* dst, std::size_t bytes, Store store) noexcept {
  if (store == Store::streamed && bytes >= least_streamed) return stream_clear(dst, bytes);
  std::memset(dst, 0, bytes);
}

void end_stream(Store store) noexcept {
#if defined(__SSE2__)
  if (store == Store::streamed) _mm_sfence();
#else
  (void)store;
#endif
}

}  // namespace kvleaf::kernels
