// KernelError: arguments that a kernel cannot work on. Whoever throws it has written nothing. The
// layers above translate it into their own errors; kernels know no other layer. DeviceError: what a
// CUDA runtime reports.
#pragma once

#include <stdexcept>

namespace kvleaf::kernels {

class KernelError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The device refused a launch; the message is the runtime's.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace kvleaf::kernels
