// io_uring by its system calls (man 2 io_uring_setup, io_uring_enter; Jens Axboe, "Efficient IO with io_uring").
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "io/backend.hpp"
#include "io/uring_header.hpp"

namespace zeroexp::io {

#ifdef ZEROEXP_URING
namespace {

// The two rings, shared with the kernel: we put entries at the tail of one and take completions from the head of the
// other. Acquire and release on the indices are the whole protocol. Used by one thread.
class Ring {
 public:
  Ring(System& system, int fd, const io_uring_params& params) : system_(system), fd_(fd), params_(params) {}
  ~Ring() {
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, params_.sq_entries * sizeof(io_uring_sqe));
    ::close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0, or the errno of the mapping that failed.
  int map() {
    rings_bytes_ = std::max<std::size_t>(params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                                         params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe));
    rings_ = map_at(rings_bytes_, IORING_OFF_SQ_RING);
    if (rings_ == MAP_FAILED) return errno;
    entries_ = map_at(params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (entries_ == MAP_FAILED) return errno;
    for (unsigned i = 0; i < params_.sq_entries; ++i) at(params_.sq_off.array)[i] = i;
    return 0;
  }

  // There is room: the ring has an entry for all that can be on its way at once.
  io_uring_sqe& next() {
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[tail_++ & (params_.sq_entries - 1)];
    std::memset(&entry, 0, sizeof entry);
    return entry;
  }

  // Hands over what was put in, and sleeps until a completion is there. 0 or -errno.
  int enter() {
    __atomic_store_n(at(params_.sq_off.tail), tail_, __ATOMIC_RELEASE);
    const unsigned taken = __atomic_load_n(at(params_.sq_off.head), __ATOMIC_ACQUIRE);
    const int result = system_.uring_enter(fd_, tail_ - taken, 1);
    return result < 0 ? result : 0;
  }

  template <class Receive>
  void completions(Receive receive) {
    unsigned head = *at(params_.cq_off.head);
    const unsigned tail = __atomic_load_n(at(params_.cq_off.tail), __ATOMIC_ACQUIRE);
    const auto* const found = reinterpret_cast<const io_uring_cqe*>(static_cast<char*>(rings_) + params_.cq_off.cqes);
    for (; head != tail; ++head) {
      const io_uring_cqe& completion = found[head & (params_.cq_entries - 1)];
      receive(completion.user_data, completion.res);
    }
    __atomic_store_n(at(params_.cq_off.head), head, __ATOMIC_RELEASE);
  }

 private:
  void* map_at(std::size_t bytes, std::uint64_t offset) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
  }
  unsigned* at(unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(rings_) + offset); }

  System& system_;
  const int fd_;
  const io_uring_params params_;
  void* rings_ = MAP_FAILED;
  std::size_t rings_bytes_ = 0;
  void* entries_ = MAP_FAILED;
  unsigned tail_ = 0;
};

class Uring final : public Backend {
 public:
  Uring(System& system, RequestQueue& queue, std::unique_ptr<Ring> ring, std::size_t depth, int alarm)
      : system_(system), queue_(queue), ring_(std::move(ring)), alarm_(alarm), slots_(depth) {
    for (std::size_t i = 0; i < depth; ++i) free_.push_back(i);
    queue_.on_submit([this] { wake(); });
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  }
  ~Uring() override {
    thread_.join();
    queue_.on_submit(nullptr);
    ::close(alarm_);
  }

 private:
  static constexpr std::uint64_t kAlarm = ~std::uint64_t{0};

  void wake() const {
    const std::uint64_t one = 1;
    // It can only fail when the counter is full, and then the thread is awake.
    (void)!::write(alarm_, &one, sizeof one);
  }

  void run() {
    watch_alarm();
    while (true) {
      while (!free_.empty() && queue_.try_take(slots_[free_.back()])) {
        put(free_.back());
        free_.pop_back();
      }
      if (free_.size() == slots_.size() && queue_.stopped()) return;
      const int result = ring_->enter();
      if (result == -EAGAIN || result == -EBUSY) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the kernel is short of memory
      } else if (result < 0 && result != -EINTR) {
        fail(-result);
        return;
      }
      ring_->completions([this](std::uint64_t slot, std::int32_t result_of) { take_in(slot, result_of); });
    }
  }

  // The alarm is one more transfer: so one system call waits for completions and for new requests alike.
  void watch_alarm() {
    io_uring_sqe& entry = ring_->next();
    entry.opcode = IORING_OP_READ;
    entry.fd = alarm_;
    entry.addr = reinterpret_cast<std::uintptr_t>(&rung_);
    entry.len = sizeof rung_;
    entry.user_data = kAlarm;
  }

  void put(std::size_t index) {
    const Transfer t = RequestQueue::next_transfer(slots_[index]);
    io_uring_sqe& entry = ring_->next();
    entry.opcode = t.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = t.fd;
    entry.addr = reinterpret_cast<std::uintptr_t>(t.data);
    entry.len = static_cast<std::uint32_t>(system_.uring_length(t.write, t.bytes));
    entry.off = t.offset;
    entry.user_data = index;
  }

  void take_in(std::uint64_t which, std::int32_t raw) {
    if (which == kAlarm) {
      watch_alarm();
      return;
    }
    Slot& slot = slots_[which];
    const Transfer t = RequestQueue::next_transfer(slot);
    if (RequestQueue::advance(slot, system_.uring_result(t.write, t.data, raw))) {
      queue_.finish(slot);
      free_.push_back(which);
    } else {
      put(which);
    }
  }

  // The ring itself is broken: everything ends with that error.
  void fail(int error) {
    queue_.stop(error);
    ring_.reset();
    for (Slot& slot : slots_) {
      if (slot.request == nullptr) continue;
      slot.error = error;
      queue_.finish(slot);
    }
  }

  System& system_;
  RequestQueue& queue_;
  std::unique_ptr<Ring> ring_;
  const int alarm_;
  std::uint64_t rung_ = 0;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring(System& system, RequestQueue& queue, std::size_t depth, std::string& why) {
  io_uring_params params{};
  const int fd = system.uring_setup(static_cast<unsigned>(depth) + 1, params);
  if (fd < 0) {
    why = std::string("io_uring_setup: ") + std::strerror(-fd);
    if (fd == -EPERM) why += " (kernel.io_uring_disabled, or a container's seccomp profile)";
    return nullptr;
  }
  auto ring = std::make_unique<Ring>(system, fd, params);
  const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
  if ((params.features & needed) != needed) {
    why = "the io_uring of this kernel has no plain reads and writes (Linux 5.6)";
    return nullptr;
  }
  if (const int failed = ring->map(); failed != 0) {
    why = std::string("mapping io_uring's rings: ") + std::strerror(failed);
    return nullptr;
  }
  const int alarm = ::eventfd(0, EFD_CLOEXEC);
  if (alarm < 0) {
    why = std::string("eventfd: ") + std::strerror(errno);
    return nullptr;
  }
  return std::make_unique<Uring>(system, queue, std::move(ring), depth, alarm);
}

#else

std::unique_ptr<Backend> make_uring(System&, RequestQueue&, std::size_t, std::string& why) {
  why = "built without <linux/io_uring.h>";
  return nullptr;
}

#endif

}  // namespace zeroexp::io
