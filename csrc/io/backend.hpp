// Who carries out the pieces of a queue: threads of its own until it is destroyed. The owner stops the queue first.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "io/queue.hpp"
#include "io/system.hpp"

namespace zeroexp::io {

class Backend {
 public:
  virtual ~Backend() = default;
};

// `threads` threads with pread and pwrite: works everywhere, and is what io_uring is compared with in the tests.
std::unique_ptr<Backend> make_pool(System& system, RequestQueue& queue, std::size_t threads);

// One thread that keeps up to `depth` pieces with the kernel. Null, and the reason in `why`, where there is no
// io_uring.
std::unique_ptr<Backend> make_uring(System& system, RequestQueue& queue, std::size_t depth, std::string& why);

// Threads of the engine take no signals: Ctrl-C belongs to the thread that waits, and a write past RLIMIT_FSIZE is to
// be an error (EFBIG), not the death of the process. Blocks all signals of this thread until it is destroyed.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  struct Mask;
  std::unique_ptr<Mask> before_;
};

}  // namespace zeroexp::io
