// The system calls of the file engine. They are virtual so that the tests can make any of them fail, where no disk
// would.
#pragma once
#include <cstddef>
#include <cstdint>

struct io_uring_params;

namespace zeroexp::io {

// What a file system asks of direct transfers, in bytes. known is false where it does not say (before Linux 6.1).
struct DirectLimits {
  bool known = false;
  std::size_t memory = 0;  // alignment of the address
  std::size_t offset = 0;  // alignment of offset and length; 0: no direct transfers at all
};

// Every call returns what its namesake returns, with -errno in place of -1.
class System {
 public:
  virtual ~System() = default;
  virtual int open(const char* path, int flags, unsigned mode);
  virtual int close(int fd);
  virtual int unlink(const char* path);
  virtual std::int64_t read(int fd, void* data, std::size_t bytes, std::uint64_t offset);
  virtual std::int64_t write(int fd, const void* data, std::size_t bytes, std::uint64_t offset);
  virtual int allocate(int fd, std::uint64_t bytes);  // fallocate(2): blocks, and the size of the file
  virtual int truncate(int fd, std::uint64_t bytes);
  virtual int sync(int fd);
  virtual std::int64_t size(int fd);
  virtual std::int64_t free_bytes(int fd);
  virtual DirectLimits direct_limits(int fd);
  virtual int uring_setup(unsigned entries, io_uring_params& params);
  virtual int uring_enter(int ring, unsigned submit, unsigned wait);

  // The transfers of io_uring are no calls: how many bytes to ask for, and what to make of a result. The system itself
  // changes neither.
  virtual std::size_t uring_length(bool write, std::size_t bytes);
  virtual std::int64_t uring_result(bool write, void* data, std::int64_t result);
};

System& real_system();

}  // namespace zeroexp::io
