#include "io/file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace zeroexp::io {
namespace {

constexpr std::size_t kBlock = 4096;

// A signal may end an open or an allocation early; both can simply be asked for again.
template <class Call>
int uninterrupted(Call call) {
  int result = call();
  while (result == -EINTR) result = call();
  return result;
}

int flags_of(Access access) {
  if (access == Access::read) return O_RDONLY | O_CLOEXEC;
  return O_RDWR | O_CLOEXEC | (access == Access::create ? O_CREAT | O_TRUNC : 0);
}

}  // namespace

std::shared_ptr<File> File::open(System& system, const std::string& path, Access access, std::uint64_t bytes,
                                 std::size_t block_size, Outcome& outcome) {
  const int flags = flags_of(access);
  const int fd = uninterrupted([&] { return system.open(path.c_str(), flags, 0600); });
  if (fd < 0) {
    outcome.error = -fd;
    outcome.wanted = bytes;
    return nullptr;
  }
  std::shared_ptr<File> file(new File(system, fd));
  if (access == Access::create && bytes > 0) {
    int failed = uninterrupted([&] { return system.allocate(fd, bytes); });
    // Without blocks to reserve (NFS, FUSE), the size alone: a full disk then shows at the write.
    if (failed == -EOPNOTSUPP || failed == -ENOSYS) failed = uninterrupted([&] { return system.truncate(fd, bytes); });
    if (failed != 0) {
      outcome.error = -failed;
      outcome.wanted = bytes;
      system.unlink(path.c_str());
      // After the unlink, and after what was allocated in part is given back: what the next try could have.
      system.truncate(fd, 0);
      outcome.free = system.free_bytes(fd);
      return nullptr;
    }
  }
  file->open_direct(path, flags & ~(O_CREAT | O_TRUNC), block_size);
  return file;
}

void File::open_direct(const std::string& path, int flags, std::size_t block_size) {
#ifdef O_DIRECT
  const int fd = uninterrupted([&] { return system_.open(path.c_str(), flags | O_DIRECT, 0); });
  if (fd < 0) {
    why_ = std::string("the file system refuses O_DIRECT (") + std::strerror(-fd) + ")";
    return;
  }
  direct_fd_ = fd;
  const DirectLimits limits = system_.direct_limits(fd);
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  alignment_ = std::max({kBlock, page, limits.offset});
  memory_alignment_ = limits.known && limits.memory != 0 ? limits.memory : kBlock;
  if (limits.known && limits.offset == 0) {
    why_ = "the file system has no direct transfers for this file";
  } else if (alignment_ > block_size) {
    why_ = "direct transfers need blocks of at least " + std::to_string(alignment_) + " bytes";
  } else {
    direct_.store(true, std::memory_order_relaxed);
  }
#else
  (void)path, (void)flags, (void)block_size;
  why_ = "this system has no O_DIRECT";
#endif
}

File::~File() {
  if (direct_fd_ >= 0) system_.close(direct_fd_);
  system_.close(buffered_fd_);
}

std::string File::why_buffered() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void File::give_up_direct(int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!direct()) return;
  why_ = std::string("the file system refuses direct transfers (") + std::strerror(error) + ")";
  direct_.store(false, std::memory_order_relaxed);
}

int File::sync() const {
  return uninterrupted([this] { return system_.sync(buffered_fd_); });
}

}  // namespace zeroexp::io
