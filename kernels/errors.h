// KernelError: arguments that a kernel cannot work on. Whoever throws it has written nothing. The
// layers above translate it into their own errors; kernels know no other layer.
#pragma once

#include <stdexcept>

namespace kvleaf::kernels {

class KernelError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace kvleaf::kernels
