// The kernels, written once. isa_*.cpp includes a Vec (vec_*.hpp), then this file, then returns make_table("name").
// Everything is in an unnamed namespace and nothing of the standard library that is not inlined for certain is used:
// a function compiled here for AVX must never be the one the linker keeps for all.
#include "adagrad.inl"
#include "adam.inl"
#include "edits.inl"
#include "lanes.inl"
#include "lion.inl"
#include "sgd.inl"
#include "squares.inl"
#include "sums.inl"
#include "table.hpp"

namespace zeroexp {
namespace {

template <Type G, Type C>
void fill_steps(KernelTable& t) {
  constexpr int grad = static_cast<int>(G);
  constexpr int copy = copy_index(C);
  t.adam[grad][copy][0] = adam<G, C, false>;
  t.adam[grad][copy][1] = adam<G, C, true>;
  t.sgd[grad][copy][0] = sgd<G, C, false>;
  t.sgd[grad][copy][1] = sgd<G, C, true>;
  t.adagrad[grad][copy] = adagrad<G, C>;
  t.lion[grad][copy] = lion<G, C>;
}

template <Type T>
void fill(KernelTable& t) {
  constexpr int index = static_cast<int>(T);
  if constexpr (T != Type::f64) {
    fill_steps<T, Type::none>(t);
    fill_steps<T, Type::f32>(t);
    fill_steps<T, Type::bf16>(t);
    fill_steps<T, Type::f16>(t);
    t.divide_into[index][0] = divide_into<T, false>;
    t.divide_into[index][1] = divide_into<T, true>;
    t.scale_cast[index][static_cast<int>(Type::f32)] = scale_cast<T, Type::f32>;
    t.scale_cast[index][static_cast<int>(Type::bf16)] = scale_cast<T, Type::bf16>;
    t.scale_cast[index][static_cast<int>(Type::f16)] = scale_cast<T, Type::f16>;
    t.adopt_edits[index] = adopt_edits<T>;
  }
  t.sum_squares[index] = sum_squares<T>;
  t.sum_into[index] = sum_into<T>;
}

KernelTable make_table(const char* name) {
  KernelTable t{};
  t.name = name;
  t.adam_traffic = adam_traffic;
  t.mix_lanes = mix_lanes;
  fill<Type::f32>(t);
  fill<Type::bf16>(t);
  fill<Type::f16>(t);
  fill<Type::f64>(t);
  return t;
}

}  // namespace
}  // namespace zeroexp
