// The leaf contract for kinds written in Python. Users call kvleaf.testing.check_leaf.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind_tools.h"
#include "convert.h"
#include "kvleaf/testing/leaf_contract.h"
#include "python_leaf.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;
using Kept = std::vector<std::shared_ptr<void>>;

/// (kept, text, notes, names of broken rules)
nb::tuple checked(const nb::callable& make_leaf, Whole page_tokens,
                  const std::optional<Whole>& max_len, Whole seed, Whole histories) {
  testing::ContractOptions options;
  options.page_tokens = page_tokens.u32("page_tokens");
  if (max_len) options.max_len = max_len->u32("max_len");
  options.seed = seed.u64("seed");
  options.histories = histories.u32("histories");
  // A leaf may put a view away; what it shows lives as long as the view.
  auto kept = std::make_unique<Kept>();
  options.keep_alive = kept.get();
  const nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<Kept*>(p); });
  const StagingOwner staging(owner);
  const testing::ContractReport report = testing::check_leaf(
      [&] {
        const nb::object made = make_leaf();
        Leaf leaf;
        if (made.is_none() || !nb::try_cast(made, leaf)) {
          throw InvalidArgument(
              fmt::format("make_leaf gave a {}; it must give a KVLeafRegion", class_name(made)));
        }
        return leaf;
      },
      options);
  std::vector<std::string> broken;
  for (const testing::BrokenRule& one : report.broken)
    broken.emplace_back(testing::name_of(one.rule));
  return nb::make_tuple(report.ok(), report.text(), report.notes, broken);
}

}  // namespace

void bind_testing(nb::module_& m) {
  m.def("_check_leaf", &checked, "make_leaf"_a, nb::kw_only(), "page_tokens"_a, "max_len"_a.none(),
        "seed"_a, "histories"_a,
        nb::sig("def _check_leaf(make_leaf: collections.abc.Callable[[], KVLeafRegion], *, "
                "page_tokens: int, "
                "max_len: int | None, seed: int, histories: int) -> tuple[bool, str, list[str], "
                "list[str]]"));
}

}  // namespace kvleaf::python
