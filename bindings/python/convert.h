// What crosses the border by value: whole numbers, element types, token ids, blocks, arrays.
// Nothing is decided here; a value that does not fit is a typed error that names it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/leaf.h"

namespace kvleaf::python {

namespace nb = nanobind;

/// A Python int of any size (NumPy integers too). Narrowed by name, so that an error says which
/// argument is wrong; nanobind's own casts would answer with the list of all signatures.
class Whole {
 public:
  /// False for what is no integer; leaves no Python error behind.
  static bool read(nb::handle source, Whole& out) noexcept;

  /// Throw InvalidArgument, naming the argument, where the number does not fit.
  std::uint32_t u32(const char* name) const;
  std::uint64_t u64(const char* name) const;
  std::int32_t i32(const char* name) const;
  /// Throws BlockError.
  BlockId block() const;
  /// For demands: more than anybody has is refused like any number that does not fit.
  std::uint64_t saturated(const char* name) const;  // throws InvalidArgument if negative
  std::string to_string() const;

 private:
  std::uint64_t magnitude_ = 0;
  bool negative_ = false;
  bool huge_ = false;  // beyond 64 bits, and then magnitude_ says nothing
};

/// The text of a str, bytes or int (its decimal digits): salts and digests. Throws InvalidArgument.
std::string text_of(nb::handle source, const char* name);

/// A str; throws InvalidArgument that names what it should have been.
std::string name_in(nb::handle source, const char* name);
/// What Python takes for true.
bool truth_of(nb::handle source);
/// The C++ object of an initialised instance of a bound class, else nullptr.
template <class T>
T* instance_of(nb::handle source) {
  return nb::isinstance<T>(source) && nb::inst_ready(source) ? nb::inst_ptr<T>(source) : nullptr;
}

/// An element type by name, or anything with the name of one: numpy.dtype, ml_dtypes, torch.dtype,
/// numpy.float32. Throws InvalidArgument that lists the accepted names.
DType dtype_of_python(nb::handle source);
/// numpy.dtype; of ml_dtypes where NumPy has no such type, and without it the unsigned integer that
/// wide.
nb::object numpy_dtype(DType dtype);

/// Token ids as the library takes them: a view where they are a contiguous int32 array, else
/// converted. Any 1-D integer array (buffer, DLPack) or iterable of integers; one outside int32 is
/// InvalidArgument.
class Tokens {
 public:
  explicit Tokens(nb::handle source);
  std::span<const Token> view() const noexcept { return view_; }

 private:
  nb::ndarray<nb::ro> array_;  // what view_ points into, or none
  std::vector<Token> copy_;
  std::span<const Token> view_;
};

/// Throws BlockError for what is no block number.
std::vector<BlockId> blocks_of(nb::handle source);
std::vector<std::uint32_t> u32s_of(nb::handle source, const char* name);
nb::list list_of(std::span<const BlockId> blocks);

/// A NumPy view, without a copy. `owner` lives as long as the view does.
nb::object view_of(const StagedArray& array, nb::handle owner);
template <class T>
nb::object view_of(std::span<const T> values, nb::handle owner) {
  const std::size_t shape[1] = {values.size()};
  return nb::cast(
      nb::ndarray<nb::numpy, T, nb::ndim<1>>(const_cast<T*>(values.data()), 1, shape, owner),
      nb::rv_policy::reference);
}
/// The same of values that nobody else owns.
nb::object array_of(std::vector<std::int32_t> values);

/// A NumPy array as an array that a leaf writes. Throws InvalidArgument where it is read-only, not
/// on the host, or of a type that no leaf stages. `keep` holds it for the time of the call.
StagedArray staged_of(std::string_view key, nb::handle source, std::vector<nb::ndarray<>>& keep);

/// The same text for ever: keys of staged inputs must outlive every use. With the GIL held.
std::string_view interned(std::string_view text);

/// Name of an object's class, without its module.
const char* class_name(nb::handle object) noexcept;

// What mypy wants of comparisons.
inline const nb::sig equal("def __eq__(self, arg: object, /) -> bool");
inline const nb::sig unequal("def __ne__(self, arg: object, /) -> bool");

/// Refuses copy and pickle, saying what to do instead.
template <class Class>
void refuse_pickle(Class& type, const char* instead) {
  type.def(
      "__reduce_ex__",
      [instead](nb::handle self, nb::handle) -> nb::object {
        PyErr_Format(PyExc_TypeError, "a kvleaf.%s cannot be pickled or copied: %s",
                     class_name(self), instead);
        throw nb::python_error();
      },
      nb::arg("protocol"), nb::sig("def __reduce_ex__(self, protocol: object) -> str"));
}

/// Slots that let the garbage collector see what a C++ object holds: T::each_object(f) calls f with
/// every Python object it owns a reference to, once per reference.
template <class T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  int result = 0;
  nb::inst_ptr<T>(self)->each_object([&](nb::handle held) {
    if (result == 0 && held.is_valid()) result = visit(held.ptr(), arg);
  });
  return result;
}
template <class T>
inline PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse<T>)},
                                  {0, nullptr}};

}  // namespace kvleaf::python

template <>
struct nanobind::detail::type_caster<kvleaf::python::Whole> {
  NB_TYPE_CASTER(kvleaf::python::Whole, const_name("int"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    return kvleaf::python::Whole::read(source, value);
  }
};
