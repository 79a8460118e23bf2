// Elements of every type, read and written as float lanes. Needs a Vec (vec_*.hpp) before it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table.hpp"

namespace zeroexp {
namespace {

// How an element of Type T lies in memory.
template <Type T>
struct Element {
  using Raw = std::uint16_t;
};
template <>
struct Element<Type::f32> {
  using Raw = float;
};

template <Type T>
inline Vec read(const typename Element<T>::Raw* p) {
  if constexpr (T == Type::f32) {
    return Vec::load(p);
  } else if constexpr (T == Type::bf16) {
    return Vec::load_bf16(p);
  } else {
    return Vec::load_f16(p);
  }
}

// Rounded to nearest, ties to even.
template <Type T>
inline void write(Vec x, typename Element<T>::Raw* p) {
  if constexpr (T == Type::f32) {
    x.store(p);
  } else if constexpr (T == Type::bf16) {
    x.store_bf16(p);
  } else {
    x.store_f16(p);
  }
}

}  // namespace
}  // namespace zeroexp
