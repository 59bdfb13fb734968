// What the files of the C border share: how errors become statuses, how structs that may grow are
// read and written, and what is behind the handles. Nothing is decided here.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvleaf.h"
#include "kvleaf/group/group.h"

namespace kvleaf::c {

// ---- errors ------------------------------------------------------------------------------------

/// A callback of the caller's returned a status other than KVLEAF_OK.
class CallbackError : public KVError {
 public:
  using KVError::KVError;
};

/// The status of the exception being handled; its message is this thread's last error.
kvleaf_status status_of_current() noexcept;

/// Runs `f`; what it throws becomes a status.
template <class F>
kvleaf_status guarded(F&& f) noexcept {
  try {
    std::forward<F>(f)();
    return KVLEAF_OK;
  } catch (...) {
    return status_of_current();
  }
}

/// Calls a C callback that may fail. Throws CallbackError, with what it said through
/// kvleaf_set_error.
template <class... Args, class... Given>
void call(const std::string& what, kvleaf_status (*callback)(Args...), Given&&... given);

void forget_said() noexcept;
[[noreturn]] void throw_callback_error(const std::string& what, kvleaf_status status);

template <class... Args, class... Given>
void call(const std::string& what, kvleaf_status (*callback)(Args...), Given&&... given) {
  forget_said();
  const kvleaf_status status = callback(std::forward<Given>(given)...);
  if (status != KVLEAF_OK) throw_callback_error(what, status);
}

/// Throws InvalidArgument for null.
template <class T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(fmt::format("{} is a null pointer", name));
  return *pointer;
}

/// `count` elements; null only where there are none.
template <class T>
std::span<T> span_of(T* first, std::size_t count, const char* name) {
  if (first == nullptr && count != 0) {
    throw InvalidArgument(fmt::format("{} is a null pointer, with a count of {}", name, count));
  }
  return {first, count};
}

/// One of `names`, by its number.
[[noreturn]] void throw_no_constant(const char* name, std::int64_t given, std::int64_t last);
inline void require_constant(const char* name, std::int32_t given, std::int32_t last) {
  if (given < 0 || given > last) throw_no_constant(name, given, last);
}
/// A flag.
bool flag(const char* name, std::uint32_t given);

// ---- structs that grow -------------------------------------------------------------------------

/// The least struct_size ever in use: when a struct grows, its old size is to be stated here.
template <class T>
inline constexpr std::size_t first_size = sizeof(T);

[[noreturn]] void throw_bad_size(const char* name, std::size_t given, std::size_t accepted);
[[noreturn]] void throw_unknown_members(const char* name, std::size_t given, std::size_t known);

template <class T>
std::size_t size_of_struct(const T* given, const char* name) {
  static_assert(offsetof(T, struct_size) == 0);
  const std::size_t size = require(given, name).struct_size;
  if (size < first_size<T>) throw_bad_size(name, size, sizeof(T));
  return size;
}

/// What the caller's struct says; members that it does not have are zero. Throws InvalidArgument
/// for members of a later version that are not zero.
template <class T>
T read_struct(const T* given, const char* name) {
  const std::size_t size = size_of_struct(given, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) throw_unknown_members(name, size, sizeof(T));
  }
  T read{};
  std::memcpy(&read, bytes, std::min(size, sizeof(T)));
  return read;
}
template <class T>
T read_optional(const T* given, const char* name) {
  return given == nullptr ? T{} : read_struct(given, name);
}

/// A struct to fill. Checked before the work is done, so that a failure changes nothing.
template <class T>
class Output {
 public:
  Output(T* into, const char* name) : into_(into), size_(size_of_struct(into, name)) {}
  /// The same, or null.
  static Output optional(T* into, const char* name) {
    return into == nullptr ? Output() : Output(into, name);
  }

  void write(T value) const noexcept {
    if (into_ == nullptr) return;
    value.struct_size = size_;
    std::memcpy(into_, &value, std::min(size_, sizeof(T)));
    if (size_ > sizeof(T)) {
      std::memset(reinterpret_cast<unsigned char*>(into_) + sizeof(T), 0, size_ - sizeof(T));
    }
  }

 private:
  Output() = default;
  T* into_ = nullptr;
  std::size_t size_ = 0;
};

// ---- values ------------------------------------------------------------------------------------

DType dtype_of(const char* name, kvleaf_dtype given, DType fallback);
std::optional<DType> dtype_of(const char* name, kvleaf_dtype given);
kvleaf_dtype dtype_of(DType dtype) noexcept;
StateKernel kernel_of(kvleaf_state_kernel given);
kvleaf_state_kernel kernel_of(StateKernel kernel) noexcept;
AccessPattern pattern_of(const kvleaf_pattern& pattern);
kvleaf_array array_of(const StagedArray& array);

/// Arrays of ids are arrays of numbers at this border, and small structs of ids are the C structs:
/// they are handed over without a copy.
template <class To, class From>
To* same(From* first) noexcept {
  static_assert(sizeof(To) == sizeof(From) && alignof(To) == alignof(From));
  static_assert(std::is_standard_layout_v<To> && std::is_standard_layout_v<From>);
  static_assert(std::is_trivially_copyable_v<std::remove_cv_t<From>> ||
                std::is_trivially_destructible_v<std::remove_cv_t<From>>);
  return reinterpret_cast<To*>(first);
}
inline std::span<const BlockId> blocks_of(const std::uint32_t* first, std::size_t count) {
  return {same<const BlockId>(span_of(first, count, "blocks").data()), count};
}

std::vector<PageSpec> pages_of(const kvleaf_page_spec* pages, std::size_t count);

}  // namespace kvleaf::c

// ---- what is behind the handles ----------------------------------------------------------------

struct kvleaf_leaf {
  kvleaf::Leaf leaf;
};

struct kvleaf_geometry {
  kvleaf::Geometry geometry;
};

struct kvleaf_pool {
  /// A pool of its own.
  explicit kvleaf_pool(std::unique_ptr<kvleaf::BlockPool> pool)
      : own(std::move(pool)), core(*own), geometry{core.geometry()} {}
  /// That of a manager.
  explicit kvleaf_pool(kvleaf::BlockPool& pool) : core(pool), geometry{core.geometry()} {}

  std::unique_ptr<kvleaf::BlockPool> own;
  kvleaf::BlockPool& core;
  kvleaf_geometry geometry;
  // What the last call handed out, and room for blocks until a transaction is through.
  std::vector<kvleaf::BlockMove> moves;
  std::vector<kvleaf::ByteRange> ranges;
  std::vector<kvleaf::BlockId> drawn;
};

namespace kvleaf::c {

/// Messages of refused rows, as the caller sees them.
using Refusals = std::vector<kvleaf_refusal>;
void show(std::span<const Refusal> refused, Refusals& into);

/// A manager and what it handed out last. Shared by its handle and those of its planners.
struct Managed {
  Managed(Leaves leaves, ManagerOptions options)
      : manager(std::move(leaves), std::move(options)),
        pool(manager.pool()),
        steps(manager.options().max_steps_in_flight) {}

  BlockManager manager;
  kvleaf_pool pool;
  Admission admission;
  std::vector<kvleaf_group_loss> lost;
  std::vector<Refusals> steps;  // of the last steps begun, in turn
  std::size_t next_step = 0;
  std::vector<std::pair<RequestId, std::uint32_t>> lengths;
  std::vector<Event> events;
  std::vector<kvleaf_event> shown_events;
};

void abandon(Managed& managed, StepPlanner* planner, std::uint64_t step,
             const kvleaf_request_length** out, std::size_t* count);
std::span<const Kept> kept_of(const kvleaf_kept* kept, std::size_t count,
                              std::vector<Kept>& storage);
std::span<const StepRequest> batch_of(const kvleaf_step_request* batch, std::size_t count);

}  // namespace kvleaf::c

struct kvleaf_manager {
  std::shared_ptr<kvleaf::c::Managed> managed;
};
