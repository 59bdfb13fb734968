// Records<T>: a zeroed array of plain records whose size is fixed at construction. Pages come from
// the system only when first written, and as huge pages where the system has them: a pool of a
// million blocks would otherwise pay a miss of the address cache beside each miss of the data
// cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace kvleaf {

template <class T>
class Records {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  Records() = default;
  explicit Records(std::size_t size) : size_(size) {
    if (size == 0) return;
    mapped_bytes_ = size * sizeof(T) + (large() ? huge_page : 0);
    void* memory =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapped_ = memory;
    auto address = reinterpret_cast<std::uintptr_t>(memory);
    if (large()) {
      address = (address + huge_page - 1) / huge_page * huge_page;
#ifdef MADV_HUGEPAGE
      ::madvise(reinterpret_cast<void*>(address), size * sizeof(T), MADV_HUGEPAGE);  // advice only
#endif
    }
    data_ = reinterpret_cast<T*>(address);
  }
  ~Records() {
    if (mapped_ != nullptr) ::munmap(mapped_, mapped_bytes_);
  }
  Records(Records&& other) noexcept { swap(other); }
  Records& operator=(Records&& other) noexcept {
    swap(other);
    return *this;
  }

  T& operator[](std::size_t index) noexcept { return data_[index]; }
  const T& operator[](std::size_t index) const noexcept { return data_[index]; }
  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::size_t bytes() const noexcept { return size_ * sizeof(T); }

 private:
  static constexpr std::size_t huge_page = std::size_t{2} << 20;
  bool large() const noexcept { return size_ * sizeof(T) >= huge_page; }
  void swap(Records& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
};

}  // namespace kvleaf
