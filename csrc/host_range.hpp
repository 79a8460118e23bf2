// A range of host addresses of its own for one buffer. Its pages can be given back and come again at the same address,
// so a buffer that is released keeps its identity, and on huge pages filling it again runs at the warm rate.
#pragma once
#include <cstddef>

namespace zeroexp {

class HostRange {
 public:
  explicit HostRange(std::size_t num_bytes);  // throws std::bad_alloc when the address space is exhausted
  ~HostRange();
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool huge_pages() const { return huge_pages_; }

  // Gives the pages back; the addresses stay valid and read as zero.
  void release();
  // Moves the pages of `from` here, as far as both reach, with whatever is in them, and leaves `from` released. The
  // kernel moves page tables, not bytes: several times faster than fresh pages, which it must fill with zeros.
  void take_pages(HostRange& from);
  // Bytes of this range that are in memory now.
  std::size_t resident_bytes() const;

 private:
  void* base_ = nullptr;  // what mmap returned
  std::size_t mapped_ = 0;
  void* data_ = nullptr;  // first huge-page boundary in it
  std::size_t size_ = 0;
  bool huge_pages_ = false;
};

}  // namespace zeroexp
