// The arrays of one leaf as a planner keeps them: allocated once at the widest, narrowed to each
// batch, with everything around and between watched. Internal to the kit.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kvleaf/leaf/staged.h"

namespace kvleaf::testing::contract {

class Arrays {
 public:
  /// `fill`: every byte at first; 0 as a planner has them.
  explicit Arrays(const StagedInputs& widest, std::byte fill = std::byte{0});
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  /// For one write. Throws PlanShapeError where the shapes are not those of the widest, narrowed.
  StagedArrays narrow(const StagedInputs& shapes);
  void refill(std::byte fill);

  /// Bytes of what is visible of all arrays, one after another and row-major. What no reader of a
  /// format looks at counts as 0: of CSR, the entries of "indices" behind indptr's last.
  std::vector<std::byte> visible() const;
  /// Which visible entry differs, and what it is here and there.
  std::string difference(const Arrays& other) const;
  /// Nothing, or which entry outside the narrowed arrays the last write touched.
  std::optional<std::string> outside() const;
  /// Nothing, or which visible entry changed in the last write and was not reported; a write that
  /// reports nothing at all is taken to have written everything.
  std::optional<std::string> unreported();

 private:
  struct One {
    StagedInput widest;
    std::vector<std::byte> memory;  // guard, the array, guard
    std::vector<std::byte> before;  // at the last narrow()
    std::vector<std::byte> mirror;  // kept up by reports alone
    std::size_t element = 1;        // bytes
  };
  /// Byte offsets in memory of the visible entries of an array, row-major.
  std::vector<std::size_t> entries(std::size_t array) const;
  std::vector<std::size_t> read_entries(std::size_t array) const;
  std::string name(std::size_t array, std::size_t offset) const;
  static void on_change(void* context, const StagedArray& array, std::int64_t first,
                        std::int64_t count);

  std::vector<One> ones_;
  std::vector<StagedArray> arrays_;
  bool reported_ = false;
};

}  // namespace kvleaf::testing::contract
