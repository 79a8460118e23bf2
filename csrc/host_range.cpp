#include "host_range.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>
#include <vector>

namespace zeroexp {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

}  // namespace

HostRange::HostRange(std::size_t num_bytes) : size_(num_bytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  // A range smaller than a huge page gains nothing from one and would keep 2 MiB resident.
  const bool large = num_bytes >= kHugePage;
  const std::size_t alignment = large ? kHugePage : page;
  const std::size_t length = round_up(num_bytes == 0 ? 1 : num_bytes, page);
  if (length > SIZE_MAX - alignment) throw std::bad_alloc();
  mapped_ = large ? length + alignment : length;
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw std::bad_alloc();
  }
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(base_);
  data_ = static_cast<char*>(base_) + (round_up(address, alignment) - address);
#ifdef MADV_HUGEPAGE
  if (large) huge_pages_ = madvise(data_, length, MADV_HUGEPAGE) == 0;
#endif
}

HostRange::~HostRange() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

void HostRange::release() {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size_ != 0 && madvise(data_, round_up(size_, page), MADV_DONTNEED) != 0) {
    throw std::system_error(errno, std::generic_category(), "madvise(MADV_DONTNEED)");
  }
}

void HostRange::take_pages(HostRange& from) {
  if (&from == this) return;
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t length = round_up(std::min(size_, from.size_), page);
#ifdef MREMAP_DONTUNMAP
  // Only between ranges of one kind, so that this one keeps its huge pages. Where the kernel refuses, this range gets
  // fresh pages when it is filled.
  if (length != 0 && huge_pages_ == from.huge_pages_) {
    mremap(from.data_, length, length, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, data_);
  }
#endif
  from.release();
}

std::size_t HostRange::resident_bytes() const {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t length = round_up(size_, page);
  std::vector<unsigned char> state(length / page);
  if (length != 0 && mincore(data_, length, state.data()) != 0) {
    throw std::system_error(errno, std::generic_category(), "mincore");
  }
  std::size_t pages = 0;
  for (const unsigned char s : state) pages += s & 1u;
  return pages * page;
}

}  // namespace zeroexp
