// Adam and AdamW.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stream.inl"

namespace zeroexp {
namespace {

// The operations and their order are those of torch's foreach and for-loop AdamW on a machine with FMA: the moments are
// equal to the last bit; the parameter too, but for torch's square root, which rounds less well (MKL's).
template <bool kL2>
struct AdamRule {
  static constexpr std::size_t kArrays = 3;
  Vec decay, l2, weight, beta2, one_minus_beta2, bias2_sqrt, eps, neg_step_size;
  bool from_grad;  // which end the first moment is interpolated from

  // torch.lerp counts from the nearer end: m + w (g - m) for w < 1/2, else g + (w - 1) (g - m).
  explicit AdamRule(const AdamArgs& a)
      : decay(Vec::all(a.decay)),
        l2(Vec::all(a.l2)),
        weight(Vec::all(a.one_minus_beta1 < 0.5f ? a.one_minus_beta1 : a.one_minus_beta1 - 1.0f)),
        beta2(Vec::all(a.beta2)),
        one_minus_beta2(Vec::all(a.one_minus_beta2)),
        bias2_sqrt(Vec::all(a.bias2_sqrt)),
        eps(Vec::all(a.eps)),
        neg_step_size(Vec::all(a.neg_step_size)),
        from_grad(!(a.one_minus_beta1 < 0.5f)) {}

  void operator()(Vec (&x)[kArrays], Vec g) const {
    Vec &p = x[0], &m = x[1], &v = x[2];
    if constexpr (kL2) g = Vec::fma(p, l2, g);
    p = p * decay;
    m = Vec::fma(weight, g - m, from_grad ? g : m);
    v = Vec::fma(one_minus_beta2 * g, g, v * beta2);
    p = p + (neg_step_size * m) / (Vec::sqrt(v) / bias2_sqrt + eps);
  }
};

template <Type G, Type C, bool kL2>
void adam(const AdamArgs& a, std::size_t begin, std::size_t end) {
  float* const arrays[] = {a.param, a.exp_avg, a.exp_avg_sq};
  stream<G, C>(AdamRule<kL2>(a), a, arrays, begin, end);
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

}  // namespace
}  // namespace zeroexp
