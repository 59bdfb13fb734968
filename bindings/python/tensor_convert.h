// Tensors across the border.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "convert.h"
#include "kvleaf/cache/tensor.h"

namespace kvleaf::python {

/// A view of a Tensor, a NumPy array or what speaks DLPack; it keeps the object. `wanted`: the type
/// that the bits of an unsigned integer array of that width are taken for. Throws InvalidArgument.
Tensor tensor_of(nb::handle source, const char* name, std::optional<DType> wanted);
/// None of an undefined tensor.
nb::object object_of(Tensor tensor);
/// Nothing of None.
std::optional<DType> dtype_named(nb::handle source);

}  // namespace kvleaf::python
