// The limit of a disk: one thread that does nothing but direct transfers by io_uring, into memory on huge pages. No
// errors handled beyond an end, no short transfers, no other thread to talk to.
//   uring_loop PATH BYTES BLOCK DEPTH [MEMORY]    then lines on stdin; seconds of one pass over the file on stdout
// Lines: "r" reads, "w" writes, "m" reads every block and writes it back once DEPTH later ones are on their way.
// MEMORY: bytes that the blocks pass through in turn, as many as the file has if it is not given.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

[[noreturn]] void end(const char* what) {
  std::perror(what);
  std::exit(1);
}

struct Ring {
  int fd;
  io_uring_params params{};
  char* rings;
  io_uring_sqe* entries;

  explicit Ring(unsigned depth) {
    fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd < 0) end("io_uring_setup");
    const int access = PROT_READ | PROT_WRITE;
    // Larger than either ring; what lies behind them is never touched.
    const std::size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    void* const shared = mmap(nullptr, sq > cq ? sq : cq, access, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    void* const slots =
        mmap(nullptr, params.sq_entries * sizeof(io_uring_sqe), access, MAP_SHARED, fd, IORING_OFF_SQES);
    if (shared == MAP_FAILED || slots == MAP_FAILED) end("mmap");
    rings = static_cast<char*>(shared);
    entries = static_cast<io_uring_sqe*>(slots);
    for (unsigned i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
  }
  unsigned* at(unsigned offset) { return reinterpret_cast<unsigned*>(rings + offset); }
};

struct Job {
  int file;
  char* data;
  std::uint64_t memory, bytes, block;
  unsigned depth;
};

void pass(Ring& ring, const Job& job, char kind) {
  unsigned tail = *ring.at(ring.params.sq_off.tail);
  unsigned head = *ring.at(ring.params.cq_off.head);
  const auto* const done = reinterpret_cast<io_uring_cqe*>(ring.rings + ring.params.cq_off.cqes);
  const std::uint64_t blocks = (job.bytes + job.block - 1) / job.block;
  const std::uint64_t lag = kind == 'm' ? job.depth : 0;
  // Number 2i of a mixed pass reads block i, number 2i + 1 writes the one `lag` before it.
  const std::uint64_t count = kind == 'm' ? 2 * (blocks + lag) : blocks;
  std::uint64_t next = 0;
  unsigned out = 0;
  while (next < count || out > 0) {
    unsigned added = 0;
    for (; next < count && out < job.depth; ++next) {
      const bool write = kind == 'm' ? next % 2 == 1 : kind == 'w';
      const std::uint64_t number = kind == 'm' ? next / 2 - (write ? lag : 0) : next;
      if (number >= blocks) continue;  // also "before the first", which has wrapped around
      const std::uint64_t offset = number * job.block;
      io_uring_sqe& entry = ring.entries[tail++ & (ring.params.sq_entries - 1)];
      std::memset(&entry, 0, sizeof entry);
      entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
      entry.fd = job.file;
      entry.addr = reinterpret_cast<std::uintptr_t>(job.data + offset % job.memory);
      entry.len = static_cast<std::uint32_t>(job.bytes - offset < job.block ? job.bytes - offset : job.block);
      entry.off = offset;
      entry.user_data = entry.len;
      ++out;
      ++added;
    }
    if (out == 0) break;
    __atomic_store_n(ring.at(ring.params.sq_off.tail), tail, __ATOMIC_RELEASE);
    if (syscall(__NR_io_uring_enter, ring.fd, added, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) end("io_uring_enter");
    const unsigned last = __atomic_load_n(ring.at(ring.params.cq_off.tail), __ATOMIC_ACQUIRE);
    for (; head != last; ++head, --out) {
      const io_uring_cqe& completion = done[head & (ring.params.cq_entries - 1)];
      if (completion.res < 0 || static_cast<std::uint64_t>(completion.res) != completion.user_data) end("transfer");
    }
    __atomic_store_n(ring.at(ring.params.cq_off.head), head, __ATOMIC_RELEASE);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 5 || count > 6) return 2;
  const std::uint64_t bytes = std::strtoull(words[2], nullptr, 10);
  const std::uint64_t block = std::strtoull(words[3], nullptr, 10);
  const unsigned depth = static_cast<unsigned>(std::atoi(words[4]));
  const std::uint64_t memory = count > 5 ? std::strtoull(words[5], nullptr, 10) : bytes;
  const int file = open(words[1], O_RDWR | O_DIRECT);
  if (file < 0) end("open with O_DIRECT");
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  void* const mapped =
      mmap(nullptr, memory + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) end("mmap");
  char* const data = static_cast<char*>(mapped) + (kHuge - reinterpret_cast<std::uintptr_t>(mapped) % kHuge) % kHuge;
  madvise(data, memory, MADV_HUGEPAGE);
  std::memset(data, 1, memory);
  Ring ring(depth);
  char line[16];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    const auto start = std::chrono::steady_clock::now();
    pass(ring, Job{file, data, memory, bytes, block, depth}, line[0]);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%.9f\n", seconds.count());
    std::fflush(stdout);
  }
  return 0;
}
