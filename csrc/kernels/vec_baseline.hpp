// Four lanes in plain C++: SSE2 on x86-64, NEON on AArch64, scalar code elsewhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace zeroexp {
namespace {

inline std::uint32_t bits_of(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
inline float float_of(std::uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

// a * b + c rounded once, without an FMA instruction. The product of two floats is exact in double; the sum is rounded
// to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), after which rounding to float
// gives the correctly rounded result. So machines without FMA compute the same bits as machines with it.
inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b;
  const double sum = product + c;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (c - back);
  std::int64_t bits;
  std::memcpy(&bits, &sum, 8);
  const std::int64_t inexact = (error > 0) | (error < 0);  // false for NaN, which inf and NaN sums give
  const std::int64_t direction = ((error > 0) == (sum > 0)) ? 1 : -1;
  bits += (inexact & ~bits & 1) * direction;
  double odd;
  std::memcpy(&odd, &bits, 8);
  return static_cast<float>(odd);
#endif
}

inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN (made quiet, as the hardware does)
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
  }
  if (magnitude < 0x0400u) {  // zero and subnormals: the value is magnitude * 2^-24, exact in float
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

inline std::uint16_t f32_to_f16(float x) {  // round to nearest, ties to even
  const std::uint32_t b = bits_of(x);
  const std::uint32_t sign = (b >> 16) & 0x8000u;
  const std::uint32_t magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above: inf
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 puts the last kept bit at 2^-24 and rounds there
    const std::uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return static_cast<std::uint16_t>(sign | rounded);
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline std::uint16_t f32_to_bf16(float x) {  // round to nearest, ties to even; NaN becomes 0x7fc0 as in torch
  const std::uint32_t b = bits_of(x);
  const std::uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

struct Vec {
  static constexpr std::size_t kLanes = 4;
  float lane[kLanes];

  template <class F>
  static Vec each(F f) {
    Vec r;
    for (std::size_t i = 0; i < kLanes; ++i) r.lane[i] = f(i);
    return r;
  }
  static Vec all(float x) {
    return each([&](std::size_t) { return x; });
  }
  static Vec load(const float* p) {
    return each([&](std::size_t i) { return p[i]; });
  }
  static Vec load_bf16(const std::uint16_t* p) {
    return each([&](std::size_t i) { return float_of(static_cast<std::uint32_t>(p[i]) << 16); });
  }
  static Vec load_f16(const std::uint16_t* p) {
    return each([&](std::size_t i) { return f16_to_f32(p[i]); });
  }
  void store(float* p) const {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = lane[i];
  }
  void store_bf16(std::uint16_t* p) const {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = f32_to_bf16(lane[i]);
  }
  void store_f16(std::uint16_t* p) const {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = f32_to_f16(lane[i]);
  }
  // The same value, but the compiler does not know: a benchmark's loads and stores stay.
  static Vec opaque(Vec a) {
    __asm__ volatile("" : "+m"(a.lane));
    return a;
  }
  friend Vec operator+(Vec a, Vec b) {
    return each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
  }
  friend Vec operator-(Vec a, Vec b) {
    return each([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
  }
  friend Vec operator*(Vec a, Vec b) {
    return each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
  }
  friend Vec operator/(Vec a, Vec b) {
    return each([&](std::size_t i) { return a.lane[i] / b.lane[i]; });
  }
  // -1, 0 or 1; NaN stays NaN.
  static Vec sign(Vec a) {
    return each([&](std::size_t i) {
      const float x = a.lane[i];
      return x != x ? x : static_cast<float>((x > 0) - (x < 0));
    });
  }
  static Vec sqrt(Vec a) {
    return each([&](std::size_t i) { return std::sqrt(a.lane[i]); });
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    return each([&](std::size_t i) { return fma1(a.lane[i], b.lane[i], c.lane[i]); });
  }
};

}  // namespace
}  // namespace zeroexp
