// A leaf kind written in Python. The library calls virtual functions and knows nothing of Python;
// each of them asks here whether the instance's class defines the method of that name, and calls it
// or the shipped behaviour. What a Python method raises passes through the library as the very same
// exception.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "convert.h"

namespace kvleaf::python {

/// Keeps the owner of the arrays that leaves are writing into, so that a NumPy view which a Python
/// leaf puts away outlives nothing. One per call into a planner, innermost last; per thread.
class StagingOwner {
 public:
  explicit StagingOwner(nb::handle owner) noexcept : previous_(current_) { current_ = owner; }
  ~StagingOwner() { current_ = previous_; }
  StagingOwner(const StagingOwner&) = delete;
  StagingOwner& operator=(const StagingOwner&) = delete;
  static nb::handle current() noexcept {
    return current_.is_valid() ? current_ : nb::handle(Py_None);
  }

 private:
  static thread_local nb::handle current_;
  nb::handle previous_;
};

/// What an instance of a Python subclass is beside its C++ leaf, whichever kind it derives from.
class PythonLeaf {
 public:
  explicit PythonLeaf(nb::handle self) noexcept : self_(self) {}
  virtual ~PythonLeaf() = default;

  /// tokens_per_page of a leaf that leaves it to its cache: the page of the manager that asked
  /// last.
  std::uint32_t page_tokens = 16;

  // The shipped behaviour, whatever Python overrides: what super().method(…) means.
  virtual bool base_cacheable() const = 0;
  virtual std::uint32_t base_slots_per_page(std::uint32_t tokens_per_page) const = 0;
  virtual std::uint32_t base_blocks_to_reserve(std::uint32_t num_blocks,
                                               std::uint32_t tokens_per_page,
                                               ReserveOptions options) const = 0;
  virtual std::uint32_t base_rollback() const = 0;
  virtual StateKernel base_state_kernel() const = 0;
  virtual std::uint32_t base_layers() const = 0;
  virtual bool base_emits_in_chunk() const = 0;
  virtual bool base_stages_live_span() const = 0;
  virtual StagedInputs base_staged_input_shapes(std::uint32_t batch,
                                                std::uint32_t num_blocks) const = 0;
  virtual void base_write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                        StagedArrays into) const = 0;
  virtual void base_write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const = 0;
  virtual std::vector<BoundRows> base_bound_row_span(BlockId block) const = 0;
  virtual std::vector<std::pair<BoundRows, BoundRows>> base_bound_row_copies(BlockId src,
                                                                             BlockId dst) const = 0;
  virtual void base_bind(std::uint64_t page_stride) = 0;

 protected:
  // All with the GIL held.
  bool overrides(const char* name) const;
  std::string called(const char* name) const;  // "leaf 'x': blocks_to_reserve", for messages
  std::uint32_t call_blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t tokens_per_page,
                                       ReserveOptions options);
  bool get_bool(const char* name) const;
  std::uint32_t get_u32(const char* name) const;
  std::uint32_t call_u32(const char* name, std::uint32_t argument) const;
  StateKernel get_state_kernel() const;
  StagedInputs call_staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const;
  void call_write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                StagedArrays into) const;
  void call_write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const;
  std::vector<BoundRows> call_bound_row_span(BlockId block) const;
  std::vector<std::pair<BoundRows, BoundRows>> call_bound_row_copies(BlockId src,
                                                                     BlockId dst) const;
  nb::object attr(const char* name) const { return self_.attr(name); }

 private:
  bool takes_step_tokens(const nb::object& method);

  nb::handle self_;                      // the Python object that this lies in
  const PyObject* inspected_ = nullptr;  // the function whose signature was read, and what it said
  bool takes_step_tokens_ = false;
};

template <class Base>
class Subclassed final : public Base, public PythonLeaf {
 public:
  template <class... Args>
  explicit Subclassed(nb::handle self, Args&&... args)
      : Base(std::forward<Args>(args)...), PythonLeaf(self) {}

  bool cacheable() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("cacheable") ? get_bool("cacheable") : Base::cacheable();
  }
  std::uint32_t slots_per_page(std::uint32_t tokens_per_page) const override {
    const nb::gil_scoped_acquire gil;
    return overrides("slots_per_page") ? call_u32("slots_per_page", tokens_per_page)
                                       : Base::slots_per_page(tokens_per_page);
  }
  std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t tokens_per_page,
                                  ReserveOptions options) const override {
    const nb::gil_scoped_acquire gil;
    if (!overrides("blocks_to_reserve")) {
      return Base::blocks_to_reserve(num_blocks, tokens_per_page, options);
    }
    return const_cast<Subclassed*>(this)->call_blocks_to_reserve(num_blocks, tokens_per_page,
                                                                 options);
  }
  std::uint32_t rollback() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("rollback") ? get_u32("rollback") : Base::rollback();
  }
  StateKernel state_kernel() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("state_kernel") ? get_state_kernel() : Base::state_kernel();
  }
  std::uint32_t layers() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("layers") ? get_u32("layers") : Base::layers();
  }
  bool emits_in_chunk() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("emits_in_chunk") ? get_bool("emits_in_chunk") : Base::emits_in_chunk();
  }
  bool stages_live_span() const override {
    const nb::gil_scoped_acquire gil;
    return overrides("stages_live_span") ? get_bool("stages_live_span") : Base::stages_live_span();
  }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override {
    const nb::gil_scoped_acquire gil;
    return overrides("staged_input_shapes") ? call_staged_input_shapes(batch, num_blocks)
                                            : Base::staged_input_shapes(batch, num_blocks);
  }
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    const nb::gil_scoped_acquire gil;
    overrides("write_staged_inputs") ? call_write_staged_inputs(plans, into)
                                     : Base::write_staged_inputs(plans, into);
  }
  /// The deltas of every shipped kind write what its write_staged_inputs writes, and go with it.
  bool can_write_delta() const override {
    const nb::gil_scoped_acquire gil;
    if (overrides("write_staged_delta")) return true;
    if (overrides("write_staged_inputs") || overrides("staged_input_shapes")) return false;
    return !std::is_same_v<Base, KVLeafRegion> || Base::group_id().writing != Writing::in_place;
  }
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override {
    const nb::gil_scoped_acquire gil;
    overrides("write_staged_delta") ? call_write_staged_delta(rows, into)
                                    : Base::write_staged_delta(rows, into);
  }
  std::vector<BoundRows> bound_row_span(BlockId block) const override {
    const nb::gil_scoped_acquire gil;
    return overrides("bound_row_span") ? call_bound_row_span(block) : Base::bound_row_span(block);
  }
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override {
    const nb::gil_scoped_acquire gil;
    return overrides("bound_row_copies") ? call_bound_row_copies(src, dst)
                                         : Base::bound_row_copies(src, dst);
  }
  void bind(std::uint64_t page_stride) override {
    const nb::gil_scoped_acquire gil;
    overrides("bind") ? void(attr("bind")(page_stride)) : Base::bind(page_stride);
  }

  bool base_cacheable() const override { return Base::cacheable(); }
  std::uint32_t base_slots_per_page(std::uint32_t tokens_per_page) const override {
    return Base::slots_per_page(tokens_per_page);
  }
  std::uint32_t base_blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t tokens_per_page,
                                       ReserveOptions options) const override {
    return Base::blocks_to_reserve(num_blocks, tokens_per_page, options);
  }
  std::uint32_t base_rollback() const override { return Base::rollback(); }
  StateKernel base_state_kernel() const override { return Base::state_kernel(); }
  std::uint32_t base_layers() const override { return Base::layers(); }
  bool base_emits_in_chunk() const override { return Base::emits_in_chunk(); }
  bool base_stages_live_span() const override { return Base::stages_live_span(); }
  StagedInputs base_staged_input_shapes(std::uint32_t batch,
                                        std::uint32_t num_blocks) const override {
    return Base::staged_input_shapes(batch, num_blocks);
  }
  void base_write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                StagedArrays into) const override {
    Base::write_staged_inputs(plans, into);
  }
  void base_write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override {
    Base::write_staged_delta(rows, into);
  }
  std::vector<BoundRows> base_bound_row_span(BlockId block) const override {
    return Base::bound_row_span(block);
  }
  std::vector<std::pair<BoundRows, BoundRows>> base_bound_row_copies(BlockId src,
                                                                     BlockId dst) const override {
    return Base::bound_row_copies(src, dst);
  }
  void base_bind(std::uint64_t page_stride) override { Base::bind(page_stride); }
};

/// Makes the C++ part of a leaf: only a Python subclass pays for asking Python.
template <class Base, class... Args>
void construct(nb::pointer_and_handle<Base> self, Args&&... args) {
  if (nb::detail::nb_inst_python_derived(self.h.ptr())) {
    new (static_cast<void*>(self.p)) Subclassed<Base>(self.h, std::forward<Args>(args)...);
  } else {
    new (static_cast<void*>(self.p)) Base(std::forward<Args>(args)...);
  }
}

}  // namespace kvleaf::python
