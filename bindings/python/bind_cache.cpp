// Leaves from a model's configuration.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
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

ModelLeaves model_of(nb::handle config, Whole tokens_per_page, nb::handle dtype,
                     nb::handle kv_dtype, Whole tensor_parallel, const OptionalWhole& budget_bytes,
                     Whole expected_tokens) {
  LeavesOptions options;
  options.tokens_per_page = tokens_per_page.u32("tokens_per_page");
  options.dtype = optional_dtype(dtype);
  options.kv_dtype = optional_dtype(kv_dtype);
  options.tensor_parallel = tensor_parallel.u32("tensor_parallel");
  if (budget_bytes) options.budget_bytes = budget_bytes->u64("budget_bytes");
  options.expected_tokens = expected_tokens.u32("expected_tokens");

  if (PyDict_Check(config.ptr())) {
    const auto json = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(config));
    const nb::gil_scoped_release release;
    return model_from_json(json, options);
  }
  const auto path = nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(config));
  const nb::gil_scoped_release release;
  return model_from_config(path, options);
}

Leaves leaves_of(nb::handle config, Whole tokens_per_page, nb::handle dtype, nb::handle kv_dtype,
                 Whole tensor_parallel, const OptionalWhole& budget_bytes, Whole expected_tokens) {
  return model_of(config, tokens_per_page, dtype, kv_dtype, tensor_parallel, budget_bytes,
                  expected_tokens)
      .leaves;
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<ModelLeaves> model(m, "ModelLeaves", "What model_from_config makes of a model.");
  model.def_prop_ro("leaves", [](const ModelLeaves& self) { return self.leaves; })
      .def_prop_ro(
          "layers_of",
          [](const ModelLeaves& self) {
            nb::dict layers;
            for (std::size_t i = 0; i < self.leaves.size(); ++i)
              layers[self.leaves[i]->leaf_id().c_str()] = nb::cast(self.layers_of[i]);
            return layers;
          },
          nb::sig("def layers_of(self) -> dict[str, list[int]]"),
          "By leaf id, the layers of the model whose entries it holds, ascending: the layer at "
          "index "
          "i lies i-th in\n"
          "each page. Layers that read another's entries are not among them.")
      .def_prop_ro("model_type", [](const ModelLeaves& self) { return self.config.model_type; })
      .def_prop_ro("num_layers", [](const ModelLeaves& self) { return self.config.layers.size(); })
      .def_prop_ro(
          "dtype", [](const ModelLeaves& self) { return name_of(self.config.dtype); },
          "Of the weights.")
      .def_prop_ro(
          "max_len", [](const ModelLeaves& self) { return self.config.max_len; },
          "Positions that the model was made for; None: the configuration does not say.")
      .def_prop_ro(
          "encoder_tokens", [](const ModelLeaves& self) { return self.config.encoder_tokens; },
          "Most of one request; None: no encoder.")
      .def("__repr__", [](const ModelLeaves& self) {
        return fmt::format("ModelLeaves('{}', {} layers in {} leaves)", self.config.model_type,
                           self.config.layers.size(), self.leaves.size());
      });
  refuse_pickle(model, "recreate it with model_from_config");

  m.def("model_from_config", &model_of, "path_or_dict"_a, nb::kw_only(), "tokens_per_page"_a = 16,
        "dtype"_a = nb::none(), "kv_dtype"_a = nb::none(), "tensor_parallel"_a = 1,
        "budget_bytes"_a = nb::none(), "expected_tokens"_a = 2048,
        nb::sig("def model_from_config(path_or_dict: str | os.PathLike[str] | dict[str, "
                "typing.Any], *, tokens_per_page: int = 16, dtype: object = None, kv_dtype: object "
                "= None, tensor_parallel: int = 1, budget_bytes: int | None = None, "
                "expected_tokens: int = 2048) -> ModelLeaves"),
        "As leaves_from_config, with which layers of the model lie in which leaf.");

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
