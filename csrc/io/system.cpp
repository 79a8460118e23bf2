#include "io/system.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "io/uring_header.hpp"

namespace zeroexp::io {
namespace {

template <class Result>
Result or_errno(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

}  // namespace

int System::open(const char* path, int flags, unsigned mode) { return or_errno(::open(path, flags, mode)); }

int System::close(int fd) { return or_errno(::close(fd)); }

int System::unlink(const char* path) { return or_errno(::unlink(path)); }

std::int64_t System::read(int fd, void* data, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pread(fd, data, bytes, static_cast<off_t>(offset)));
}

std::int64_t System::write(int fd, const void* data, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pwrite(fd, data, bytes, static_cast<off_t>(offset)));
}

int System::allocate(int fd, std::uint64_t bytes) {
#ifdef __linux__
  return or_errno(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
#else
  (void)fd, (void)bytes;
  return -EOPNOTSUPP;
#endif
}

int System::truncate(int fd, std::uint64_t bytes) { return or_errno(::ftruncate(fd, static_cast<off_t>(bytes))); }

int System::sync(int fd) { return or_errno(::fdatasync(fd)); }

std::int64_t System::size(int fd) {
  struct stat found{};
  const int failed = or_errno(::fstat(fd, &found));
  return failed != 0 ? failed : static_cast<std::int64_t>(found.st_size);
}

std::int64_t System::free_bytes(int fd) {
  struct statvfs found{};
  const int failed = or_errno(::fstatvfs(fd, &found));
  return failed != 0 ? failed : static_cast<std::int64_t>(found.f_bavail * found.f_frsize);
}

DirectLimits System::direct_limits(int fd) {
#ifdef STATX_DIOALIGN
  struct statx found{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0) {
    return {true, found.stx_dio_mem_align, found.stx_dio_offset_align};
  }
#else
  (void)fd;
#endif
  return {};
}

#ifdef ZEROEXP_URING
int System::uring_setup(unsigned entries, io_uring_params& params) {
  return static_cast<int>(or_errno(::syscall(__NR_io_uring_setup, entries, &params)));
}

int System::uring_enter(int ring, unsigned submit, unsigned wait) {
  return static_cast<int>(
      or_errno(::syscall(__NR_io_uring_enter, ring, submit, wait, IORING_ENTER_GETEVENTS, nullptr, 0)));
}
#else
int System::uring_setup(unsigned, io_uring_params&) { return -ENOSYS; }
int System::uring_enter(int, unsigned, unsigned) { return -ENOSYS; }
#endif

std::size_t System::uring_length(bool, std::size_t bytes) { return bytes; }

std::int64_t System::uring_result(bool, void*, std::int64_t result) { return result; }

System& real_system() {
  static System system;
  return system;
}

}  // namespace zeroexp::io
