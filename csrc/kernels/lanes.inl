// The inner loop of the checksum (io/checksum.hpp).
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table.hpp"

namespace zeroexp {
namespace {

// The sum over lanes of 8 bytes of mixed(lane ^ key); each lane's key is kMixStep above the one before. The sum is
// modulo 2^64, so its order is free, and compilers make whole vectors of the plain loop (AVX-512 DQ has the product of
// 64 bits; AVX2 takes three of 32 bits for it). Cheaper mixing does not do: without the shift before the first product
// a flipped sign bit changes two bits of a lane's share, and two of them cancel out every other time.
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
    sum += mixed(lane ^ key);
  }
  return sum;
}

}  // namespace
}  // namespace zeroexp
