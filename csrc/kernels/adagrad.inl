// Adagrad.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stream.inl"

namespace zeroexp {
namespace {

// The operations and their order are those of torch's for-loop Adagrad on a machine with FMA: the sum is equal to the
// last bit; the parameter too, but for torch's square root.
struct AdagradRule {
  static constexpr std::size_t kArrays = 2;
  Vec l2, eps, neg_step_size;
  bool decays;

  explicit AdagradRule(const AdagradArgs& a)
      : l2(Vec::all(a.l2)), eps(Vec::all(a.eps)), neg_step_size(Vec::all(a.neg_step_size)), decays(a.l2 != 0) {}

  void operator()(Vec (&x)[kArrays], Vec g) const {
    Vec &p = x[0], &sum = x[1];
    if (decays) g = Vec::fma(p, l2, g);  // not with 0: an infinite parameter would give NaN
    sum = Vec::fma(g, g, sum);
    p = p + (neg_step_size * g) / (Vec::sqrt(sum) + eps);
  }
};

template <Type G, Type C>
void adagrad(const AdagradArgs& a, std::size_t begin, std::size_t end) {
  float* const arrays[] = {a.param, a.sum};
  stream<G, C>(AdagradRule(a), a, arrays, begin, end);
}

}  // namespace
}  // namespace zeroexp
