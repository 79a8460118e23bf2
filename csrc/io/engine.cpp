#include "io/engine.hpp"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

namespace zeroexp::io {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kMaxDepth = 4096;                  // io_uring takes no more than 32768 entries
constexpr std::size_t kMaxBlock = std::size_t{1} << 30;  // a transfer is at most 2 GiB less a page

void check(const EngineOptions& o) {
  if (o.kind != "auto" && o.kind != "io_uring" && o.kind != "threads") {
    throw std::invalid_argument("engine is '" + o.kind + "'; there are auto, io_uring and threads");
  }
  if (o.block_size == 0 || o.block_size % kBlock != 0 || o.block_size > kMaxBlock) {
    throw std::invalid_argument("block_size is " + std::to_string(o.block_size) +
                                " bytes; wanted a multiple of 4096 up to 1 GiB");
  }
  if (o.queue_depth == 0 || o.queue_depth > kMaxDepth) {
    throw std::invalid_argument("queue_depth is " + std::to_string(o.queue_depth) + "; wanted 1 to 4096");
  }
  if (o.threads == 0 || o.threads > kMaxDepth) {
    throw std::invalid_argument("threads is " + std::to_string(o.threads) + "; wanted 1 to 4096");
  }
}

}  // namespace

FileEngine::FileEngine(const EngineOptions& options, System& system)
    : options_(options), system_(system), owner_(getpid()) {
  check(options_);
  queue_ = std::make_unique<RequestQueue>(options_.block_size);
  if (options_.kind != "threads") {
    std::string why;
    backend_ = make_uring(system_, *queue_, options_.queue_depth, why);
    if (backend_ == nullptr && options_.kind == "io_uring") throw std::runtime_error(why);
    kind_ = "io_uring";
    reason_ = backend_ == nullptr ? "no io_uring: " + why : "the kernel has it";
  } else {
    reason_ = "asked for by name";
  }
  if (backend_ == nullptr) {
    backend_ = make_pool(system_, *queue_, options_.threads);
    kind_ = "threads";
  }
}

void FileEngine::shut_down() {
  if (getpid() != owner_) {
    // A child of fork: the threads stayed with the parent, and locks may be held for good. Nothing of it can be ended.
    (void)backend_.release();
    (void)queue_.release();
    return;
  }
  queue_->stop(ECANCELED);
  backend_.reset();
}

std::shared_ptr<File> FileEngine::file_at(int file) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = files_.find(file);
  if (found == files_.end()) throw std::invalid_argument("there is no open file " + std::to_string(file));
  return found->second;
}

int FileEngine::open(const std::string& path, Access access, std::uint64_t bytes, Outcome& outcome) {
  std::shared_ptr<File> file = File::open(system_, path, access, bytes, options_.block_size, outcome);
  if (file == nullptr) return -1;
  const std::lock_guard<std::mutex> lock(mutex_);
  files_.emplace(++last_file_, std::move(file));
  return last_file_;
}

FileFacts FileEngine::facts(int file) const {
  const std::shared_ptr<File> found = file_at(file);
  const std::int64_t size = found->size();
  return {size < 0 ? 0 : static_cast<std::uint64_t>(size), found->direct(), found->why_buffered()};
}

Outcome FileEngine::sync(int file) {
  const std::shared_ptr<File> found = file_at(file);
  Outcome outcome;
  outcome.error = -found->sync();
  if (outcome.error != 0) outcome.free = found->free_bytes();
  return outcome;
}

void FileEngine::close(int file) {
  const std::shared_ptr<File> found = file_at(file);  // closed here, without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  files_.erase(file);
}

std::uint64_t FileEngine::submit(int file, bool write, void* data, std::uint64_t bytes, std::uint64_t offset) {
  return queue_->submit(file_at(file), write, static_cast<char*>(data), bytes, offset);
}

}  // namespace zeroexp::io
