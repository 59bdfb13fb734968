#include "heap_calls.h"

#include <cstdlib>
#include <new>

namespace {
std::uint64_t calls = 0;
}

std::uint64_t kvleaf::test::heap_calls() noexcept { return calls; }

void* operator new(std::size_t bytes) {
  ++calls;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++calls;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
