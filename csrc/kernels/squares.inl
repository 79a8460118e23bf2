// The sum of squares of one array, alone or of what a cast writes.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "element.inl"

namespace zeroexp {
namespace {

// Sum of squares in fp64. Lane j takes elements j, j + 16, ...; lanes are added pairwise. The square of a float is
// exact in double, so fused and separate multiply-add agree and every instruction set gives the same bits.
struct Squares {
  static constexpr std::size_t kWide = 16;
  double lane[kWide] = {};

  template <class Real>
  void add(const Real* x, std::size_t count = kWide) {
    for (std::size_t j = 0; j < count; ++j) lane[j] += static_cast<double>(x[j]) * x[j];
  }
  double total() {
    for (std::size_t half = kWide / 2; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    return lane[0];
  }
};

template <Type T>
double sum_squares(const void* data, std::size_t begin, std::size_t end) {
  constexpr std::size_t kWide = Squares::kWide;
  Squares squares;
  std::size_t i = begin;
  if constexpr (T == Type::f64) {
    const double* const x = static_cast<const double*>(data);
    for (; i + kWide <= end; i += kWide) squares.add(x + i);
    squares.add(x + i, end - i);
  } else {
    using Raw = typename Element<T>::Raw;
    const Raw* const x = static_cast<const Raw*>(data);
    float wide[kWide];
    const auto add = [&](const Raw* from) {
      for (std::size_t j = 0; j < kWide; j += Vec::kLanes) read<T>(from + j).store(wide + j);
      squares.add(wide);
    };
    for (; i + kWide <= end; i += kWide) add(x + i);
    if (i < end) {
      Raw padded[kWide] = {};
      std::memcpy(padded, x + i, (end - i) * sizeof(Raw));
      add(padded);
    }
  }
  return squares.total();
}

// out = part * scale, and the sum of squares of what out then holds. out may be the part: 16 elements are read before
// they are written.
template <Type P, Type O>
double scale_cast(void* out, const void* part, float scale, std::size_t begin, std::size_t end) {
  using From = typename Element<P>::Raw;
  using To = typename Element<O>::Raw;
  constexpr std::size_t kWide = Squares::kWide;
  const From* const from = static_cast<const From*>(part);
  To* const to = static_cast<To*>(out);
  const Vec by = Vec::all(scale);
  Squares squares;
  float wide[kWide];
  To cast[kWide];
  const auto convert = [&](const From* x) {
    for (std::size_t j = 0; j < kWide; j += Vec::kLanes) {
      write<O>(read<P>(x + j) * by, cast + j);
      read<O>(cast + j).store(wide + j);
    }
  };
  std::size_t i = begin;
  for (; i + kWide <= end; i += kWide) {
    convert(from + i);
    std::memcpy(to + i, cast, sizeof cast);
    squares.add(wide);
  }
  if (i < end) {
    const std::size_t rest = end - i;
    From padded[kWide] = {};
    std::memcpy(padded, from + i, rest * sizeof(From));
    convert(padded);
    std::memcpy(to + i, cast, rest * sizeof(To));
    squares.add(wide, rest);  // no more: a scale that is not finite makes NaN of the zeros behind the end
  }
  return squares.total();
}

}  // namespace
}  // namespace zeroexp
