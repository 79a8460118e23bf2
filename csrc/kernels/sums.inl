// Sums element by element: of several arrays, and of a quotient into an array.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "element.inl"

namespace zeroexp {
namespace {

// out = ((parts[0] + parts[1]) + parts[2]) + ..., a block at a time so that out stays in the cache between parts.
// out may be one of the parts: a block of every part is read before the block of out is written.
template <Type T>
void sum_into(void* out, const void* const* parts, std::size_t num_parts, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBlock = 64;
  if constexpr (T == Type::f64) {
    for (std::size_t i = begin; i < end; i += kBlock) {
      const std::size_t count = end - i < kBlock ? end - i : kBlock;
      double sum[kBlock];
      std::memcpy(sum, static_cast<const double*>(parts[0]) + i, count * sizeof(double));
      for (std::size_t k = 1; k < num_parts; ++k) {
        const double* const part = static_cast<const double*>(parts[k]) + i;
        for (std::size_t j = 0; j < count; ++j) sum[j] += part[j];
      }
      std::memcpy(static_cast<double*>(out) + i, sum, count * sizeof(double));
    }
  } else {
    using Raw = typename Element<T>::Raw;
    float* const target = static_cast<float*>(out);
    std::size_t i = begin;
    constexpr std::size_t kStep = Vec::kLanes;
    for (; i + kStep <= end; i += kStep) {
      Vec sum = read<T>(static_cast<const Raw*>(parts[0]) + i);
      for (std::size_t k = 1; k < num_parts; ++k) sum = sum + read<T>(static_cast<const Raw*>(parts[k]) + i);
      sum.store(target + i);
    }
    if (i < end) {
      const std::size_t rest = end - i;
      Raw padded[kStep] = {};
      std::memcpy(padded, static_cast<const Raw*>(parts[0]) + i, rest * sizeof(Raw));
      Vec sum = read<T>(padded);
      for (std::size_t k = 1; k < num_parts; ++k) {
        std::memcpy(padded, static_cast<const Raw*>(parts[k]) + i, rest * sizeof(Raw));
        sum = sum + read<T>(padded);
      }
      float whole[kStep];
      sum.store(whole);
      std::memcpy(target + i, whole, rest * sizeof(float));
    }
  }
}

// out = part / divisor, or out + part / divisor, each operation rounded as torch's.
template <Type T, bool kAdd>
void divide_into(float* out, const void* part, float divisor, std::size_t begin, std::size_t end) {
  using Raw = typename Element<T>::Raw;
  const Raw* const from = static_cast<const Raw*>(part);
  const Vec by = Vec::all(divisor);
  constexpr std::size_t kStep = Vec::kLanes;
  std::size_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    Vec x = read<T>(from + i) / by;
    if constexpr (kAdd) x = Vec::load(out + i) + x;
    x.store(out + i);
  }
  if (i < end) {
    const std::size_t rest = end - i;
    Raw padded[kStep] = {};
    float whole[kStep] = {};
    std::memcpy(padded, from + i, rest * sizeof(Raw));
    std::memcpy(whole, out + i, rest * sizeof(float));
    Vec x = read<T>(padded) / by;
    if constexpr (kAdd) x = Vec::load(whole) + x;
    x.store(whole);
    std::memcpy(out + i, whole, rest * sizeof(float));
  }
}

}  // namespace
}  // namespace zeroexp
