// Stochastic gradient descent, plain or with momentum.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stream.inl"

namespace zeroexp {
namespace {

// The operations and their order are those of torch's for-loop SGD on a machine with FMA: equal to the last bit.
template <bool kMomentum>
struct SgdRule {
  static constexpr std::size_t kArrays = kMomentum ? 2 : 1;
  Vec l2, momentum, one_minus_dampening, neg_lr;
  bool decays, first, nesterov;  // the same for all elements: branches that are always predicted

  explicit SgdRule(const SgdArgs& a)
      : l2(Vec::all(a.l2)),
        momentum(Vec::all(a.momentum)),
        one_minus_dampening(Vec::all(a.one_minus_dampening)),
        neg_lr(Vec::all(a.neg_lr)),
        decays(a.l2 != 0),
        first(a.first),
        nesterov(a.nesterov) {}

  void operator()(Vec (&x)[kArrays], Vec g) const {
    Vec& p = x[0];
    if (decays) g = Vec::fma(p, l2, g);  // not with 0: an infinite parameter would give NaN
    if constexpr (kMomentum) {
      Vec& buffer = x[1];
      buffer = first ? g : Vec::fma(one_minus_dampening, g, buffer * momentum);
      g = nesterov ? Vec::fma(momentum, buffer, g) : buffer;
    }
    p = Vec::fma(neg_lr, g, p);
  }
};

template <Type G, Type C, bool kMomentum>
void sgd(const SgdArgs& a, std::size_t begin, std::size_t end) {
  if constexpr (kMomentum) {
    float* const arrays[] = {a.param, a.momentum_buffer};
    stream<G, C>(SgdRule<true>(a), a, arrays, begin, end);
  } else {
    float* const arrays[] = {a.param};
    stream<G, C>(SgdRule<false>(a), a, arrays, begin, end);
  }
}

}  // namespace
}  // namespace zeroexp
