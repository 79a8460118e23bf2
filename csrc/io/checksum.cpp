#include "io/checksum.hpp"

#include <cstring>

namespace zeroexp::io {
namespace {

// The golden ratio's increment and the multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kFirst = 0xBF58476D1CE4E5B9u;
constexpr std::uint64_t kSecond = 0x94D049BB133111EBu;

std::uint64_t mixed(std::uint64_t lane, std::uint64_t key) {
  std::uint64_t x = (lane ^ key) * kFirst;
  x ^= x >> 32;
  return x * kSecond;
}

std::uint64_t lane_at(const unsigned char* bytes) {
  std::uint64_t lane;
  std::memcpy(&lane, bytes, sizeof lane);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  lane = __builtin_bswap64(lane);
#endif
  return lane;
}

}  // namespace

std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed) {
  const unsigned char* const from = static_cast<const unsigned char*>(data);
  std::uint64_t sum = mixed(bytes, seed);
  std::uint64_t key = seed;
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    key += kStep;
    sum += mixed(lane_at(from + at), key);
  }
  if (at < bytes) {
    unsigned char last[8] = {};
    std::memcpy(last, from + at, bytes - at);
    sum += mixed(lane_at(last), key + kStep);
  }
  return sum ^ (sum >> 29);
}

}  // namespace zeroexp::io
