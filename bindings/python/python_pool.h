// BlockPool as Python sees it: leaves by name, and either a pool of its own or that of a manager.
#pragma once

#include <memory>
#include <optional>

#include "convert.h"
#include "exclusive.h"
#include "kvleaf/pool/pool.h"

namespace kvleaf::python {

class Pool {
 public:
  Pool(Geometry geometry, PoolOptions options)
      : own_(std::make_unique<BlockPool>(std::move(geometry), options)),
        pool_(own_.get()),
        exclusive_(&own_use_) {}
  /// The pool of `manager`, which it keeps alive.
  Pool(BlockPool& pool, Exclusive& exclusive, nb::object manager)
      : pool_(&pool), exclusive_(&exclusive), manager_(std::move(manager)) {}

  BlockPool& core() const noexcept { return *pool_; }
  Exclusive& exclusive() const noexcept { return *exclusive_; }
  bool is_managers() const noexcept { return manager_.is_valid(); }
  LeafId leaf(std::string_view name) const { return pool_->geometry().find(name); }

  void on_evict(nb::object callback);

  template <class F>
  void each_object(F f) const {
    f(manager_);
    f(callback_);
  }
  void forget_callback() { callback_ = nb::object(); }

 private:
  std::unique_ptr<BlockPool> own_;
  BlockPool* pool_;
  Exclusive own_use_;
  Exclusive* exclusive_;
  nb::object manager_;   // none for a pool of its own
  nb::object callback_;  // here, and not in the C++ callback, so that the collector sees it
};

/// The figures, with the leaves by name.
struct NamedPoolStats {
  PoolStats stats;
  nb::dict leaves;

  static NamedPoolStats of(PoolStats stats, const Geometry& geometry);
  template <class F>
  void each_object(F f) const {
    f(leaves);
  }
};

/// Pages from PageSpecs and leaves.
std::vector<PageSpec> pages_of(nb::handle source);

}  // namespace kvleaf::python
