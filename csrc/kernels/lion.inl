// Lion (Chen et al., arXiv:2302.06675, algorithm 2).
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stream.inl"

namespace zeroexp {
namespace {

struct LionRule {
  static constexpr std::size_t kArrays = 2;
  Vec decay, beta1, one_minus_beta1, beta2, one_minus_beta2, neg_lr;

  explicit LionRule(const LionArgs& a)
      : decay(Vec::all(a.decay)),
        beta1(Vec::all(a.beta1)),
        one_minus_beta1(Vec::all(a.one_minus_beta1)),
        beta2(Vec::all(a.beta2)),
        one_minus_beta2(Vec::all(a.one_minus_beta2)),
        neg_lr(Vec::all(a.neg_lr)) {}

  void operator()(Vec (&x)[kArrays], Vec g) const {
    Vec &p = x[0], &m = x[1];
    const Vec direction = Vec::sign(Vec::fma(one_minus_beta1, g, m * beta1));
    p = Vec::fma(neg_lr, direction, p * decay);
    m = Vec::fma(one_minus_beta2, g, m * beta2);
  }
};

template <Type G, Type C>
void lion(const LionArgs& a, std::size_t begin, std::size_t end) {
  float* const arrays[] = {a.param, a.exp_avg};
  stream<G, C>(LionRule(a), a, arrays, begin, end);
}

}  // namespace
}  // namespace zeroexp
