// Counts the heap allocations of this executable: linking heap_calls.cpp replaces operator new.
#pragma once

#include <cstdint>

namespace kvleaf::test {

std::uint64_t heap_calls() noexcept;

}  // namespace kvleaf::test
