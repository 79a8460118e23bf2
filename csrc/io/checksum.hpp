// A 64-bit sum over memory that tells whether bytes changed on their way to a disk and back. It finds corruption; it is
// no protection against somebody who means to deceive.
//
// Every 8 bytes (little-endian; the last ones filled up with zeros) are mixed with their position by SplitMix64's
// steps, which can be undone, and the results are added modulo 2^64. So a change within one such lane always changes
// the sum, and any other change does but for one case in about 2^64; lanes that change places, a cut end and a stale
// block count as changes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dispatch.hpp"

namespace zeroexp::io {

// By the kernels of one instruction set, or of the fastest one; all give the same sum.
std::uint64_t checksum(const KernelTable& table, const void* data, std::size_t bytes, std::uint64_t seed);
std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed);

}  // namespace zeroexp::io
