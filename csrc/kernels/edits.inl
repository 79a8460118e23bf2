// Edits of narrow parameters on their way into the wider master copy.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "element.inl"

namespace zeroexp {
namespace {

constexpr std::size_t kEditBlock = 64;

// Word by word: compilers make whole vectors of this loop, and a library's memcmp would be a call for every block.
template <class Word, std::size_t kWords>
inline bool same_bits(const void* a, const void* b) {
  const unsigned char* const x = static_cast<const unsigned char*>(a);
  const unsigned char* const y = static_cast<const unsigned char*>(b);
  Word differ = 0;
  for (std::size_t j = 0; j < kWords; ++j) {
    Word one, other;
    std::memcpy(&one, x + j * sizeof(Word), sizeof(Word));
    std::memcpy(&other, y + j * sizeof(Word), sizeof(Word));
    differ = static_cast<Word>(differ | (one ^ other));
  }
  return differ == 0;
}

// One whole block. What is equal is only read: a store would dirty the cache line and double the traffic.
template <Type T>
inline bool adopt_block(float* master, const typename Element<T>::Raw* low) {
  using Raw = typename Element<T>::Raw;
  Raw rounded[kEditBlock];
  if constexpr (T == Type::f32) {
    if (same_bits<std::uint32_t, kEditBlock>(master, low)) return false;
    std::memcpy(rounded, master, sizeof rounded);
  } else {
    for (std::size_t j = 0; j < kEditBlock; j += Vec::kLanes) write<T>(Vec::load(master + j), rounded + j);
    if (same_bits<std::uint16_t, kEditBlock>(rounded, low)) return false;
  }
  float wide[kEditBlock];
  for (std::size_t j = 0; j < kEditBlock; j += Vec::kLanes) read<T>(low + j).store(wide + j);
  for (std::size_t j = 0; j < kEditBlock; ++j) {
    // Bits, not values: 0 and -0 differ, and a NaN is equal to itself.
    if (std::memcmp(rounded + j, low + j, sizeof(Raw)) != 0) std::memcpy(master + j, wide + j, sizeof(float));
  }
  return true;
}

// master = low where low is not the rounded master; whether there was any such element.
template <Type T>
bool adopt_edits(float* master, const void* low, std::size_t begin, std::size_t end) {
  using Raw = typename Element<T>::Raw;
  const Raw* const narrow = static_cast<const Raw*>(low);
  bool changed = false;
  std::size_t i = begin;
  for (; i + kEditBlock <= end; i += kEditBlock) changed = adopt_block<T>(master + i, narrow + i) || changed;
  if (i < end) {
    const std::size_t rest = end - i;
    float padded[kEditBlock] = {};
    Raw padded_low[kEditBlock] = {};
    std::memcpy(padded, master + i, rest * sizeof(float));
    std::memcpy(padded_low, narrow + i, rest * sizeof(Raw));
    if (adopt_block<T>(padded, padded_low)) {
      std::memcpy(master + i, padded, rest * sizeof(float));
      changed = true;
    }
  }
  return changed;
}

}  // namespace
}  // namespace zeroexp
