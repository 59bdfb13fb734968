// The errors that kvleaf throws, but for DeviceError (device.h). All derive from KVError; each
// message names who asked, for how much, of what, and what would be accepted. Whoever throws one
// has changed nothing.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvleaf {

/// Base of all errors of this library.
class KVError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A value that no call with these arguments could accept: zero bytes, unequal alignment, a bad
/// name.
class InvalidArgument : public KVError {
 public:
  using KVError::KVError;
};

/// Pages that cannot be tiled in the budget. `least_budget` bytes would start; 0 if none would.
class GeometryError : public KVError {
 public:
  GeometryError(const std::string& what, std::uint64_t least, std::string leaf)
      : KVError(what), least_budget(least), blamed_leaf(std::move(leaf)) {}
  std::uint64_t least_budget;
  std::string blamed_leaf;
};

/// Memory that is not there now. An engine waits, preempts or refuses; nothing has changed.
class PoolExhausted : public KVError {
 public:
  using KVError::KVError;
};

/// A block that the call may not touch: null, foreign, free already, of another leaf.
class BlockError : public KVError {
 public:
  using KVError::KVError;
};

/// A broken equation of the pool or the manager: a bug. The object refuses all further work.
class InvariantError : public KVError {
 public:
  using KVError::KVError;
};

/// A request that is unknown, known already, in the wrong state, or a length that it cannot have.
class RequestError : public KVError {
 public:
  using KVError::KVError;
};

/// A step that was not begun, was settled already, or is not the oldest one in flight.
class StepError : public KVError {
 public:
  using KVError::KVError;
};

/// A batch or array whose shape does not fit what the planner was built for.
class PlanShapeError : public KVError {
 public:
  using KVError::KVError;
};

/// A model configuration that cannot be read: the message names the key and what is accepted.
class ConfigError : public KVError {
 public:
  using KVError::KVError;
};

}  // namespace kvleaf
