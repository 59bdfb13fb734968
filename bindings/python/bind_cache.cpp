// Leaves from a model's configuration.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bind.h"
#include "convert.h"
#include "kvleaf/cache/model_leaves.h"

namespace kvleaf::python {

namespace {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;

std::optional<DType> optional_dtype(nb::handle dtype) {
  return dtype.is_none() ? std::nullopt : std::optional(dtype_of_python(dtype));
}

/// JSON of a dict. Python writes infinities (mamba's time_step_limit) as words that JSON does not
/// have; no shape depends on one, so they become null.
std::string json_of(nb::handle config) {
  const nb::module_ json = nb::module_::import_("json");
  const nb::object null = nb::cpp_function([](nb::handle) { return nb::none(); });
  const nb::object strict =
      json.attr("loads")(json.attr("dumps")(config), nb::arg("parse_constant") = null);
  return nb::cast<std::string>(json.attr("dumps")(strict));
}

Leaves leaves_of(nb::handle config, Whole tokens_per_page, nb::handle dtype, nb::handle kv_dtype,
                 Whole tensor_parallel, const OptionalWhole& budget_bytes, Whole expected_tokens) {
  LeavesOptions options;
  options.tokens_per_page = tokens_per_page.u32("tokens_per_page");
  options.dtype = optional_dtype(dtype);
  options.kv_dtype = optional_dtype(kv_dtype);
  options.tensor_parallel = tensor_parallel.u32("tensor_parallel");
  if (budget_bytes) options.budget_bytes = budget_bytes->u64("budget_bytes");
  options.expected_tokens = expected_tokens.u32("expected_tokens");

  if (PyDict_Check(config.ptr())) {
    const std::string json = json_of(config);
    const nb::gil_scoped_release release;
    return leaves_from_json(json, options);
  }
  const auto path = nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(config));
  const nb::gil_scoped_release release;
  return leaves_from_config(path, options);
}

}  // namespace

void bind_cache(nb::module_& m) {
  m.def(
      "leaves_from_config", &leaves_of, "path_or_dict"_a, nb::kw_only(), "tokens_per_page"_a = 16,
      "dtype"_a = nb::none(), "kv_dtype"_a = nb::none(), "tensor_parallel"_a = 1,
      "budget_bytes"_a = nb::none(), "expected_tokens"_a = 2048,
      nb::sig(
          "def leaves_from_config(path_or_dict: str | os.PathLike[str] | dict[str, typing.Any], *, "
          "tokens_per_page: int = 16, dtype: object = None, kv_dtype: object = None, "
          "tensor_parallel: int = 1, "
          "budget_bytes: int | None = None, expected_tokens: int = 2048) -> list[KVLeafRegion]"),
      "The leaves of a model from its config.json, or from a dict of the same: one per group and "
      "page shape.\n"
      "dtype: of the model; None: the config's. kv_dtype: of keys, values and latents; None: the "
      "model's.\n"
      "tensor_parallel: ranks that divide the heads; the leaves are those of one. Given a budget, "
      "the layers of a\n"
      "large state leaf are split into equal leaves where the geometry for requests of "
      "expected_tokens costs\n"
      "less. Raises ConfigError that names the key and what is accepted.");
}

}  // namespace kvleaf::python
