// Requests on their way: cut into pieces of at most a block, handed to a backend, continued where a transfer was short,
// tried again where it was interrupted, and collected by their tickets. Both backends share this; they only transfer.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "host_range.hpp"
#include "io/file.hpp"

namespace zeroexp::io {

struct Request {
  std::shared_ptr<File> file;
  bool write = false;
  char* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t cut = 0;    // bytes handed out as pieces
  unsigned pieces_out = 0;  // pieces handed out and not back
  bool over = false;
  Outcome outcome;
};

// What a backend holds while it transfers one piece. The bounce block stands in for memory that is not aligned for
// direct transfers; it is made when first needed and kept.
struct Slot {
  std::shared_ptr<Request> request;
  char* data = nullptr;  // where the caller's bytes are
  char* from = nullptr;  // what is transferred: data, or the bounce block
  std::size_t bytes = 0;
  std::uint64_t offset = 0;
  std::size_t done = 0;
  bool direct = false;
  unsigned tries = 0;  // in a row without a byte
  int error = 0;
  std::unique_ptr<HostRange> bounce;
};

// One system call's worth of a piece.
struct Transfer {
  int fd;
  bool write;
  bool direct;
  char* data;
  std::size_t bytes;
  std::uint64_t offset;
};

class RequestQueue {
 public:
  explicit RequestQueue(std::size_t block_size) : block_size_(block_size) {}

  // Callers.
  std::uint64_t submit(std::shared_ptr<File> file, bool write, char* data, std::uint64_t bytes, std::uint64_t offset);
  bool over(std::uint64_t ticket);
  // True when the request is over: its outcome is handed out once, the ticket is used up. False: the time is.
  // Throws std::invalid_argument for a ticket that is not open.
  bool wait(std::uint64_t ticket, std::chrono::milliseconds at_most, Outcome& outcome);

  // Backends. take fills the slot with the next piece: false, there is none (try_take), or the queue has stopped.
  void on_submit(std::function<void()> wake) { wake_ = std::move(wake); }
  bool try_take(Slot& slot);
  bool take(Slot& slot);
  bool stopped();
  static Transfer next_transfer(const Slot& slot);
  // Takes in the result of next_transfer (bytes, or -errno). False: the piece goes on with another transfer.
  static bool advance(Slot& slot, std::int64_t result);
  void finish(Slot& slot);

  // Nothing new is handed out; what has not been cut ends with `error`, and so does what is submitted from now on.
  void stop(int error);

 private:
  bool cut(Slot& slot);  // with the lock held
  void settle(const std::shared_ptr<Request>& request);

  const std::size_t block_size_;
  std::function<void()> wake_;
  std::mutex mutex_;
  std::condition_variable work_, ended_;
  std::deque<std::shared_ptr<Request>> waiting_;  // not cut to the end
  std::unordered_map<std::uint64_t, std::shared_ptr<Request>> open_;
  std::uint64_t last_ticket_ = 0;
  int stop_error_ = 0;
};

}  // namespace zeroexp::io
