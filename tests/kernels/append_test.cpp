#include "kvleaf/kernels/append.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "kernels/machine.h"
#include "kvleaf/kernels/convert.h"
#include "kvleaf/kernels/gather.h"

namespace kvleaf::kernels::test {
namespace {

// Slots of distinct entries, in runs, out of order and with padding.
std::vector<std::int64_t> random_slots(Random& random, std::uint32_t slots, std::uint32_t blocks,
                                       std::size_t most) {
  std::vector<char> used((blocks + 1) * std::size_t{slots}, 0);
  std::vector<std::int64_t> entries;
  while (entries.size() < most) {
    if (draw(random, 0, 7) == 0) {
      entries.push_back(-1);
      continue;
    }
    auto entry = static_cast<std::int64_t>(draw(random, slots, used.size() - 1));
    for (std::size_t run = draw(random, 1, 2 * slots); run > 0 && entries.size() < most;
         --run, ++entry) {
      if (entry >= static_cast<std::int64_t>(used.size()) || used[entry] != 0) break;
      used[entry] = 1;
      entries.push_back(entry);
    }
    if (std::count(used.begin(), used.end(), 0) < 2 * std::ptrdiff_t{slots}) break;
  }
  return entries;
}

TEST_CASE_TEMPLATE("V-01 append with slots 3, -1, 5 writes two tokens and nothing else", Machine,
                   KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  // Pages of 2 slots: entry 3 is block 1 slot 1, entry 5 is block 2 slot 1.
  const KVLayout layout{
      .layers = 2, .slots = 2, .kv_heads = 3, .key_dim = 8, .value_dim = 4, .element_bytes = 2};
  const std::uint64_t stride = layout.page_bytes() + 48;
  Random random(11);
  const Bytes before = random_bytes(random, 4 * stride);
  const Bytes keys = random_bytes(random, 3 * layout.key_row_bytes());
  const Bytes values = random_bytes(random, 3 * layout.value_row_bytes());
  typename Machine::Buffer arena(before), new_keys(keys), new_values(values);
  const KVPages pages{arena.data(), stride, 3, layout, Number::bfloat16};
  const std::vector<std::int64_t> slots{3, -1, 5};
  Machine::append_kv({new_keys.data(), new_values.data(), Number::bfloat16}, slots, pages, 1,
                     nullptr);

  Bytes expected = before;
  const std::uint64_t layer = 2 * (3 * 8 * 2 + 3 * 4 * 2);  // bytes of layer 0
  const auto put = [&](std::uint64_t at, const Bytes& from, std::uint64_t token,
                       std::uint64_t bytes) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(token * bytes), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(at));
  };
  put(1 * stride + layer + 1 * 48, keys, 0, 48);
  put(1 * stride + layer + 2 * 48 + 1 * 24, values, 0, 24);
  put(2 * stride + layer + 1 * 48, keys, 2, 48);
  put(2 * stride + layer + 2 * 48 + 1 * 24, values, 2, 24);
  CHECK(arena.download() == expected);
}

TEST_CASE_TEMPLATE("rows appended and gathered equal a byte-by-byte model", Machine,
                   KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(12);
  for (int round = 0; round < 300; ++round) {
    const auto slots_per_page = static_cast<std::uint32_t>(draw(random, 1, 9));
    const auto blocks = static_cast<std::uint32_t>(draw(random, 2, 9));
    // Rows of whole sixteens, as pages have them, and rows of any size.
    const std::uint64_t row_bytes = draw(random, 1, 10) * (draw(random, 0, 1) == 0 ? 16 : 1);
    const std::uint64_t offset = draw(random, 0, 3) * 16;
    const std::uint64_t stride = offset + slots_per_page * row_bytes + draw(random, 0, 2) * 16;
    const std::uint64_t source_stride = row_bytes + draw(random, 0, 1) * 32;
    const Bytes before = random_bytes(random, (blocks + 1) * stride);
    const auto slots = random_slots(random, slots_per_page, blocks, draw(random, 0, 40));
    const Bytes rows = random_bytes(random, slots.size() * source_stride + 1);

    typename Machine::Buffer arena(before), source(rows);
    const RowPages pages{arena.data(), stride, offset, row_bytes, slots_per_page, blocks};
    Machine::append_rows(source.data(), source_stride, slots, pages);
    Bytes expected = before;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == -1) continue;
      const std::uint64_t at =
          slots[i] / slots_per_page * stride + offset + slots[i] % slots_per_page * row_bytes;
      for (std::uint64_t b = 0; b < row_bytes; ++b) expected[at + b] = rows[i * source_stride + b];
    }
    REQUIRE(arena.download() == expected);

    // Back again: what was appended, and zeros where there is padding.
    const Bytes noise = random_bytes(random, slots.size() * source_stride + 1);
    typename Machine::Buffer out(noise);
    Machine::gather_rows(pages, slots, out.data(), source_stride);
    Bytes gathered = noise;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      for (std::uint64_t b = 0; b < row_bytes; ++b) {
        gathered[i * source_stride + b] =
            slots[i] == -1 ? std::byte{0} : rows[i * source_stride + b];
      }
    }
    REQUIRE(out.download() == gathered);
  }
}

TEST_CASE("an append that names the null block or a block beyond the last writes nothing") {
  Random random(13);
  const Bytes before = random_bytes(random, 4 * 64);
  Bytes arena = before;
  const Bytes rows = random_bytes(random, 3 * 16);
  const RowPages pages{arena.data(), 64, 0, 16, 4, 3};
  const auto refused = [&](std::vector<std::int64_t> slots, const char* message) {
    CHECK_THROWS_WITH_AS(append_rows(rows.data(), 16, slots, pages), message, KernelError);
    CHECK(arena == before);
  };
  refused({5, 3, 6}, "slot mapping entry 1 is 3: -1 and 4 to 15 are allowed");
  refused({5, 6, 16}, "slot mapping entry 2 is 16: -1 and 4 to 15 are allowed");
  refused({-2, 6, 7}, "slot mapping entry 0 is -2: -1 and 4 to 15 are allowed");
  RowPages sheared = pages;
  sheared.offset = 16;
  const std::vector<std::int64_t> one{4};
  CHECK_THROWS_AS(append_rows(rows.data(), 16, one, sheared), KernelError);

  // A gather may read the null block, and goes no further than the last.
  Bytes out(16);
  const std::vector<std::int64_t> null{0}, last{15}, beyond{16};
  CHECK_NOTHROW(gather_rows(pages, null, out.data(), 16));
  CHECK_NOTHROW(gather_rows(pages, last, out.data(), 16));
  CHECK_THROWS_AS(gather_rows(pages, beyond, out.data(), 16), KernelError);
}

// A leaf with a scales leaf beside it, whose blocks have other numbers.
struct Quantised {
  Quantised(KVLayout values_layout, Number number, Number scale_number, std::uint32_t granularity_,
            std::uint32_t blocks_)
      : layout(values_layout), blocks(blocks_), granularity(granularity_) {
    layout.element_bytes = size_of(number);
    const KVLayout scales_shape = scales_layout(layout, granularity, size_of(scale_number));
    value_stride = layout.page_bytes() + 32;
    scale_stride = scales_shape.page_bytes() + 16;
    value_bytes.assign((blocks + 1) * value_stride, std::byte{0});
    scale_bytes.assign((blocks + 1) * scale_stride, std::byte{0});
    pages = {value_bytes.data(), value_stride, blocks, layout, number};
    scales = {
        {scale_bytes.data(), scale_stride, blocks, scales_shape, scale_number}, granularity, {}};
  }

  KVLayout layout;
  std::uint32_t blocks;
  std::uint32_t granularity;
  std::uint64_t value_stride;
  std::uint64_t scale_stride;
  Bytes value_bytes;
  Bytes scale_bytes;
  KVPages pages;
  ScalePages scales;
};

// The distance between neighbours of a type around `value`, in units of the scale.
double step_of(Number number, double value) {
  const double magnitude = std::fabs(value);
  if (number == Number::int8) return 1;
  const int mantissa = number == Number::float8_e4m3 ? 3 : 2;
  const int least = number == Number::float8_e4m3 ? -6 : -14;
  const int exponent = magnitude == 0 ? least : std::max(least, std::ilogb(magnitude));
  return std::ldexp(1.0, exponent - mantissa);
}

TEST_CASE(
    "V-03 a quantised append of zeros, of an outlier and of random values comes back within a "
    "step") {
  Random random(14);
  std::normal_distribution<float> normal;
  const Number quantised[] = {Number::float8_e4m3, Number::float8_e5m2, Number::int8};
  const Number wide[] = {Number::float32, Number::float16, Number::bfloat16};
  for (const Number number : quantised) {
    for (const Number input : wide) {
      for (const Number scale_number : wide) {
        CAPTURE(name_of(number));
        CAPTURE(name_of(input));
        CAPTURE(name_of(scale_number));
        const KVLayout layout{.layers = 2,
                              .slots = 4,
                              .kv_heads = 2,
                              .key_dim = 48,
                              .value_dim = 32,
                              .element_bytes = 1};
        Quantised leaf(layout, number, scale_number, 16, 5);
        // Tokens: zeros, one outlier, random, tiny.
        constexpr std::size_t tokens = 6;
        const std::vector<std::int64_t> slots{4, 23, -1, 9, 10, 13};
        const std::vector<std::int64_t> scale_slots{17, 8, -1, 4, 22, 5};
        leaf.scales.slots = scale_slots;
        const auto fill = [&](std::uint32_t row) {
          std::vector<float> values(tokens * row, 0.0f);
          for (std::size_t i = 0; i < row; ++i) {
            values[row + i] = 0.001f;
            values[2 * row + i] = normal(random);
            values[3 * row + i] = normal(random);
            values[4 * row + i] = 1e-6f * normal(random);
            values[5 * row + i] = 1000.0f * normal(random);
          }
          values[row + 5] = 30000.0f;
          return values;
        };
        const std::vector<float> keys = fill(2 * 48), values = fill(2 * 32);
        const auto stored = [&](const std::vector<float>& from) {
          Bytes bytes(from.size() * size_of(input));
          converter(Number::float32, input)(from.data(), bytes.data(), from.size(), 1.0f);
          return bytes;
        };
        const Bytes key_bytes = stored(keys), value_bytes = stored(values);
        append_kv({key_bytes.data(), value_bytes.data(), input}, slots, leaf.pages, 1,
                  &leaf.scales);

        std::vector<float> out_keys(keys.size(), -1.0f), out_values(values.size(), -1.0f);
        gather_kv(leaf.pages, 1, slots, {out_keys.data(), out_values.data(), Number::float32},
                  &leaf.scales);
        const auto check = [&](const Bytes& bytes, const std::vector<float>& out, std::uint32_t dim,
                               bool is_key) {
          const std::size_t row = 2 * dim;
          for (std::size_t token = 0; token < tokens; ++token) {
            for (std::size_t i = 0; i < row; ++i) {
              const double original =
                  load_number(input, bytes.data() + (token * row + i) * size_of(input));
              const double back = out[token * row + i];
              if (slots[token] == -1) {
                REQUIRE(back == 0);
                continue;
              }
              const std::uint32_t head = static_cast<std::uint32_t>(i / dim);
              const std::uint32_t group = static_cast<std::uint32_t>(i % dim / 16);
              const std::int64_t entry = scale_slots[token];
              const KVPages& scales = leaf.scales.pages;
              const std::uint64_t at =
                  is_key ? scales.key_offset(entry / 4, 1, entry % 4, head, group)
                         : scales.value_offset(entry / 4, 1, entry % 4, head, group);
              const double scale = load_number(scale_number, scales.base + at);
              REQUIRE(std::isfinite(scale));
              REQUIRE(scale > 0);
              // Half a step of rounding, and a little for the products in float.
              REQUIRE(std::fabs(original - back) <= 0.5001 * scale * step_of(number, back / scale));
            }
          }
        };
        check(key_bytes, out_keys, 48, true);
        check(value_bytes, out_values, 32, false);

        // Only the listed slots of the listed blocks were written, in either leaf.
        const auto untouched = [](const Bytes& bytes, std::uint64_t stride, std::int64_t block) {
          return std::all_of(bytes.begin() + block * static_cast<std::ptrdiff_t>(stride),
                             bytes.begin() + (block + 1) * static_cast<std::ptrdiff_t>(stride),
                             [](std::byte byte) { return byte == std::byte{0}; });
        };
        CHECK(untouched(leaf.value_bytes, leaf.value_stride, 0));
        CHECK(untouched(leaf.value_bytes, leaf.value_stride, 4));
        CHECK(untouched(leaf.scale_bytes, leaf.scale_stride, 0));
        CHECK(untouched(leaf.scale_bytes, leaf.scale_stride, 3));
        CHECK(!untouched(leaf.scale_bytes, leaf.scale_stride, 5));
      }
    }
  }
}

TEST_CASE_TEMPLATE(
    "entries of every pair of types are written and read bit by bit as a slow model says", Machine,
    KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(16);
  std::normal_distribution<float> normal;
  const Number wide[] = {Number::float32, Number::float16, Number::bfloat16};
  const Number all[] = {Number::float32,     Number::float16,     Number::bfloat16,
                        Number::float8_e4m3, Number::float8_e5m2, Number::int8};
  for (const Number outside : wide) {
    for (const Number inside : all) {
      for (const bool scaled : {false, true}) {
        if (size_of(inside) == 1 ? inside == Number::int8 && !scaled : scaled) continue;
        CAPTURE(name_of(outside));
        CAPTURE(name_of(inside));
        CAPTURE(scaled);
        const Number scale_number = wide[draw(random, 0, 2)];
        KVLayout layout{.layers = 2,
                        .slots = 3,
                        .kv_heads = 2,
                        .key_dim = 40,
                        .value_dim = 0,
                        .element_bytes = size_of(inside)};
        layout.value_dim = draw(random, 0, 1) == 0 ? 0 : 80;
        constexpr std::uint32_t blocks = 5, granularity = 20;
        const KVLayout scale_layout = scales_layout(layout, granularity, size_of(scale_number));
        const std::uint64_t stride = layout.page_bytes() + 8;
        const std::uint64_t scale_stride = scale_layout.page_bytes();
        const Bytes before = random_bytes(random, (blocks + 1) * stride);
        const Bytes scales_before = random_bytes(random, (blocks + 1) * scale_stride);
        const auto slots = random_slots(random, 3, blocks, 11);
        // Another order of the same slots, padded in the same places.
        std::vector<std::int64_t> scale_slots = slots, used;
        std::ranges::copy_if(slots, std::back_inserter(used), [](auto slot) { return slot != -1; });
        std::shuffle(used.begin(), used.end(), random);
        for (std::int64_t& slot : scale_slots) {
          if (slot == -1) continue;
          slot = used.back();
          used.pop_back();
        }
        const std::uint32_t row = 2 * 40, value_row = 2 * layout.value_dim;
        Bytes keys(slots.size() * row * size_of(outside)),
            values(slots.size() * value_row * size_of(outside));
        for (Bytes* entries : {&keys, &values}) {
          for (std::size_t i = 0; i < entries->size(); i += size_of(outside)) {
            store_number(outside, &(*entries)[i],
                         draw(random, 0, 30) == 0 ? INFINITY : normal(random));
          }
        }

        // The model: element by element.
        Bytes expected = before, scales_expected = scales_before;
        Bytes keys_back(keys.size()), values_back(values.size());
        for (std::size_t token = 0; token < slots.size(); ++token) {
          if (slots[token] == -1) continue;
          const auto block = static_cast<std::uint64_t>(slots[token] / 3);
          const auto slot = static_cast<std::uint32_t>(slots[token] % 3);
          const auto scale_block = static_cast<std::uint64_t>(scale_slots[token] / 3);
          const auto scale_slot = static_cast<std::uint32_t>(scale_slots[token] % 3);
          for (const bool is_key : {true, false}) {
            const std::uint32_t elements = is_key ? row : value_row;
            const Bytes& from = is_key ? keys : values;
            Bytes& back = is_key ? keys_back : values_back;
            const std::uint64_t at = block * stride + (is_key ? layout.key_offset(1, slot)
                                                              : layout.value_offset(1, slot));
            const std::uint64_t scale_at =
                scale_block * scale_stride + (is_key ? scale_layout.key_offset(1, scale_slot)
                                                     : scale_layout.value_offset(1, scale_slot));
            const auto number = [&](std::uint32_t i) {
              return load_number(outside, &from[(token * elements + i) * size_of(outside)]);
            };
            float scale = 1;
            for (std::uint32_t i = 0; i < elements; ++i) {
              if (scaled && i % granularity == 0) {
                float largest = 0;
                for (std::uint32_t j = i; j < i + granularity; ++j) {
                  if (std::isfinite(number(j))) largest = std::max(largest, std::fabs(number(j)));
                }
                scale = scale_for(largest, inside, scale_number);
                store_number(scale_number,
                             &scales_expected[scale_at + i / granularity * size_of(scale_number)],
                             scale);
              }
              std::byte* stored = &expected[at + i * size_of(inside)];
              store_number(inside, stored, number(i) * (1.0f / scale));
              store_number(outside, &back[(token * elements + i) * size_of(outside)],
                           load_number(inside, stored) * scale);
            }
          }
        }

        typename Machine::Buffer arena(before), scale_arena(scales_before), new_keys(keys),
            new_values(values);
        const KVPages pages{arena.data(), stride, blocks, layout, inside};
        const ScalePages scales{
            {scale_arena.data(), scale_stride, blocks, scale_layout, scale_number},
            granularity,
            scale_slots};
        const ScalePages* with = scaled ? &scales : nullptr;
        Machine::append_kv({new_keys.data(), new_values.data(), outside}, slots, pages, 1, with);
        REQUIRE(arena.download() == expected);
        REQUIRE(scale_arena.download() == (scaled ? scales_expected : scales_before));
        Machine::gather_kv(pages, 1, slots, {new_keys.data(), new_values.data(), outside}, with);
        REQUIRE(new_keys.download() == keys_back);
        REQUIRE(new_values.download() == values_back);
      }
    }
  }
}

TEST_CASE("V-03 a gather through the null block and through padding gives zeros") {
  const KVLayout layout{
      .layers = 1, .slots = 4, .kv_heads = 1, .key_dim = 16, .value_dim = 16, .element_bytes = 1};
  Quantised leaf(layout, Number::int8, Number::float16, 16, 2);
  const std::vector<std::int64_t> slots{0, -1, 3}, scale_slots{2, -1, 1};
  leaf.scales.slots = scale_slots;
  std::vector<float> keys(48, 7.0f), values(48, 7.0f);
  gather_kv(leaf.pages, 0, slots, {keys.data(), values.data(), Number::float32}, &leaf.scales);
  CHECK(std::ranges::all_of(keys, [](float value) { return value == 0; }));
  CHECK(std::ranges::all_of(values, [](float value) { return value == 0; }));
}

TEST_CASE("infinities and NaN leave scales finite") {
  const KVLayout layout{
      .layers = 1, .slots = 1, .kv_heads = 1, .key_dim = 8, .value_dim = 0, .element_bytes = 1};
  for (const Number number : {Number::float8_e4m3, Number::float8_e5m2, Number::int8}) {
    Quantised leaf(layout, number, Number::bfloat16, 8, 1);
    const std::vector<std::int64_t> slots{1};
    leaf.scales.slots = slots;
    const std::vector<float> keys{INFINITY, -INFINITY, NAN, 2, -1, 0, 1, 0.5f};
    append_kv({keys.data(), nullptr, Number::float32}, slots, leaf.pages, 0, &leaf.scales);
    std::vector<float> back(8);
    gather_kv(leaf.pages, 0, slots, {back.data(), nullptr, Number::float32}, &leaf.scales);
    CHECK(back[0] == doctest::Approx(2).epsilon(0.01));  // saturates at the largest finite value
    CHECK(back[1] == doctest::Approx(-2).epsilon(0.01));
    if (number == Number::int8) CHECK(back[2] == 0);
    if (number != Number::int8) CHECK(std::isnan(back[2]));
    CHECK(back[3] == doctest::Approx(2).epsilon(0.01));
  }
}

TEST_CASE("numbers are rounded into pages of another type, and read back in any wide type") {
  Random random(15);
  std::normal_distribution<float> normal(0, 3);
  const KVLayout shape{
      .layers = 3, .slots = 4, .kv_heads = 2, .key_dim = 24, .value_dim = 8, .element_bytes = 0};
  for (const Number stored : {Number::float32, Number::float16, Number::bfloat16,
                              Number::float8_e4m3, Number::float8_e5m2}) {
    KVLayout layout = shape;
    layout.element_bytes = size_of(stored);
    Bytes arena(6 * layout.page_bytes());
    const KVPages pages{arena.data(), layout.page_bytes(), 5, layout, stored};
    const auto slots = random_slots(random, 4, 5, 12);
    std::vector<float> keys(slots.size() * 48), values(slots.size() * 16);
    for (float& key : keys) key = normal(random);
    for (float& value : values) value = normal(random);
    append_kv({keys.data(), values.data(), Number::float32}, slots, pages, 2);
    std::vector<float> out_keys(keys.size()), out_values(values.size());
    gather_kv(pages, 2, slots, {out_keys.data(), out_values.data(), Number::float32});
    const auto rounded = [&](float value) {
      std::uint32_t bits = 0;
      store_number(stored, &bits, value);
      return load_number(stored, &bits);
    };
    for (std::size_t i = 0; i < keys.size(); ++i) {
      REQUIRE(out_keys[i] == (slots[i / 48] == -1 ? 0.0f : rounded(keys[i])));
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      REQUIRE(out_values[i] == (slots[i / 16] == -1 ? 0.0f : rounded(values[i])));
    }
  }
}

TEST_CASE("scales that do not fit their values are refused, and nothing is written") {
  const KVLayout layout{
      .layers = 1, .slots = 2, .kv_heads = 1, .key_dim = 16, .value_dim = 16, .element_bytes = 1};
  Quantised leaf(layout, Number::int8, Number::float32, 8, 2);
  const std::vector<std::int64_t> slots{2, 4}, scale_slots{3, 5};
  leaf.scales.slots = scale_slots;
  std::vector<float> keys(32, 1.0f), values(32, 1.0f);
  const NewEntries entries{keys.data(), values.data(), Number::float32};
  const auto refused = [&](const NewEntries& new_entries, const ScalePages* scales) {
    CHECK_THROWS_AS(append_kv(new_entries, slots, leaf.pages, 0, scales), KernelError);
    CHECK(std::ranges::all_of(leaf.value_bytes, [](std::byte b) { return b == std::byte{0}; }));
    CHECK(std::ranges::all_of(leaf.scale_bytes, [](std::byte b) { return b == std::byte{0}; }));
  };
  refused(entries, nullptr);  // int8 needs scales
  ScalePages other = leaf.scales;
  other.granularity = 5;
  refused(entries, &other);
  other.granularity = 4;  // twice the scales that the pages hold
  refused(entries, &other);
  other = leaf.scales;
  other.pages.number = Number::int8;
  refused(entries, &other);
  const std::vector<std::int64_t> short_slots{3}, padded_slots{3, -1}, null_slots{3, 1};
  for (const auto* bad : {&short_slots, &padded_slots, &null_slots}) {
    other = leaf.scales;
    other.slots = *bad;
    refused(entries, &other);
  }
  NewEntries narrow = entries;
  narrow.number = Number::float8_e4m3;
  refused(narrow, &leaf.scales);
  CHECK_THROWS_AS(append_kv(entries, slots, leaf.pages, 1, &leaf.scales), KernelError);
  CHECK_NOTHROW(append_kv(entries, slots, leaf.pages, 0, &leaf.scales));
}

}  // namespace
}  // namespace kvleaf::kernels::test
