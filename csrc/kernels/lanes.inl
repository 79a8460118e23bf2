// The inner loop of the checksum (io/checksum.hpp).
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table.hpp"

namespace zeroexp {
namespace {

// The sum over lanes of 8 bytes of x ^ (x >> 32), where x is (lane ^ key) * kMixFirst; each lane's key is kMixStep
// above the one before. The sum is modulo 2^64, so its order is free, and compilers make whole vectors of the plain
// loop: one load, one product and five cheap operations each (AVX-512 DQ has the product; AVX2 takes three of 32 bits
// for it).
std::uint64_t mix_lanes(const void* data, std::size_t num_lanes, std::uint64_t key) {
  const unsigned char* const from = static_cast<const unsigned char*>(data);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < num_lanes; ++i) {
    std::uint64_t lane;
    std::memcpy(&lane, from + i * 8, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    lane = __builtin_bswap64(lane);
#endif
    key += kMixStep;
    const std::uint64_t x = (lane ^ key) * kMixFirst;
    sum += x ^ (x >> 32);
  }
  return sum;
}

}  // namespace
}  // namespace zeroexp
