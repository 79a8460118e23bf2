// The kernels, written once. isa_*.cpp includes a Vec (vec_*.hpp), then this file, then returns make_table("name").
// Everything is in an unnamed namespace and nothing of the standard library that is not inlined for certain is used:
// a function compiled here for AVX must never be the one the linker keeps for all.
#include "adagrad.inl"
#include "adam.inl"
#include "lion.inl"
#include "sgd.inl"
#include "sums.inl"
#include "table.hpp"

namespace zeroexp {
namespace {

template <Type G, Type C>
void fill_steps(KernelTable& t) {
  constexpr int grad = static_cast<int>(G);
  constexpr int copy = C == Type::none ? 0 : static_cast<int>(C);
  t.adam[grad][copy][0] = adam<G, C, false>;
  t.adam[grad][copy][1] = adam<G, C, true>;
  t.sgd[grad][copy][0] = sgd<G, C, false>;
  t.sgd[grad][copy][1] = sgd<G, C, true>;
  t.adagrad[grad][copy] = adagrad<G, C>;
  t.lion[grad][copy] = lion<G, C>;
}

template <Type T>
void fill(KernelTable& t) {
  if constexpr (T != Type::f64) {
    fill_steps<T, Type::none>(t);
    fill_steps<T, Type::bf16>(t);
    fill_steps<T, Type::f16>(t);
    t.divide_into[static_cast<int>(T)][0] = divide_into<T, false>;
    t.divide_into[static_cast<int>(T)][1] = divide_into<T, true>;
  }
  t.sum_squares[static_cast<int>(T)] = sum_squares<T>;
  t.sum_into[static_cast<int>(T)] = sum_into<T>;
}

KernelTable make_table(const char* name) {
  KernelTable t{};
  t.name = name;
  t.adam_traffic = adam_traffic;
  fill<Type::f32>(t);
  fill<Type::bf16>(t);
  fill<Type::f16>(t);
  fill<Type::f64>(t);
  return t;
}

}  // namespace
}  // namespace zeroexp
