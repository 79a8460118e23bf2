// The file engine with both backends, on files of a temporary folder: what arrives in the file is read back with plain
// system calls, never with the engine that wrote it. Faults that no disk gives on demand come from a System in between.
// Buffers are heap blocks of the exact size, so that the address sanitizer sees a read or write past either end.
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "counted.hpp"
#include "host_range.hpp"
#include "io/checksum.hpp"
#include "io/engine.hpp"
#include "io/uring_header.hpp"

namespace {

using namespace zeroexp;
using namespace zeroexp::io;
using zeroexp::test::check;
using Bytes = std::vector<unsigned char>;

std::string folder;

unsigned char pattern(std::size_t i) { return static_cast<unsigned char>((i * 2654435761u) >> 7); }

Bytes file_bytes(const std::string& path) {
  Bytes bytes;
  const int fd = ::open(path.c_str(), O_RDONLY);
  struct stat found{};
  if (fd < 0 || fstat(fd, &found) != 0) return bytes;
  bytes.resize(static_cast<std::size_t>(found.st_size));
  std::size_t at = 0;
  for (ssize_t got = 1; got > 0 && at < bytes.size(); at += static_cast<std::size_t>(got)) {
    got = ::pread(fd, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
  }
  ::close(fd);
  return bytes;
}

enum class Fault { none, short_by_half, short_odd, interrupted, again, fails };

// Every n-th transfer has the fault; opening, allocating and io_uring itself fail as they are told to.
class Faulty final : public System {
 public:
  Fault fault = Fault::none;
  unsigned every = 0;
  std::atomic<int> error{ENOSPC};
  std::atomic<unsigned> transfers{0};
  std::atomic<unsigned> faults{0};
  int open_direct_error = 0, transfer_direct_error = 0, allocate_error = 0, setup_error = 0;
  std::atomic<int> enter_error{0};
  std::atomic<int> on_their_way{0}, most_on_their_way{0};
  std::atomic<bool> hold{false};

  int open(const char* path, int flags, unsigned mode) override {
    if ((flags & O_DIRECT) != 0 && open_direct_error != 0) return -open_direct_error;
    const int fd = System::open(path, flags, mode);
    if (fd >= 0 && (flags & O_DIRECT) != 0) direct_fd_ = fd;
    return fd;
  }
  int allocate(int fd, std::uint64_t bytes) override {
    if (allocate_error == EINTR) {
      allocate_error = 0;
      return -EINTR;
    }
    return allocate_error != 0 ? -allocate_error : System::allocate(fd, bytes);
  }
  std::int64_t read(int fd, void* data, std::size_t bytes, std::uint64_t offset) override {
    return transfer(false, fd, data, bytes, [&](std::size_t n) { return System::read(fd, data, n, offset); });
  }
  std::int64_t write(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    return transfer(true, fd, nullptr, bytes, [&](std::size_t n) { return System::write(fd, data, n, offset); });
  }
  int uring_setup(unsigned entries, io_uring_params& params) override {
    return setup_error != 0 ? -setup_error : System::uring_setup(entries, params);
  }
  int uring_enter(int ring, unsigned submit, unsigned wait) override {
    return enter_error != 0 ? -enter_error : System::uring_enter(ring, submit, wait);
  }
  std::size_t uring_length(bool, std::size_t bytes) override {
    const int now = ++on_their_way;
    if (now > most_on_their_way) most_on_their_way = now;
    if (fault != Fault::short_by_half || !due()) return bytes;
    return half(bytes);
  }
  std::int64_t uring_result(bool write, void* data, std::int64_t result) override {
    --on_their_way;
    if (transfer_direct_error != 0 && direct_left_ > 0) {
      --direct_left_;
      return -transfer_direct_error;
    }
    if (fault == Fault::none || fault == Fault::short_by_half || !due()) return result;
    return spoiled(write, data, result);
  }
  void refuse_direct_results(int count) { direct_left_ = count; }

 private:
  bool due() {
    const bool now = every != 0 && ++transfers % every == 0;
    if (now) ++faults;
    return now;
  }
  // Direct transfers are whole blocks, so that their halves can be; less than a block is buffered.
  static std::size_t half(std::size_t bytes) {
    if (bytes >= 8192) return bytes / 2 / 4096 * 4096;
    return bytes == 4096 || bytes < 2 ? bytes : bytes / 2;
  }
  std::int64_t spoiled(bool write, void* data, std::int64_t result) {
    if (fault == Fault::interrupted) return -EINTR;
    if (fault == Fault::again) return -EAGAIN;
    if (fault == Fault::fails) return -error;
    if (result < 3) return result;
    const std::int64_t less = result / 2 | 1;
    if (!write) std::memset(static_cast<char*>(data) + less, 0xEE, static_cast<std::size_t>(result - less));
    return less;
  }
  template <class Call>
  std::int64_t transfer(bool write, int fd, void* data, std::size_t bytes, Call call) {
    while (hold) usleep(1000);
    if (transfer_direct_error != 0 && fd == direct_fd_) return -transfer_direct_error;
    if (fault == Fault::none || !due()) return call(bytes);
    if (fault == Fault::short_by_half) return call(half(bytes));
    if (fault == Fault::short_odd) return spoiled(write, data, call(bytes));
    return spoiled(write, data, 0);
  }

  std::atomic<int> direct_fd_{-1};
  std::atomic<int> direct_left_{0};
};

Outcome result_of(FileEngine& engine, std::uint64_t ticket) {
  Outcome outcome;
  for (int i = 0; i < 600; ++i) {
    if (engine.wait(ticket, std::chrono::milliseconds(100), outcome)) return outcome;
  }
  check(false, "a request never ended");
  std::exit(1);
}

EngineOptions options(const std::string& kind, std::size_t block = 8192, std::size_t depth = 4) {
  return {kind, depth, block, 3};
}

bool has_uring() {
  try {
    const FileEngine engine(options("io_uring"));
    return true;
  } catch (const std::runtime_error& error) {
    std::printf("io_uring: left out (%s)\n", error.what());
    return false;
  }
}

// Writes, looks at the file, reads back into other memory: `shift` is the distance of buffers from an aligned address.
void round_trip(FileEngine& engine, std::size_t size, std::size_t shift, std::uint64_t offset,
                const std::string& what) {
  const std::string path = folder + "/round";
  const HostRange range(size + shift + 1);
  unsigned char* const source = static_cast<unsigned char*>(range.data()) + shift;
  for (std::size_t i = 0; i < size; ++i) source[i] = pattern(i + size);
  Outcome outcome;
  const int file = engine.open(path, Access::create, offset + size + 5, outcome);
  check(file >= 0 && outcome.error == 0, what, ": create");
  if (file < 0) return;
  const bool direct = engine.facts(file).direct;
  outcome = result_of(engine, engine.submit(file, true, source, size, offset));
  check(outcome.error == 0 && outcome.done == size && outcome.wanted == size, what, ": write, error ", outcome.error);
  const Bytes found = file_bytes(path);
  check(found.size() == offset + size + 5, what, ": the file has the size it was made with");
  bool same = true, zeros = true;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i >= offset && i < offset + size) {
      same = same && found[i] == pattern(i - offset + size);
    } else {
      zeros = zeros && found[i] == 0;
    }
  }
  check(same, what, ": the file holds the bytes");
  check(zeros, what, ": nothing is written outside of them");
  Bytes exact(size + shift, 0xAB);
  outcome = result_of(engine, engine.submit(file, false, exact.data() + shift, size, offset));
  check(outcome.error == 0 && outcome.done == size, what, ": read, error ", outcome.error);
  check(std::equal(exact.begin() + static_cast<std::ptrdiff_t>(shift), exact.end(), source), what, ": read back");
  check(std::all_of(exact.begin(), exact.begin() + static_cast<std::ptrdiff_t>(shift),
                    [](unsigned char b) { return b == 0xAB; }),
        what, ": the bytes before are left alone");
  check(engine.facts(file).direct == direct, what, ": no transfer is one that the file system refuses");
  engine.close(file);
}

const std::size_t kSizes[] = {0, 1, 127, 128, 129, 4095, 4096, 4097, 8192, 12289, 65536, 262145};

void test_round_trips(const std::string& kind) {
  FileEngine engine(options(kind));
  check(engine.kind() == kind, "the backend asked for is taken");
  for (const std::size_t size : kSizes) {
    for (const std::size_t shift : {0, 1, 64, 511, 4095}) {
      for (const std::uint64_t offset : {0, 1, 511, 4096, 4100, 16384}) {
        const std::string what = kind + " size " + std::to_string(size) + " shift " + std::to_string(shift) +
                                 " offset " + std::to_string(offset);
        round_trip(engine, size, shift, offset, what);
      }
    }
  }
}

void test_harmless_faults(const std::string& kind) {
  const std::pair<Fault, const char*> all[] = {{Fault::short_by_half, "halves"},
                                               {Fault::short_odd, "odd parts"},
                                               {Fault::interrupted, "EINTR"},
                                               {Fault::again, "EAGAIN"}};
  for (const auto& [fault, name] : all) {
    for (const unsigned every : {1, 2, 3, 5}) {
      // With every transfer interrupted nothing ever arrives.
      if (every == 1 && (fault == Fault::interrupted || fault == Fault::again)) continue;
      Faulty system;
      FileEngine engine(options(kind), system);
      system.fault = fault;
      system.every = every;
      for (const std::size_t size : kSizes) {
        for (const std::size_t shift : {0, 3}) {
          for (const std::uint64_t offset : {0, 4100}) {
            round_trip(engine, size, shift, offset,
                       kind + " " + name + " every " + std::to_string(every) + " size " + std::to_string(size));
          }
        }
      }
      check(system.faults > 50, kind, " ", name, " happened");
    }
  }
}

void test_errors_are_reported_and_end_only_their_request(const std::string& kind) {
  for (const int error : {ENOSPC, EIO, EFBIG, EDQUOT}) {
    for (unsigned nth = 1; nth <= 40; nth += error == ENOSPC ? 1 : 13) {  // a request of 40 pieces
      for (const bool write : {true, false}) {
        Faulty system;
        FileEngine engine(options(kind), system);
        HostRange range(40 * 8192);
        Outcome outcome;
        const int file = engine.open(folder + "/error", Access::create, range.size(), outcome);
        const std::string what = kind + " error " + std::to_string(error) + " at " + std::to_string(nth);
        check(file >= 0, what, ": create");
        system.error = error;
        system.every = nth;
        system.fault = Fault::fails;
        outcome = result_of(engine, engine.submit(file, write, range.data(), range.size(), 0));
        check(outcome.error == error, what, ": got ", outcome.error);
        check(outcome.wanted == range.size() && outcome.done < outcome.wanted, what, ": wanted and done");
        check(outcome.done % 8192 == 0 && outcome.offset % 8192 == 0 && outcome.offset < range.size(), what, ": where");
        check(outcome.free > 0, what, ": free bytes");
        // Fewer than the threads or the depth were on their way when it failed.
        check(system.transfers < nth + 8, what, ": the rest is not tried");
        system.fault = Fault::none;
        outcome = result_of(engine, engine.submit(file, true, range.data(), range.size(), 0));
        check(outcome.error == 0 && outcome.done == range.size(), what, ": the next request works");
      }
    }
  }
}

void test_again_for_ever_is_an_error(const std::string& kind) {
  Faulty system;
  FileEngine engine(options(kind), system);
  Outcome outcome;
  const int file = engine.open(folder + "/again", Access::create, 8192, outcome);
  system.every = 1;
  system.fault = Fault::again;
  HostRange range(8192);
  outcome = result_of(engine, engine.submit(file, true, range.data(), 8192, 0));
  check(outcome.error == EAGAIN && outcome.done == 0, kind, ": EAGAIN without end is reported");
}

void test_end_of_file(const std::string& kind) {
  FileEngine engine(options(kind));
  Outcome outcome;
  for (const std::uint64_t size : {0, 1, 4096, 10000, 20480}) {
    const int file = engine.open(folder + "/short", Access::create, size, outcome);
    Bytes buffer(32768);
    outcome = result_of(engine, engine.submit(file, false, buffer.data(), buffer.size(), 0));
    check(outcome.error == kEndOfFile, kind, ": the end of a file of ", size, " bytes is an error");
    check(outcome.done <= size && outcome.wanted == 32768, kind, ": bytes before the end");
    check(outcome.offset >= size && outcome.offset < 32768, kind, ": it is met at or behind the end");
    engine.close(file);
  }
}

void test_file_size_limit(const std::string& kind) {
  // The signal would kill this process; the threads of the engine do not take it.
  FileEngine engine(options(kind));
  Outcome outcome;
  const int file = engine.open(folder + "/limit", Access::create, 0, outcome);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 65536;
  setrlimit(RLIMIT_FSIZE, &limit);
  HostRange range(98304);
  outcome = result_of(engine, engine.submit(file, true, range.data(), range.size(), 0));
  check(outcome.error == EFBIG, kind, ": past RLIMIT_FSIZE, got ", outcome.error);
  check(outcome.offset >= 65536 - 8192 && outcome.done <= 65536, kind, ": where the limit is");
  signal(SIGXFSZ, SIG_IGN);
  const int too_large = engine.open(folder + "/large", Access::create, 98304, outcome);
  check(too_large == -1 && outcome.error == EFBIG, kind, ": allocating past the limit");
  check(access((folder + "/large").c_str(), F_OK) != 0, kind, ": what cannot be allocated is not left behind");
  signal(SIGXFSZ, SIG_DFL);
  setrlimit(RLIMIT_FSIZE, &before);
}

void test_without_direct(const std::string& kind) {
  Faulty refused;
  refused.open_direct_error = EINVAL;
  FileEngine engine(options(kind), refused);
  Outcome outcome;
  const int file = engine.open(folder + "/buffered", Access::create, 100, outcome);
  check(file >= 0 && !engine.facts(file).direct, kind, ": buffered where O_DIRECT is refused");
  check(engine.facts(file).why_buffered.find("refuses O_DIRECT") != std::string::npos, kind, ": and says why");
  for (const std::size_t size : kSizes) round_trip(engine, size, 1, 3, kind + " buffered");

  // Opens with O_DIRECT and refuses the transfers.
  for (const int error : {EINVAL, EOPNOTSUPP}) {
    Faulty late;
    FileEngine second(options(kind), late);
    const int other = second.open(folder + "/late", Access::create, 65536, outcome);
    if (!second.facts(other).direct) continue;  // this file system has no direct transfers
    late.transfer_direct_error = error;
    late.refuse_direct_results(1);
    HostRange range(65536);
    std::memset(range.data(), 9, 65536);
    outcome = result_of(second, second.submit(other, true, range.data(), 65536, 0));
    check(outcome.error == 0, kind, ": goes on buffered, error ", outcome.error);
    check(file_bytes(folder + "/late") == Bytes(65536, 9), kind, ": the bytes arrive");
    check(!second.facts(other).direct, kind, ": direct is given up");
    check(second.facts(other).why_buffered.find("refuses direct transfers") != std::string::npos, kind, ": why");
  }
}

void test_opening(const std::string& kind) {
  Faulty system;
  FileEngine engine(options(kind), system);
  Outcome outcome;
  check(engine.open(folder + "/none/x", Access::create, 1, outcome) == -1 && outcome.error == ENOENT, "no folder");
  outcome = {};
  check(engine.open(folder + "/none", Access::read, 0, outcome) == -1 && outcome.error == ENOENT, "no file");
  for (const int error : {EOPNOTSUPP, ENOSYS, EINTR}) {
    outcome = {};
    system.allocate_error = error;
    const int file = engine.open(folder + "/alloc", Access::create, 12345, outcome);
    check(file >= 0 && engine.facts(file).size == 12345, kind, ": size without allocation");
  }
  outcome = {};
  system.allocate_error = ENOSPC;
  check(engine.open(folder + "/full", Access::create, 12345, outcome) == -1, kind, ": a full disk at create");
  check(outcome.error == ENOSPC && outcome.wanted == 12345 && outcome.free > 0, kind, ": is told with its figures");
  check(access((folder + "/full").c_str(), F_OK) != 0, kind, ": and leaves no file");
  system.allocate_error = 0;
  outcome = {};
  const int file = engine.open(folder + "/alloc", Access::read, 0, outcome);
  Bytes bytes(100);
  outcome = result_of(engine, engine.submit(file, true, bytes.data(), 100, 0));
  check(outcome.error == EBADF, kind, ": a file opened to read cannot be written");
  check(engine.sync(file).error == 0, kind, ": sync");
  engine.close(file);
  for (const auto& call : {0, 1, 2, 3}) {
    bool refused = false;
    try {
      if (call == 0) engine.close(file);
      if (call == 1) engine.facts(file);
      if (call == 2) engine.submit(file, true, bytes.data(), 100, 0);
      if (call == 3) engine.over(999);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    check(refused, kind, ": what is not open is refused, call ", call);
  }
}

void test_tickets(const std::string& kind) {
  FileEngine engine(options(kind));
  Outcome outcome;
  const int file = engine.open(folder + "/tickets", Access::create, 64 * 5000, outcome);
  std::vector<std::unique_ptr<Bytes>> buffers;
  std::vector<std::uint64_t> tickets;
  for (std::size_t i = 0; i < 64; ++i) {
    buffers.push_back(std::make_unique<Bytes>(5000, static_cast<unsigned char>(i)));
    tickets.push_back(engine.submit(file, true, buffers.back()->data(), 5000, i * 5000));
  }
  engine.close(file);  // the requests keep it
  for (std::size_t i = 64; i-- > 0;) check(result_of(engine, tickets[i]).error == 0, kind, ": ticket ", i);
  const Bytes found = file_bytes(folder + "/tickets");
  bool same = found.size() == 64 * 5000;
  for (std::size_t i = 0; same && i < found.size(); ++i) same = found[i] == i / 5000;
  check(same, kind, ": 64 requests at once");
  bool refused = false;
  try {
    engine.wait(tickets[0], std::chrono::milliseconds(1), outcome);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, kind, ": an outcome is handed out once");
}

void test_waiting_ends_in_time() {
  Faulty system;
  FileEngine engine(options("threads"), system);
  Outcome outcome;
  const int file = engine.open(folder + "/held", Access::create, 100, outcome);
  Bytes bytes(100);
  system.hold = true;
  const std::uint64_t ticket = engine.submit(file, true, bytes.data(), 100, 0);
  check(!engine.wait(ticket, std::chrono::milliseconds(5), outcome), "a wait ends when its time is over");
  check(!engine.over(ticket), "and the request is not");
  system.hold = false;
  check(result_of(engine, ticket).error == 0, "the ticket stays open");
}

void test_an_engine_may_end_with_requests_open(const std::string& kind) {
  HostRange range(4 << 20);
  for (int i = 0; i < 20; ++i) {
    FileEngine engine(options(kind));
    Outcome outcome;
    const int file = engine.open(folder + "/open", Access::create, range.size(), outcome);
    for (int j = 0; j < 4; ++j) engine.submit(file, j % 2 == 0, range.data(), range.size(), 0);
  }
  check(true, kind, ": ends");
}

void test_depth() {
  for (const std::size_t depth : {1, 2, 7}) {
    Faulty system;
    FileEngine engine(options("io_uring", 4096, depth), system);
    Outcome outcome;
    const int file = engine.open(folder + "/depth", Access::create, 4096 * 64, outcome);
    HostRange range(4096 * 64);
    check(result_of(engine, engine.submit(file, true, range.data(), range.size(), 0)).error == 0, "depth ", depth);
    check(system.most_on_their_way == static_cast<int>(depth), "depth ", depth, ": ", system.most_on_their_way);
  }
}

void test_a_broken_ring() {
  Faulty system;
  FileEngine engine(options("io_uring"), system);
  Outcome outcome;
  const int file = engine.open(folder + "/broken", Access::create, 65536, outcome);
  HostRange range(65536);
  check(result_of(engine, engine.submit(file, true, range.data(), 65536, 0)).error == 0, "the ring works");
  // The thread sleeps in the kernel: this request is the last that the ring carries out, or the first that it does not.
  system.enter_error = EBADF;
  result_of(engine, engine.submit(file, true, range.data(), 65536, 0));
  outcome = result_of(engine, engine.submit(file, true, range.data(), 65536, 0));
  check(outcome.error == EBADF && outcome.done == 0, "all that follows ends with the ring's error");
}

void test_choice() {
  for (const int error : {ENOSYS, EPERM, ENOMEM}) {
    Faulty system;
    system.setup_error = error;
    FileEngine engine(options("auto"), system);
    check(engine.kind() == "threads", "without io_uring the pool does the work");
    check(engine.reason().find(std::strerror(error)) != std::string::npos, "and says why: ", engine.reason());
    round_trip(engine, 10000, 0, 0, "pool in place of io_uring");
    bool refused = false;
    try {
      FileEngine by_name(options("io_uring"), system);
    } catch (const std::runtime_error& found) {
      refused = std::string(found.what()).find(std::strerror(error)) != std::string::npos;
    }
    check(refused, "io_uring by name is refused with the reason");
  }
  const EngineOptions senseless[] = {
      {"aio", 1, 4096, 1}, {"auto", 0, 4096, 1}, {"auto", 1, 4095, 1}, {"auto", 1, 0, 1}, {"auto", 1, 4096, 0}};
  for (const EngineOptions& o : senseless) {
    bool refused = false;
    try {
      FileEngine engine(o);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    check(refused, "options that make no sense are refused");
  }
}

// The definition in checksum.hpp, word by word.
std::uint64_t expected_checksum(const Bytes& bytes, std::uint64_t seed) {
  const auto mix = [](std::uint64_t x) {
    const auto times = [](std::uint64_t one, std::uint64_t other) {
      return static_cast<std::uint64_t>(static_cast<unsigned __int128>(one) * other);
    };
    x = times(x ^ (x / 1073741824u), 0xBF58476D1CE4E5B9u);
    x = times(x ^ (x / 134217728u), 0x94D049BB133111EBu);
    return x ^ (x / 2147483648u);
  };
  std::uint64_t sum = mix(bytes.size() ^ seed);
  for (std::size_t lane = 0; lane * 8 < bytes.size(); ++lane) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < 8 && lane * 8 + i < bytes.size(); ++i) {
      value += static_cast<std::uint64_t>(bytes[lane * 8 + i]) << (8 * i);
    }
    sum += mix(value ^ (seed + (lane + 1) * 0x9E3779B97F4A7C15u));
  }
  return sum;
}

void test_checksum() {
  for (std::size_t size = 0; size < 70; ++size) {
    for (const std::uint64_t seed : {0, 1, 77}) {
      Bytes bytes(size);
      for (std::size_t i = 0; i < size; ++i) bytes[i] = pattern(i * 31 + seed);
      const std::uint64_t sum = checksum(bytes.data(), size, seed);
      check(sum == expected_checksum(bytes, seed), "checksum of ", size, " bytes");
      check(sum != checksum(bytes.data(), size, seed + 1), "the seed counts");
      for (std::size_t i = 0; i < size; ++i) {
        for (const int bit : {0, 3, 7}) {
          bytes[i] ^= static_cast<unsigned char>(1 << bit);
          check(checksum(bytes.data(), size, seed) != sum, "a flipped bit of ", size, " bytes");
          bytes[i] ^= static_cast<unsigned char>(1 << bit);
        }
        check(checksum(bytes.data(), i, seed) != sum, "a cut end");
      }
      if (size >= 16 && !std::equal(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8)) {
        std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
        check(checksum(bytes.data(), size, seed) != sum, "lanes that change places");
      }
    }
  }
  check(checksum(Bytes(64).data(), 64, 0) != checksum(Bytes(72).data(), 72, 0), "zeros are counted");
}

}  // namespace

int main() {
  const char* const base = std::getenv("TMPDIR");
  std::string name = std::string(base == nullptr ? "/tmp" : base) + "/zeroexp_io_XXXXXX";
  if (mkdtemp(name.data()) == nullptr) {
    std::perror(name.c_str());
    return 1;
  }
  folder = name;
  std::vector<std::string> kinds = {"threads"};
  if (has_uring()) kinds.emplace_back("io_uring");
  for (const std::string& kind : kinds) {
    test_round_trips(kind);
    test_harmless_faults(kind);
    test_errors_are_reported_and_end_only_their_request(kind);
    test_again_for_ever_is_an_error(kind);
    test_end_of_file(kind);
    test_file_size_limit(kind);
    test_without_direct(kind);
    test_opening(kind);
    test_tickets(kind);
    test_an_engine_may_end_with_requests_open(kind);
    std::printf("%s: done\n", kind.c_str());
  }
  if (kinds.size() > 1) {
    test_depth();
    test_a_broken_ring();
  }
  test_waiting_ends_in_time();
  test_choice();
  test_checksum();
  for (const char* file : {"round", "error", "again", "short", "limit", "buffered", "late", "alloc", "tickets", "held",
                           "open", "depth", "broken"}) {
    unlink((folder + "/" + file).c_str());
  }
  check(rmdir(folder.c_str()) == 0, "no other files were made");
  std::printf("%d checks, %d failures\n", zeroexp::test::checks, zeroexp::test::failures);
  return zeroexp::test::failures == 0 ? 0 : 1;
}
