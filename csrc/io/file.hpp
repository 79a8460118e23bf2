// An open file with two descriptors: one for direct transfers of whole aligned blocks, where the file system has them,
// and one through the page cache for the rest (the odd bytes at both ends; everything, where it has not).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "io/system.hpp"

namespace zeroexp::io {

constexpr int kEndOfFile = -1;

// What became of an open or a request. error is 0, an errno, or kEndOfFile: the file ends before the bytes wanted.
struct Outcome {
  int error = 0;
  std::uint64_t offset = 0;  // in the file, where it failed
  std::uint64_t wanted = 0;  // bytes of the whole request
  std::uint64_t done = 0;    // bytes of it that were transferred
  std::int64_t free = -1;    // bytes free in the file system at that moment; -1: unknown
  double ended = 0;          // when the request was over: seconds of the steady clock
};

enum class Access { read, write, create };

class File {
 public:
  // Opens `path`; create makes it anew with `bytes` bytes allocated, and leaves nothing behind if that fails. Null and
  // an outcome with an error when it cannot. Direct only if blocks of `block_size` are aligned enough for it.
  static std::shared_ptr<File> open(System& system, const std::string& path, Access access, std::uint64_t bytes,
                                    std::size_t block_size, Outcome& outcome);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor(bool direct) const { return direct ? direct_fd_ : buffered_fd_; }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  std::string why_buffered() const;
  // Direct transfers start and end at multiples of this. Never less than a page: no page of the cache is then part of
  // a direct and of a buffered transfer of one request.
  std::size_t alignment() const { return alignment_; }
  std::size_t memory_alignment() const { return memory_alignment_; }

  // Some file systems open with O_DIRECT and refuse the transfer.
  void give_up_direct(int error);
  std::int64_t size() const { return system_.size(buffered_fd_); }
  std::int64_t free_bytes() const { return system_.free_bytes(buffered_fd_); }
  int sync() const;

 private:
  File(System& system, int buffered_fd) : system_(system), buffered_fd_(buffered_fd) {}
  void open_direct(const std::string& path, int flags, std::size_t block_size);

  System& system_;
  int buffered_fd_;
  int direct_fd_ = -1;
  std::size_t alignment_ = 1;
  std::size_t memory_alignment_ = 1;
  std::atomic<bool> direct_{false};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace zeroexp::io
