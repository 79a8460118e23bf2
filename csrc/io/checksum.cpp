#include "io/checksum.hpp"

#include <cstring>

namespace zeroexp::io {

std::uint64_t checksum(const KernelTable& table, const void* data, std::size_t bytes, std::uint64_t seed) {
  const std::size_t lanes = bytes / 8, rest = bytes % 8;
  std::uint64_t sum = mixed(bytes ^ seed) + table.mix_lanes(data, lanes, seed);
  if (rest > 0) {
    unsigned char last[8] = {};
    std::memcpy(last, static_cast<const unsigned char*>(data) + lanes * 8, rest);
    sum += table.mix_lanes(last, 1, seed + lanes * kMixStep);
  }
  return sum;
}

std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed) {
  static const KernelTable& fastest = table_for("");
  return checksum(fastest, data, bytes, seed);
}

}  // namespace zeroexp::io
