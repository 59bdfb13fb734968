// Arenas in every kind of memory, read as tensors. The same bodies run over all of them; where no
// device is found, those of its memory say "skipped: no device".
#include "kvleaf/cache/arena_tensor.h"

#include <doctest/doctest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#if defined(KVLEAF_HAVE_CUDA)
#include <cuda_runtime_api.h>

#include "kvleaf/kernels/cuda.h"
#endif

namespace kvleaf {
namespace {

using Bytes = std::vector<std::byte>;

Geometry two_leaves() {
  std::vector<PageSpec> pages(2);
  pages[0].name = "kv";
  pages[0].bytes_per_page = 96;  // [2, 3, 8] of two bytes
  pages[0].stride_alignment = 16;
  pages[1].name = "scales";
  pages[1].bytes_per_page = 20;
  pages[1].stride_alignment = 4;
  return Geometry::by_hand(
      pages, {.huge_bytes = 112, .huge_blocks = 6, .ratios = {1, 4}, .alignment = 256});
}
constexpr LeafId kv{0};
constexpr LeafId scales{1};

bool device_present() {
#if defined(KVLEAF_HAVE_CUDA)
  return kernels::cuda::available();
#else
  return false;
#endif
}

// ---- kinds of memory: where an arena comes from, and how its bytes are reached

struct Host {
  static bool present() { return true; }
  static Arena make(const Geometry& geometry) { return make_arena(geometry, {}); }
  static constexpr Device device{};
  static Bytes read(const std::byte* from, std::size_t count) { return {from, from + count}; }
  static void write(std::byte* to, const Bytes& bytes) {
    std::memcpy(to, bytes.data(), bytes.size());
  }
};

struct Given : Host {
  static Arena make(const Geometry& geometry) {
    struct Owner : TensorOwner {
      Bytes bytes;
    };
    auto owner = std::make_shared<Owner>();
    owner->bytes.resize(geometry.arena_bytes() + 100);
    const std::int64_t shape[] = {static_cast<std::int64_t>(owner->bytes.size())};
    return arena_in(geometry, Tensor(owner->bytes.data(), shape, {}, DType::uint8, {}, owner));
  }
};

struct Pinned : Host {
  static bool present() { return device_present(); }
  static Arena make(const Geometry& geometry) { return make_pinned_arena(geometry); }
};

struct OnDevice {
  static bool present() { return device_present(); }
  static Arena make(const Geometry& geometry) { return make_arena(geometry, device); }
  static constexpr Device device{Device::Kind::cuda, 0};
#if defined(KVLEAF_HAVE_CUDA)
  static Bytes read(const std::byte* from, std::size_t count) {
    Bytes bytes(count);
    REQUIRE(cudaMemcpy(bytes.data(), from, count, cudaMemcpyDeviceToHost) == cudaSuccess);
    return bytes;
  }
  static void write(std::byte* to, const Bytes& bytes) {
    REQUIRE(cudaMemcpy(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
#else
  static Bytes read(const std::byte*, std::size_t) { return {}; }
  static void write(std::byte*, const Bytes&) {}
#endif
};

/// Another framework's device memory, taken over by DLPack.
struct DeviceByDlpack : OnDevice {
  static Arena make(const Geometry& geometry) {
    const Arena theirs = OnDevice::make(geometry);
    return arena_in(geometry, from_dlpack(to_dlpack(arena_bytes(theirs))));
  }
};

#define ALL_MEMORY Host, Given, Pinned, OnDevice, DeviceByDlpack

template <class Memory>
bool skipped() {
  if (Memory::present()) return false;
  MESSAGE("skipped: no device");
  return true;
}

// ---- the bodies

TEST_CASE_TEMPLATE("an arena is zeroed, of its geometry's size and on its device", Memory,
                   ALL_MEMORY) {
  if (skipped<Memory>()) return;
  const Arena arena = Memory::make(two_leaves());
  CHECK(arena.device() == Memory::device);
  const Tensor bytes = arena_bytes(arena);
  REQUIRE(bytes.size() == static_cast<std::int64_t>(two_leaves().arena_bytes()));
  CHECK(bytes.device() == Memory::device);
  CHECK(bytes.data() == arena.bytes().data());
  CHECK(Memory::read(bytes.data(), arena.bytes().size()) == Bytes(arena.bytes().size()));
  CHECK(dlpack_device(bytes.device()).device_type ==
        (Memory::device.kind == Device::Kind::cpu ? kDLCPU : kDLCUDA));
}

TEST_CASE_TEMPLATE("a leaf's view shows each block at its index, in the shape asked for", Memory,
                   ALL_MEMORY) {
  if (skipped<Memory>()) return;
  const Arena arena = Memory::make(two_leaves());
  const Geometry& geometry = arena.geometry();
  const Tensor values = leaf_pages(arena, kv, DType::bfloat16, {3, 8}, 48);
  const std::int64_t shape[] = {7, 3, 8};
  const std::int64_t strides[] = {56, 8, 1};
  CHECK(std::ranges::equal(values.shape(), shape));
  CHECK(std::ranges::equal(values.strides(), strides));
  CHECK(values.dtype() == DType::bfloat16);
  CHECK(values.device() == Memory::device);
  CHECK_FALSE(values.contiguous());
  for (std::uint32_t b = 1; b <= geometry.leaf(kv).blocks; ++b) {
    Memory::write(arena.page(kv, BlockId(b)).data(), Bytes(96, static_cast<std::byte>(b)));
    CHECK(Memory::read(values.at({b}).data(), 48) == Bytes(48, static_cast<std::byte>(b)));
    const std::byte last{static_cast<unsigned char>(100 + b)};
    Memory::write(values.at({b, 2, 7}).data() + 1, {last});
    CHECK(Memory::read(page_bytes(arena, kv, BlockId(b)).data() + 95, 1) == Bytes{last});
  }
  CHECK(Memory::read(values.at({0}).data(), 48) == Bytes(48));  // the null page
  CHECK(Memory::read(arena.bytes().data(), geometry.null_bytes()) == Bytes(geometry.null_bytes()));
}

TEST_CASE_TEMPLATE("views and what DLPack took keep the memory of an arena that is gone", Memory,
                   ALL_MEMORY) {
  if (skipped<Memory>()) return;
  std::optional<Arena> arena = Memory::make(two_leaves());
  Tensor view = leaf_pages(*arena, scales, DType::float32);
  DLManagedTensor* exported = to_dlpack(leaf_pages(*arena, kv, DType::float16, {2, 3, 8}));
  arena.reset();
  Memory::write(view.at({5, 4}).data(), Bytes(4, std::byte{7}));
  CHECK(Memory::read(view.at({5, 4}).data(), 4) == Bytes(4, std::byte{7}));
  view = {};
  CHECK(exported->dl_tensor.ndim == 4);
  CHECK(exported->dl_tensor.strides[0] == 56);
  const Tensor back = from_dlpack(exported);
  Memory::write(back.at({1, 1, 2, 7}).data(), Bytes(2, std::byte{9}));
  CHECK(Memory::read(back.at({1, 1, 2, 7}).data(), 2) == Bytes(2, std::byte{9}));
}

TEST_CASE("without a shape a page is one row of elements") {
  const Arena arena = Arena::host(two_leaves());
  const Tensor bytes = leaf_pages(arena, kv, DType::uint8);
  CHECK(bytes.shape()[0] == 7);
  CHECK(bytes.shape()[1] == 96);
  CHECK(bytes.strides()[0] == 112);
  const Tensor tail = leaf_pages(arena, scales, DType::float32, {}, 8);
  CHECK(tail.shape()[0] == 25);
  CHECK(tail.shape()[1] == 3);
  CHECK(tail.at({24}).data() == arena.page(scales, BlockId(24)).data() + 8);
}

TEST_CASE("what does not fit a page is refused with the sizes") {
  const Arena arena = Arena::host(two_leaves());
  const auto says = [&](auto call, std::initializer_list<const char*> parts) {
    try {
      call();
      FAIL("accepted");
    } catch (const InvalidArgument& error) {
      for (const char* part : parts)
        CHECK_MESSAGE(std::string(error.what()).find(part) != std::string::npos, error.what());
    }
  };
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {7, 7}); }, {"'kv'", "[7, 7]", "96 B", "48"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {49}); }, {"room for 48"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {48}, 2); }, {"byte 2", "room for 47"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {1}, 1); }, {"page offset 1", "2 B"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {1}, 96); }, {"room for 0"});
  says([&] { leaf_pages(arena, kv, DType::uint8, {}, 96); }, {"byte 96", "96 B"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {0}); }, {"[0]"});
  says([&] { leaf_pages(arena, kv, DType::bfloat16, {-1, -1}); }, {"[-1, -1]"});
  says([&] { leaf_pages(arena, kv, DType::uint8, {1, 1, 1, 1, 1, 1, 1, 1}); }, {"at most 7"});
  says([&] { leaf_pages(arena, scales, DType::int64, {1}); }, {"page stride 28", "8 B"});
  says([&] { leaf_pages(arena, LeafId(2), DType::uint8); }, {"2"});
  CHECK_THROWS_AS(page_bytes(arena, scales, BlockId(25)), BlockError);
  Bytes odd(two_leaves().arena_bytes() + 1);
  const Arena shifted = Arena::borrowed(two_leaves(), std::span(odd).subspan(1));
  says([&] { leaf_pages(shifted, kv, DType::bfloat16, {1}); }, {"address of block 0"});

  Bytes few(100);
  const std::int64_t shape[] = {100};
  says([&] { arena_in(two_leaves(), Tensor(few.data(), shape, {}, DType::uint8)); }, {"100 B"});
  says([&] { arena_in(two_leaves(), Tensor(few.data(), {25}, DType::int32)); }, {"int32 [25]"});
  says([&] { arena_in(two_leaves(), Tensor(few.data(), {10, 10}, DType::uint8)); }, {"[10, 10]"});
  says([&] { arena_in(two_leaves(), Tensor()); }, {"undefined"});
}

TEST_CASE("memory that is not the arena's own is not unmapped by it") {
  const std::vector<ByteRange> some = {{0, 4096}};
  CHECK_THROWS_AS(Given::make(two_leaves()).unmap(some), InvalidArgument);
  CHECK_THROWS_AS(Given::make(two_leaves()).map(some), InvalidArgument);
}

TEST_CASE("where there is no such device, its memory is refused with the bytes and the reason") {
  // One more than any system has.
  for (const Device device : {Device{Device::Kind::cuda, 0}, Device{Device::Kind::cuda, 4095}}) {
    if (device.index == 0 && device_present()) continue;
    try {
      make_arena(two_leaves(), device);
      FAIL("an arena on " << to_string(device));
    } catch (const DeviceError& error) {
      const std::string why = error.what();
      CHECK_MESSAGE(why.find(std::to_string(two_leaves().arena_bytes()) + " B") != why.npos, why);
      CHECK_MESSAGE(why.find("CUDA") != why.npos, why);
      CHECK_MESSAGE(why.find("device " + std::to_string(device.index)) != why.npos, why);
    }
  }
  if (!device_present()) CHECK_THROWS_AS(make_pinned_arena(two_leaves()), DeviceError);
}

}  // namespace
}  // namespace kvleaf
