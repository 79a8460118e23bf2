// One pass of an element-wise update rule over its arrays: the parameter, the state, the gradient, the copy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "element.inl"

namespace zeroexp {
namespace {

// A rule is called with one vector of each of its kArrays fp32 arrays, the parameter first, and of the scaled gradient;
// it leaves the new values in place of the old.
template <Type G, Type C, class Rule>
inline void stream_vector(const Rule& rule, Vec grad_scale, float* const* arrays, const typename Element<G>::Raw* grad,
                          typename Element<C>::Raw* copy) {
  Vec x[Rule::kArrays];
  for (std::size_t k = 0; k < Rule::kArrays; ++k) x[k] = Vec::load(arrays[k]);
  rule(x, read<G>(grad) * grad_scale);
  for (std::size_t k = 0; k < Rule::kArrays; ++k) x[k].store(arrays[k]);
  if constexpr (C != Type::none) write<C>(x[0], copy);
}

template <Type G, Type C, class Rule, class Args>
inline void stream(const Rule& rule, const Args& a, float* const (&arrays)[Rule::kArrays], std::size_t begin,
                   std::size_t end) {
  using Raw = typename Element<G>::Raw;
  using Copy = typename Element<C>::Raw;
  constexpr std::size_t kArrays = Rule::kArrays;
  constexpr std::size_t kStep = Vec::kLanes;
  const Raw* const grad = static_cast<const Raw*>(a.grad);
  Copy* const copy = static_cast<Copy*>(a.copy);
  const Vec grad_scale = Vec::all(a.grad_scale);
  std::size_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    float* at[kArrays];
    for (std::size_t k = 0; k < kArrays; ++k) at[k] = arrays[k] + i;
    stream_vector<G, C>(rule, grad_scale, at, grad + i, C == Type::none ? nullptr : copy + i);
  }
  if (i < end) {
    // The tail goes through the same vector operations in padded buffers: no result depends on where a range ends.
    const std::size_t rest = end - i;
    float padded[kArrays][kStep] = {};
    float* at[kArrays];
    Raw padded_grad[kStep] = {};
    Copy padded_copy[kStep];
    for (std::size_t k = 0; k < kArrays; ++k) {
      at[k] = padded[k];
      std::memcpy(padded[k], arrays[k] + i, rest * sizeof(float));
    }
    std::memcpy(padded_grad, grad + i, rest * sizeof(Raw));
    stream_vector<G, C>(rule, grad_scale, at, padded_grad, padded_copy);
    for (std::size_t k = 0; k < kArrays; ++k) std::memcpy(arrays[k] + i, padded[k], rest * sizeof(float));
    if constexpr (C != Type::none) std::memcpy(copy + i, padded_copy, rest * sizeof(Copy));
  }
}

}  // namespace
}  // namespace zeroexp
