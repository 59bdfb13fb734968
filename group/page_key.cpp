#include "kvleaf/group/page_key.h"

#define XXH_INLINE_ALL
#include <openssl/evp.h>
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <memory>
#include <string>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

using Parts = std::array<std::span<const std::byte>, 3>;

XXH128_hash_t hash_of(std::uint64_t seed, const Parts& parts) {
  XXH3_state_t state{};  // g++ 12 cannot see that reset fills it
  XXH3_128bits_reset_withSeed(&state, seed);
  for (const auto part : parts) XXH3_128bits_update(&state, part.data(), part.size());
  return XXH3_128bits_digest(&state);
}

PageDigest xxh3(std::uint64_t seed, const Parts& parts) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash_of(seed, parts));
  PageDigest digest;
  std::memcpy(digest.data(), canonical.digest, digest.size());
  return digest;
}

/// A chain of pages without extra keys: the same digests. A key goes from page to page in two
/// registers, in the byte order of a digest: read back from memory as one piece it would wait for
/// its two halves to be written.
template <std::size_t page_bytes>  // 0: `bytes`
void xxh3_chain(std::uint64_t seed, const PageDigest& parent, const std::byte* tokens,
                std::size_t bytes, std::span<PageDigest> out) {
  constexpr std::size_t most = 1024;
  if constexpr (page_bytes != 0) bytes = page_bytes;
  alignas(64) std::array<std::byte, sizeof(PageDigest) + (page_bytes != 0 ? page_bytes : most)>
      whole;
  std::array<std::uint64_t, 2> key;
  std::memcpy(key.data(), parent.data(), sizeof key);
  for (PageDigest& digest : out) {
    std::memcpy(whole.data(), &key[0], 8);
    std::memcpy(whole.data() + 8, &key[1], 8);
    std::memcpy(whole.data() + sizeof key, tokens, bytes);
    tokens += bytes;
    const XXH128_hash_t hash = XXH3_128bits_withSeed(whole.data(), sizeof key + bytes, seed);
    key = {XXH_swap64(hash.high64), XXH_swap64(hash.low64)};  // canonical: big endian, high first
    std::memcpy(digest.data(), key.data(), sizeof key);
  }
}

PageDigest sha256(std::uint64_t seed, const Parts& parts) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  std::array<unsigned char, EVP_MAX_MD_SIZE> full{};
  unsigned int length = 0;
  std::array<unsigned char, 8> little{};
  for (std::size_t i = 0; i < little.size(); ++i)
    little[i] = static_cast<unsigned char>(seed >> (8 * i));
  bool good = context != nullptr && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1 &&
              EVP_DigestUpdate(context.get(), little.data(), little.size()) == 1;
  for (const auto part : parts) {
    good = good && EVP_DigestUpdate(context.get(), part.data(), part.size()) == 1;
  }
  good = good && EVP_DigestFinal_ex(context.get(), full.data(), &length) == 1;
  if (!good) throw KVError("OpenSSL refused to compute a sha256");
  PageDigest digest;
  std::memcpy(digest.data(), full.data(), digest.size());
  return digest;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

PageDigest digest_of(KeyHash hash, std::uint64_t seed, const Parts& parts) {
  return hash == KeyHash::sha256 ? sha256(seed, parts) : xxh3(seed, parts);
}

static_assert(std::endian::native == std::endian::little,
              "tokens enter the hash as they lie in memory, which must be little endian");

}  // namespace

void append_unambiguously(std::string& to, std::string_view part) {
  const std::uint64_t length = part.size();
  for (int i = 0; i < 8; ++i) to.push_back(static_cast<char>(length >> (8 * i)));
  to.append(part);
}

PageDigest PageHasher::root(std::string_view salt, std::string_view adapter) const {
  std::string name;
  append_unambiguously(name, salt);
  append_unambiguously(name, adapter);
  const Parts parts{bytes_of("kvleaf root"), bytes_of(name)};
  return digest_of(hash_, seed_, parts);
}

PageDigest PageHasher::page(const PageDigest& parent, std::span<const Token> tokens,
                            std::string_view extra) const {
  const Parts parts{std::as_bytes(std::span(parent)), std::as_bytes(tokens), bytes_of(extra)};
  return digest_of(hash_, seed_, parts);
}

void PageHasher::pages(const PageDigest& parent, std::span<const Token> tokens,
                       std::span<PageDigest> out) const {
  if (out.empty()) return;
  const std::size_t page_tokens = tokens.size() / out.size();
  const std::size_t bytes = page_tokens * sizeof(Token);
  const auto* const first = reinterpret_cast<const std::byte*>(tokens.data());
  if (hash_ == KeyHash::xxh3_128 && bytes == 16 * sizeof(Token)) {
    return xxh3_chain<16 * sizeof(Token)>(seed_, parent, first, bytes, out);
  }
  if (hash_ == KeyHash::xxh3_128 && bytes <= 1024) {
    return xxh3_chain<0>(seed_, parent, first, bytes, out);
  }
  PageDigest above = parent;
  for (std::size_t i = 0; i < out.size(); ++i) {
    above = out[i] = page(above, tokens.subspan(i * page_tokens, page_tokens), {});
  }
}

}  // namespace kvleaf
