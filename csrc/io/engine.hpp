// The file engine: reads and writes of memory at offsets of files, asynchronous, by io_uring or by a pool of threads.
//
// Any thread may call; requests run in no particular order, so two that touch the same bytes of a file must not be open
// at once. Memory and file must stay as they are until the request's outcome was taken. What was waited for is in the
// file, and outlives the process; it outlives the machine after sync().
#pragma once
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "io/backend.hpp"
#include "io/file.hpp"
#include "io/queue.hpp"
#include "io/system.hpp"

namespace zeroexp::io {

struct EngineOptions {
  std::string kind = "auto";  // auto, io_uring, threads
  std::size_t queue_depth = 4;
  std::size_t block_size = std::size_t{8} << 20;  // bytes; a multiple of 4096
  std::size_t threads = 4;
};

struct FileFacts {
  std::uint64_t size = 0;
  bool direct = false;
  std::string why_buffered;
};

class FileEngine {
 public:
  // Throws std::invalid_argument for options that make no sense, std::runtime_error where "io_uring" is asked for by
  // name and refused.
  explicit FileEngine(const EngineOptions& options, System& system = real_system());
  ~FileEngine() { shut_down(); }
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  // Ends what is open: pieces that the kernel has are waited for, the others are not tried (ECANCELED). Once is enough.
  void shut_down();

  const std::string& kind() const { return kind_; }
  const std::string& reason() const { return reason_; }

  // A number for the file, or -1 and the outcome.
  int open(const std::string& path, Access access, std::uint64_t bytes, Outcome& outcome);
  FileFacts facts(int file) const;
  Outcome sync(int file);
  void close(int file);  // requests that are open keep the file until they end

  std::uint64_t submit(int file, bool write, void* data, std::uint64_t bytes, std::uint64_t offset);
  bool over(std::uint64_t ticket) { return queue_->over(ticket); }
  bool wait(std::uint64_t ticket, std::chrono::milliseconds at_most, Outcome& outcome) {
    return queue_->wait(ticket, at_most, outcome);
  }

 private:
  std::shared_ptr<File> file_at(int file) const;

  const EngineOptions options_;
  System& system_;
  const pid_t owner_;
  std::string kind_, reason_;
  std::unique_ptr<RequestQueue> queue_;
  std::unique_ptr<Backend> backend_;
  mutable std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<File>> files_;
  int last_file_ = -1;
};

}  // namespace zeroexp::io
