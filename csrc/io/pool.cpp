#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "io/backend.hpp"

namespace zeroexp::io {

struct SignalsBlocked::Mask {
  sigset_t set;
};

SignalsBlocked::SignalsBlocked() : before_(std::make_unique<Mask>()) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_->set);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_->set, nullptr); }

namespace {

class Pool final : public Backend {
 public:
  Pool(System& system, RequestQueue& queue, std::size_t threads) : system_(system), queue_(queue) {
    const SignalsBlocked blocked;
    threads_.reserve(threads);
    try {
      for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {
      queue_.stop(EAGAIN);
      join();
      throw;
    }
  }
  ~Pool() override { join(); }

 private:
  void run() {
    Slot slot;
    while (queue_.take(slot)) {
      std::int64_t result = 0;
      do {
        const Transfer t = RequestQueue::next_transfer(slot);
        result =
            t.write ? system_.write(t.fd, t.data, t.bytes, t.offset) : system_.read(t.fd, t.data, t.bytes, t.offset);
      } while (!RequestQueue::advance(slot, result));
      queue_.finish(slot);
    }
  }

  void join() {
    for (std::thread& thread : threads_) thread.join();
  }

  System& system_;
  RequestQueue& queue_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_pool(System& system, RequestQueue& queue, std::size_t threads) {
  return std::make_unique<Pool>(system, queue, threads);
}

}  // namespace zeroexp::io
