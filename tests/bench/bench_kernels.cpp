// Workload "kernels": what moves bytes on the CPU, beside one memcpy or memset of as many bytes in
// one piece. Budgets: copies and clears of pages at 90 % of it, appends at 60 %. A quantised append
// reads more than it writes: its floor is the memcpy that reads and writes as many bytes in sum.
//
// Each list works on 128 MiB (more than the caches hold) or on 4 MiB; pages and slots lie
// scattered, as after a long run.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/kernels/kernels.h"

namespace {

using namespace kvleaf::kernels;

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;

/// Memory in huge pages where the system has them, as the arena of a pool is, and touched.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    madvise(at, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(at);
    std::memset(data_, 1, bytes);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  std::uint64_t bytes_;
};

template <class T>
std::vector<T> shuffled(T first, std::size_t count) {
  std::vector<T> all(count);
  std::iota(all.begin(), all.end(), first);
  std::shuffle(all.begin(), all.end(), std::mt19937(7));
  return all;
}

/// Copies from one half of a memory to the other, in one piece.
bench::Body one_memcpy(std::uint64_t bytes) {
  return [=](benchmark::State& state) {
    const Memory memory(2 * bytes);
    for (auto _ : state) {
      std::memcpy(memory.data() + bytes, memory.data(), bytes);
      benchmark::ClobberMemory();
    }
  };
}

std::int64_t rounds(std::uint64_t bytes) { return static_cast<std::int64_t>(1024 * MiB / bytes); }

void add_pages(bench::Suite& suite, std::uint64_t page, std::uint64_t total) {
  const auto count = static_cast<std::uint32_t>(total / page);
  const std::uint64_t bytes = count * page;
  const std::string name = fmt::format("{} pages of {} KiB", count, page / KiB);
  suite.add(
      {.name = name, .metric = "copy_us", .unit = "us", .iterations = rounds(total)},
      [=](benchmark::State& state) {
        const Memory memory((2 * count + 1) * page);
        const Pages leaf{memory.data(), page, page, 2 * count};
        const auto blocks = shuffled<std::int32_t>(1, 2 * count);
        std::vector<BlockCopy> list;
        for (std::uint32_t i = 0; i < count; ++i) list.push_back({0, blocks[i], blocks[count + i]});
        for (auto _ : state) {
          std::vector<BlockCopy> copies = list;  // copy_pages sorts it, as it must each time
          copy_pages({&leaf, 1}, copies);
          benchmark::ClobberMemory();
        }
      },
      one_memcpy(bytes));
  suite.add(
      {.name = name, .metric = "zero_us", .unit = "us", .iterations = rounds(total)},
      [=](benchmark::State& state) {
        const Memory memory((count + 1) * page);
        const Pages leaf{memory.data(), page, page, count};
        std::vector<BlockClear> list;
        for (const std::int32_t block : shuffled<std::int32_t>(1, count))
          list.push_back({0, block});
        for (auto _ : state) {
          zero_pages({&leaf, 1}, list);
          benchmark::ClobberMemory();
        }
      },
      [=](benchmark::State& state) {
        const Memory memory(bytes);
        for (auto _ : state) {
          std::memset(memory.data(), 0, bytes);
          benchmark::ClobberMemory();
        }
      });
}

/// Entries of one layer: 8 KV heads of 128, bfloat16, 16 slots to a page.
struct Layer {
  KVLayout layout{.layers = 1,
                  .slots = 16,
                  .kv_heads = 8,
                  .key_dim = 128,
                  .value_dim = 128,
                  .element_bytes = 2};
  std::uint64_t entry_bytes() const { return layout.key_row_bytes() + layout.value_row_bytes(); }
};

/// Slots of `tokens` new tokens: whole pages (a prompt), or one in each page (a decode step).
std::vector<std::int64_t> some_slots(bool prompt, std::uint32_t tokens) {
  std::vector<std::int64_t> slots;
  if (prompt) {
    for (const std::int64_t block : shuffled<std::int64_t>(1, tokens / 16)) {
      for (std::int64_t slot = 0; slot < 16; ++slot) slots.push_back(join_entry(block, slot, 16));
    }
  } else {
    for (const std::int64_t block : shuffled<std::int64_t>(1, tokens)) {
      slots.push_back(join_entry(block, block % 16, 16));
    }
  }
  return slots;
}

void add_entries(bench::Suite& suite, bool prompt, std::uint32_t tokens) {
  const Layer layer;
  const std::uint64_t bytes = tokens * layer.entry_bytes();
  const std::uint32_t blocks = prompt ? tokens / 16 : tokens;
  const std::string name =
      fmt::format("{}, {} tokens of 8 heads of 128", prompt ? "prompt" : "decode", tokens);
  const auto with = [=](auto work) {
    return [=](benchmark::State& state) {
      const Memory arena((blocks + 1) * layer.layout.page_bytes()), entries(bytes);
      const KVPages pages{arena.data(), layer.layout.page_bytes(), blocks, layer.layout,
                          Number::bfloat16};
      const auto slots = some_slots(prompt, tokens);
      std::byte* const keys = entries.data();
      std::byte* const values = keys + tokens * layer.layout.key_row_bytes();
      for (auto _ : state) {
        work(keys, values, slots, pages);
        benchmark::ClobberMemory();
      }
    };
  };
  const std::int64_t iterations = rounds(bytes);
  suite.add({.name = name, .metric = "append_us", .unit = "us", .iterations = iterations},
            with([](std::byte* keys, std::byte* values, const auto& slots, const KVPages& pages) {
              append_kv({keys, values, Number::bfloat16}, slots, pages, 0);
            }),
            one_memcpy(bytes));
  suite.add({.name = name, .metric = "gather_us", .unit = "us", .iterations = iterations},
            with([](std::byte* keys, std::byte* values, const auto& slots, const KVPages& pages) {
              gather_kv(pages, 0, slots, {keys, values, Number::bfloat16});
            }),
            one_memcpy(bytes));
}

void add_quantised(bench::Suite& suite, Number number, std::uint32_t tokens) {
  Layer layer;
  const std::uint64_t wide_bytes = tokens * layer.entry_bytes();
  layer.layout.element_bytes = 1;
  const std::uint64_t stored_bytes = tokens * layer.entry_bytes();
  const KVLayout scales = scales_layout(layer.layout, 128, 4);
  const std::uint64_t scale_bytes = tokens * (scales.key_row_bytes() + scales.value_row_bytes());
  suite.add(
      {.name = fmt::format("prompt, {} tokens of 8 heads of 128, bfloat16 to {}", tokens,
                           name_of(number)),
       .metric = "append_us",
       .unit = "us",
       .iterations = rounds(wide_bytes) / 8},
      [=](benchmark::State& state) {
        const std::uint32_t blocks = tokens / 16;
        const Memory arena((blocks + 1) * layer.layout.page_bytes()), entries(wide_bytes),
            scale_arena((blocks + 1) * scales.page_bytes());
        const KVPages pages{arena.data(), layer.layout.page_bytes(), blocks, layer.layout, number};
        const auto slots = some_slots(true, tokens);
        const ScalePages with{
            {scale_arena.data(), scales.page_bytes(), blocks, scales, Number::float32}, 128, slots};
        const NewEntries in{entries.data(), entries.data() + wide_bytes / 2, Number::bfloat16};
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        for (std::uint64_t at = 0; at < wide_bytes; at += 2)
          *reinterpret_cast<BF16*>(entries.data() + at) = from_float<BF16>(normal(random));
        for (auto _ : state) {
          append_kv(in, slots, pages, 0, &with);
          benchmark::ClobberMemory();
        }
      },
      one_memcpy((wide_bytes + stored_bytes + scale_bytes) / 2));
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("kernels", argc, argv);
  for (const std::uint64_t total : {4 * MiB, 128 * MiB}) {
    for (const std::uint64_t page : {32 * KiB, 384 * KiB, 1280 * KiB})
      add_pages(suite, page, total);
  }
  add_entries(suite, true, 1024);
  add_entries(suite, true, 32768);
  add_entries(suite, false, 256);
  add_entries(suite, false, 4096);
  for (const Number number : {Number::float8_e4m3, Number::float8_e5m2, Number::int8}) {
    add_quantised(suite, number, 4096);
  }
  return suite.run();
}
