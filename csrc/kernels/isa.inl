// The kernels, written once. isa_*.cpp includes a Vec (vec_*.hpp), then this file, then returns make_table("name").
// Everything is in an unnamed namespace and nothing of the standard library that is not inlined for certain is used:
// a function compiled here for AVX must never be the one the linker keeps for all.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table.hpp"

namespace zeroexp {
namespace {

// How an element of Type T lies in memory and is read as float lanes.
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

// The scalars of a step, spread over the lanes.
struct AdamLanes {
  Vec grad_scale, decay, l2, weight, beta2, one_minus_beta2, bias2_sqrt, eps, neg_step_size;
  bool from_grad;  // which end the first moment is interpolated from

  // torch.lerp counts from the nearer end: m + w (g - m) for w < 1/2, else g + (w - 1) (g - m).
  explicit AdamLanes(const AdamArgs& a)
      : grad_scale(Vec::all(a.grad_scale)),
        decay(Vec::all(a.decay)),
        l2(Vec::all(a.l2)),
        weight(Vec::all(a.one_minus_beta1 < 0.5f ? a.one_minus_beta1 : a.one_minus_beta1 - 1.0f)),
        beta2(Vec::all(a.beta2)),
        one_minus_beta2(Vec::all(a.one_minus_beta2)),
        bias2_sqrt(Vec::all(a.bias2_sqrt)),
        eps(Vec::all(a.eps)),
        neg_step_size(Vec::all(a.neg_step_size)),
        from_grad(!(a.one_minus_beta1 < 0.5f)) {}
};

// One vector of elements. The operations and their order are those of torch's foreach and for-loop AdamW on a machine
// with FMA: the moments are equal to the last bit; the parameter too, but for torch's square root, which rounds less
// well (MKL's).
template <Type G, Type C, bool kL2>
inline void adam_vector(const AdamLanes& s, float* param, float* exp_avg, float* exp_avg_sq,
                        const typename Element<G>::Raw* grad, std::uint16_t* copy) {
  Vec p = Vec::load(param);
  Vec g = read<G>(grad) * s.grad_scale;
  if constexpr (kL2) g = Vec::fma(p, s.l2, g);
  p = p * s.decay;
  Vec m = Vec::load(exp_avg);
  m = Vec::fma(s.weight, g - m, s.from_grad ? g : m);
  const Vec v = Vec::fma(s.one_minus_beta2 * g, g, Vec::load(exp_avg_sq) * s.beta2);
  p = p + (s.neg_step_size * m) / (Vec::sqrt(v) / s.bias2_sqrt + s.eps);
  m.store(exp_avg);
  v.store(exp_avg_sq);
  p.store(param);
  if constexpr (C == Type::bf16) p.store_bf16(copy);
  if constexpr (C == Type::f16) p.store_f16(copy);
}

template <Type G, Type C, bool kL2>
void adam(const AdamArgs& a, std::size_t begin, std::size_t end) {
  using Raw = typename Element<G>::Raw;
  const AdamLanes lanes(a);
  const Raw* const grad = static_cast<const Raw*>(a.grad);
  constexpr std::size_t kStep = Vec::kLanes;
  std::size_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    std::uint16_t* const copy = C == Type::none ? nullptr : a.copy + i;
    adam_vector<G, C, kL2>(lanes, a.param + i, a.exp_avg + i, a.exp_avg_sq + i, grad + i, copy);
  }
  if (i < end) {
    // The tail goes through the same vector operations in padded buffers: no result depends on where a range ends.
    float param[kStep] = {}, exp_avg[kStep] = {}, exp_avg_sq[kStep] = {};
    Raw padded_grad[kStep] = {};
    std::uint16_t copy[kStep];
    const std::size_t rest = end - i;
    std::memcpy(param, a.param + i, rest * sizeof(float));
    std::memcpy(exp_avg, a.exp_avg + i, rest * sizeof(float));
    std::memcpy(exp_avg_sq, a.exp_avg_sq + i, rest * sizeof(float));
    std::memcpy(padded_grad, grad + i, rest * sizeof(Raw));
    adam_vector<G, C, kL2>(lanes, param, exp_avg, exp_avg_sq, padded_grad, copy);
    std::memcpy(a.param + i, param, rest * sizeof(float));
    std::memcpy(a.exp_avg + i, exp_avg, rest * sizeof(float));
    std::memcpy(a.exp_avg_sq + i, exp_avg_sq, rest * sizeof(float));
    if constexpr (C != Type::none) std::memcpy(a.copy + i, copy, rest * sizeof(std::uint16_t));
  }
}

// Reads four arrays and writes three, as Adam does, without changing a value. The range is cut to whole vectors: this
// is a yardstick, not an op.
void adam_traffic(const AdamArgs& a, std::size_t begin, std::size_t end) {
  const float* const grad = static_cast<const float*>(a.grad);
  for (std::size_t i = begin; i + Vec::kLanes <= end; i += Vec::kLanes) {
    const Vec p = Vec::opaque(Vec::load(a.param + i));
    const Vec m = Vec::opaque(Vec::load(a.exp_avg + i));
    const Vec v = Vec::opaque(Vec::load(a.exp_avg_sq + i));
    Vec::opaque(Vec::load(grad + i));
    m.store(a.exp_avg + i);
    v.store(a.exp_avg_sq + i);
    p.store(a.param + i);
  }
}

// Sum of squares in fp64. Lane j takes elements j, j + 16, ...; lanes are added pairwise. The square of a float is
// exact in double, so fused and separate multiply-add agree and every instruction set gives the same bits.
template <Type T>
double sum_squares(const void* data, std::size_t begin, std::size_t end) {
  constexpr std::size_t kWide = 16;
  double lane[kWide] = {};
  std::size_t i = begin;
  if constexpr (T == Type::f64) {
    const double* const x = static_cast<const double*>(data);
    for (; i + kWide <= end; i += kWide) {
      for (std::size_t j = 0; j < kWide; ++j) lane[j] += x[i + j] * x[i + j];
    }
    for (std::size_t j = 0; i + j < end; ++j) lane[j] += x[i + j] * x[i + j];
  } else {
    using Raw = typename Element<T>::Raw;
    const Raw* const x = static_cast<const Raw*>(data);
    float wide[kWide];
    const auto add = [&](const Raw* from) {
      for (std::size_t j = 0; j < kWide; j += Vec::kLanes) read<T>(from + j).store(wide + j);
      for (std::size_t j = 0; j < kWide; ++j) lane[j] += static_cast<double>(wide[j]) * wide[j];
    };
    for (; i + kWide <= end; i += kWide) add(x + i);
    if (i < end) {
      Raw padded[kWide] = {};
      std::memcpy(padded, x + i, (end - i) * sizeof(Raw));
      add(padded);
    }
  }
  for (std::size_t half = kWide / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

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

template <Type G>
void fill_adam(KernelTable& t) {
  AdamFn(&row)[kNumCopyTypes][2] = t.adam[static_cast<int>(G)];
  row[0][0] = adam<G, Type::none, false>;
  row[0][1] = adam<G, Type::none, true>;
  row[1][0] = adam<G, Type::bf16, false>;
  row[1][1] = adam<G, Type::bf16, true>;
  row[2][0] = adam<G, Type::f16, false>;
  row[2][1] = adam<G, Type::f16, true>;
}

KernelTable make_table(const char* name) {
  KernelTable t{};
  t.name = name;
  fill_adam<Type::f32>(t);
  fill_adam<Type::bf16>(t);
  fill_adam<Type::f16>(t);
  t.adam_traffic = adam_traffic;
  t.sum_squares[0] = sum_squares<Type::f32>;
  t.sum_squares[1] = sum_squares<Type::bf16>;
  t.sum_squares[2] = sum_squares<Type::f16>;
  t.sum_squares[3] = sum_squares<Type::f64>;
  t.sum_into[0] = sum_into<Type::f32>;
  t.sum_into[1] = sum_into<Type::bf16>;
  t.sum_into[2] = sum_into<Type::f16>;
  t.sum_into[3] = sum_into<Type::f64>;
  return t;
}

}  // namespace
}  // namespace zeroexp
