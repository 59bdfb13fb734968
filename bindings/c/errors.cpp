// Versions, and how errors reach the caller.
#include <array>
#include <exception>
#include <new>

#include "border.h"
#include "kvleaf/leaf/device.h"

namespace kvleaf::c {
namespace {

// Of this thread. The message is text, so that no memory is needed to say that there is none.
struct LastError {
  std::string message;
  const char* text = "";
  std::string said;  // by a callback that is running
};
LastError& last_error() noexcept {
  thread_local LastError error;
  return error;
}

kvleaf_status failed(kvleaf_status status, const char* message) noexcept {
  LastError& error = last_error();
  try {
    error.message = message;
    error.text = error.message.c_str();
  } catch (...) {
    error.text = "the message of this error found no memory";
  }
  return status;
}

}  // namespace

kvleaf_status status_of_current() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return failed(KVLEAF_INVALID_ARGUMENT, error.what());
  } catch (const GeometryError& error) {
    return failed(KVLEAF_GEOMETRY_ERROR, error.what());
  } catch (const PoolExhausted& error) {
    return failed(KVLEAF_POOL_EXHAUSTED, error.what());
  } catch (const BlockError& error) {
    return failed(KVLEAF_BLOCK_ERROR, error.what());
  } catch (const InvariantError& error) {
    return failed(KVLEAF_INVARIANT_ERROR, error.what());
  } catch (const RequestError& error) {
    return failed(KVLEAF_REQUEST_ERROR, error.what());
  } catch (const StepError& error) {
    return failed(KVLEAF_STEP_ERROR, error.what());
  } catch (const PlanShapeError& error) {
    return failed(KVLEAF_PLAN_SHAPE_ERROR, error.what());
  } catch (const ConfigError& error) {
    return failed(KVLEAF_CONFIG_ERROR, error.what());
  } catch (const DeviceError& error) {
    return failed(KVLEAF_DEVICE_ERROR, error.what());
  } catch (const CallbackError& error) {
    return failed(KVLEAF_CALLBACK_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    last_error().text = "out of memory";
    return KVLEAF_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    return failed(KVLEAF_OTHER_ERROR, error.what());
  } catch (...) {
    return failed(KVLEAF_OTHER_ERROR, "an error that is no std::exception");
  }
}

void forget_said() noexcept { last_error().said.clear(); }

void throw_callback_error(const std::string& what, kvleaf_status status) {
  const std::string said = last_error().said;
  throw CallbackError(
      fmt::format("{} failed with status {}{}{}", what, status, said.empty() ? "" : ": ", said));
}

void throw_no_constant(const char* name, std::int64_t given, std::int64_t last) {
  throw InvalidArgument(fmt::format("{} is {}; accepted: 0 to {}", name, given, last));
}

bool flag(const char* name, std::uint32_t given) {
  if (given > 1) throw_no_constant(name, given, 1);
  return given == 1;
}

void throw_bad_size(const char* name, std::size_t given, std::size_t accepted) {
  throw InvalidArgument(fmt::format(
      "struct_size of {} is {}; set it to sizeof of the struct, {} here", name, given, accepted));
}

void throw_unknown_members(const char* name, std::size_t given, std::size_t known) {
  throw InvalidArgument(fmt::format(
      "{} has {} bytes, made for a newer kvleaf: this one knows the first {}, and those "
      "behind must be zero",
      name, given, known));
}

}  // namespace kvleaf::c

using namespace kvleaf;

uint32_t kvleaf_abi_version(void) { return KVLEAF_ABI_VERSION; }

const char* kvleaf_version(void) { return KVLEAF_VERSION; }

const char* kvleaf_last_error(void) { return c::last_error().text; }

const char* kvleaf_status_name(kvleaf_status status) {
  static constexpr std::array names{
      "ok",        "invalid argument", "geometry error", "pool exhausted", "block error",
      "invariant", "request error",    "step error",     "plan shape",     "config error",
      "callback",  "out of memory",    "other error",    "device error"};
  static_assert(names.size() == KVLEAF_DEVICE_ERROR + 1);
  const auto index = static_cast<std::size_t>(status);
  return index < names.size() ? names[index] : "unknown status";
}

void kvleaf_set_error(const char* message) {
  c::guarded([&] { c::last_error().said = message == nullptr ? "" : message; });
}
