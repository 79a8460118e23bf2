// Elements of every type by the definition of their format: no bit tricks of the kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "counted.hpp"
#include "kernels/table.hpp"

namespace zeroexp::test {

// Any NaN is the same as any other; 0 and -0 differ.
template <class Real>
bool same(Real a, Real b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::memcmp(&a, &b, sizeof a) == 0;
}

inline const char* name_of(Type type) {
  const char* const names[] = {"fp32", "bf16", "fp16", "fp64", "none"};
  return names[static_cast<int>(type)];
}

// Significant bits, and the exponent of the smallest normal number.
struct Format {
  int digits, least, bits_of_exponent;
};
inline Format format_of(Type type) { return type == Type::bf16 ? Format{8, -126, 8} : Format{11, -14, 5}; }

// x rounded to the nearest number of the type, ties to even (nearbyint's default).
inline float rounded(float x, Type type) {
  if (type == Type::f32 || type == Type::none || x == 0 || !std::isfinite(x)) return x;
  const Format format = format_of(type);
  int exponent;
  std::frexp(static_cast<double>(x), &exponent);
  const int last = std::max(exponent - 1, format.least) - (format.digits - 1);
  const double r = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -last)), last);
  const double limit = std::ldexp(1.0, 2 - format.least);
  return std::fabs(r) >= limit ? std::copysign(std::numeric_limits<float>::infinity(), x) : static_cast<float>(r);
}

// The bits of a number of a 16-bit type, and back.
inline std::uint16_t encoded(float x, Type type) {
  const Format format = format_of(type);
  const int fraction = format.digits - 1, special = (1 << format.bits_of_exponent) - 1;
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<std::uint16_t>((special << fraction) | (1 << (fraction - 1)));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | (special << fraction));
  // Counted in units of the smallest subnormal number, an exponent is worth 2^fraction such units.
  int exponent;
  std::frexp(x, &exponent);
  const int biased = x == 0 ? 0 : std::max(exponent - 1 - format.least, 0);
  const double units = std::ldexp(std::fabs(static_cast<double>(x)), fraction - format.least - biased);
  return static_cast<std::uint16_t>(sign | (static_cast<int>(units) + (biased << fraction)));
}
inline float decoded(std::uint16_t bits, Type type) {
  const Format format = format_of(type);
  const int fraction = format.digits - 1, special = (1 << format.bits_of_exponent) - 1;
  const int exponent = (bits >> fraction) & special, low = bits & ((1 << fraction) - 1);
  double x;
  if (exponent == special) {
    x = low == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    x = std::ldexp(low, format.least - fraction);
  } else {
    x = std::ldexp(low + (1 << fraction), exponent - 1 + format.least - fraction);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -x : x);
}

// Elements of any type up to 32 bits in a heap block that ends with the last of them.
class Elements {
 public:
  Elements(Type type, std::size_t size) : type_(type) {
    if (type == Type::f32) wide_.resize(size);
    if (type == Type::bf16 || type == Type::f16) narrow_.resize(size);
  }
  Type type() const { return type_; }
  void* at(std::size_t i) {
    if (type_ == Type::none) return nullptr;
    return type_ == Type::f32 ? static_cast<void*>(wide_.data() + i) : narrow_.data() + i;
  }
  // x is a number of the type.
  void set(std::size_t i, float x) {
    if (type_ == Type::f32) wide_[i] = x;
    if (type_ == Type::bf16 || type_ == Type::f16) narrow_[i] = encoded(x, type_);
  }
  float get(std::size_t i) const { return type_ == Type::f32 ? wide_[i] : decoded(narrow_[i], type_); }

 private:
  Type type_;
  std::vector<float> wide_;
  std::vector<std::uint16_t> narrow_;
};

}  // namespace zeroexp::test
