#include "io/queue.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

namespace zeroexp::io {
namespace {

// A transfer that is refused with EAGAIN is tried this often before it counts as failed: about a second.
constexpr unsigned kMaxTries = 1000;
constexpr unsigned kTriesAtOnce = 16;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::uint64_t round_down(std::uint64_t value, std::uint64_t to) { return value / to * to; }

void stage(Slot& slot, std::size_t block_size) {
  slot.from = slot.data;
  if (!slot.direct) return;
  const File& file = *slot.request->file;
  if (reinterpret_cast<std::uintptr_t>(slot.data) % file.memory_alignment() == 0) return;
  try {
    if (slot.bounce == nullptr) slot.bounce = std::make_unique<HostRange>(block_size);
  } catch (const std::bad_alloc&) {
    slot.direct = false;  // the page cache asks for no alignment
    return;
  }
  slot.from = static_cast<char*>(slot.bounce->data());
  if (slot.request->write) std::memcpy(slot.from, slot.data, slot.bytes);
}

}  // namespace

std::uint64_t RequestQueue::submit(std::shared_ptr<File> file, bool write, char* data, std::uint64_t bytes,
                                   std::uint64_t offset) {
  auto request = std::make_shared<Request>();
  request->file = std::move(file);
  request->write = write;
  request->data = data;
  request->bytes = bytes;
  request->offset = offset;
  request->outcome.wanted = bytes;
  std::uint64_t ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket = ++last_ticket_;
    open_.emplace(ticket, request);
    if (stop_error_ != 0) {
      request->outcome.error = stop_error_;
      request->outcome.offset = offset;
      request->cut = bytes;
    }
    if (request->cut == bytes) {
      request->outcome.ended = now();
      request->over = true;
    } else {
      waiting_.push_back(std::move(request));
    }
  }
  work_.notify_all();
  if (wake_) wake_();
  return ticket;
}

bool RequestQueue::over(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = open_.find(ticket);
  if (found == open_.end()) throw std::invalid_argument("there is no open request " + std::to_string(ticket));
  return found->second->over;
}

bool RequestQueue::wait(std::uint64_t ticket, std::chrono::milliseconds at_most, Outcome& outcome) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = open_.find(ticket);
  if (found == open_.end()) throw std::invalid_argument("there is no open request " + std::to_string(ticket));
  const std::shared_ptr<Request> request = found->second;
  if (!ended_.wait_for(lock, at_most, [&] { return request->over; })) return false;
  outcome = request->outcome;
  open_.erase(ticket);
  return true;
}

bool RequestQueue::cut(Slot& slot) {
  if (waiting_.empty()) return false;
  const std::shared_ptr<Request> request = waiting_.front();
  const std::uint64_t at = request->offset + request->cut;
  const std::uint64_t left = request->bytes - request->cut;
  const std::size_t alignment = request->file->alignment();
  std::uint64_t bytes = std::min<std::uint64_t>(left, block_size_);
  slot.direct = false;
  if (request->file->direct()) {
    if (at % alignment != 0) {
      bytes = std::min<std::uint64_t>(bytes, alignment - at % alignment);
    } else if (bytes >= alignment) {
      bytes = round_down(bytes, alignment);
      slot.direct = true;
    }
  }
  slot.request = request;
  slot.data = request->data + request->cut;
  slot.bytes = static_cast<std::size_t>(bytes);
  slot.offset = at;
  slot.done = 0;
  slot.tries = 0;
  slot.error = 0;
  request->cut += bytes;
  ++request->pieces_out;
  if (request->cut == request->bytes) waiting_.pop_front();
  return true;
}

bool RequestQueue::try_take(Slot& slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!cut(slot)) return false;
  }
  stage(slot, block_size_);
  return true;
}

bool RequestQueue::take(Slot& slot) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait(lock, [this] { return !waiting_.empty() || stop_error_ != 0; });
    if (!cut(slot)) return false;
  }
  stage(slot, block_size_);
  return true;
}

bool RequestQueue::stopped() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stop_error_ != 0;
}

Transfer RequestQueue::next_transfer(const Slot& slot) {
  const File& file = *slot.request->file;
  // After a transfer that stopped between two blocks, the rest of the piece goes through the page cache.
  const bool direct = slot.direct && slot.done % file.alignment() == 0;
  return {file.descriptor(direct), slot.request->write,    direct,
          slot.from + slot.done,   slot.bytes - slot.done, slot.offset + slot.done};
}

bool RequestQueue::advance(Slot& slot, std::int64_t result) {
  if (result > 0) {
    slot.done += static_cast<std::size_t>(result);
    slot.tries = 0;
    return slot.done == slot.bytes;
  }
  if (result == 0) {
    slot.error = slot.request->write ? EIO : kEndOfFile;
    return true;
  }
  const int error = static_cast<int>(-result);
  if (error == EINTR) return false;
  if (error == EAGAIN) {
    if (++slot.tries <= kTriesAtOnce) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (slot.tries < kMaxTries) return false;
  } else if ((error == EINVAL || error == EOPNOTSUPP) && next_transfer(slot).direct) {
    slot.request->file->give_up_direct(error);
    slot.direct = false;
    return false;
  }
  slot.error = error;
  return true;
}

void RequestQueue::finish(Slot& slot) {
  if (!slot.request->write && slot.from != slot.data) std::memcpy(slot.data, slot.from, slot.done);
  const std::int64_t free = slot.error != 0 ? slot.request->file->free_bytes() : -1;
  // The request may be the last owner of its file, which is closed without the lock.
  const std::shared_ptr<Request> request = std::move(slot.request);
  const std::lock_guard<std::mutex> lock(mutex_);
  Outcome& outcome = request->outcome;
  outcome.done += slot.done;
  --request->pieces_out;
  if (slot.error != 0 && outcome.error == 0) {
    outcome.error = slot.error;
    outcome.offset = slot.offset + slot.done;
    outcome.free = free;
    if (request->cut < request->bytes) {
      request->cut = request->bytes;
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), request));
    }
  }
  settle(request);
}

void RequestQueue::settle(const std::shared_ptr<Request>& request) {
  if (request->cut < request->bytes || request->pieces_out != 0) return;
  request->outcome.ended = now();
  request->over = true;
  ended_.notify_all();
}

void RequestQueue::stop(int error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_error_ = error;
    for (const std::shared_ptr<Request>& request : waiting_) {
      if (request->outcome.error == 0) {
        request->outcome.error = error;
        request->outcome.offset = request->offset + request->cut;
      }
      request->cut = request->bytes;
      settle(request);
    }
    waiting_.clear();
  }
  work_.notify_all();
  if (wake_) wake_();
}

}  // namespace zeroexp::io
