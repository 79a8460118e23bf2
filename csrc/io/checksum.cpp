#include "io/checksum.hpp"

#include <cstring>

namespace zeroexp::io {

// Lanes are summed before the second multiplier, which all of them share: modulo 2^64 that is the same sum, for half
// the multiplications.
std::uint64_t checksum(const KernelTable& table, const void* data, std::size_t bytes, std::uint64_t seed) {
  const std::size_t lanes = bytes / 8, rest = bytes % 8;
  std::uint64_t first = (bytes ^ seed) * kMixFirst;
  std::uint64_t sum = (first ^ (first >> 32)) + table.mix_lanes(data, lanes, seed);
  if (rest > 0) {
    unsigned char last[8] = {};
    std::memcpy(last, static_cast<const unsigned char*>(data) + lanes * 8, rest);
    sum += table.mix_lanes(last, 1, seed + lanes * kMixStep);
  }
  sum *= kMixSecond;
  return sum ^ (sum >> 29);
}

std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed) {
  static const KernelTable& fastest = table_for("");
  return checksum(fastest, data, bytes, seed);
}

}  // namespace zeroexp::io
