// The kernels of every instruction set this machine has, against scalar formulas that use libm's correctly rounded
// fmaf. Arrays are heap blocks that end where the kernel must, so that the address sanitizer sees a read or write past
// it; they start at every alignment, behind elements that must keep their values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "dispatch.hpp"
#include "host_range.hpp"
#include "passes_test.hpp"

namespace {

using namespace zeroexp;
using namespace zeroexp::test;

struct State {
  std::vector<float> param, exp_avg, exp_avg_sq, grad;
};

State make_state(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State s;
  const float specials[] = {0.0f,
                            -0.0f,
                            std::numeric_limits<float>::denorm_min(),
                            1e-40f,
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::max(),
                            -std::numeric_limits<float>::min()};
  for (std::size_t i = 0; i < size; ++i) {
    s.param.push_back(normal(random));
    s.exp_avg.push_back(normal(random) * 1e-3f);
    s.exp_avg_sq.push_back(std::fabs(normal(random)) * 1e-6f);
    s.grad.push_back(normal(random) * 1e-3f);
    if (i % 7 == 3) s.grad.back() = specials[i / 7 % 8];
    if (i % 11 == 5) s.param.back() = specials[i / 11 % 8];
    if (i % 13 == 6) s.exp_avg_sq.back() = std::fabs(specials[i / 13 % 4]);
  }
  return s;
}

AdamArgs scalars(float one_minus_beta1) {
  AdamArgs a{};
  a.grad_scale = 0.37f;
  a.decay = 0.9999f;
  a.l2 = 0.01f;
  a.one_minus_beta1 = one_minus_beta1;
  a.beta2 = 0.95f;
  a.one_minus_beta2 = 0.05f;
  a.bias2_sqrt = 0.38f;
  a.eps = 1e-8f;
  a.neg_step_size = -2e-3f;
  return a;
}

// torch's order of operations, one element.
void expected_step(const AdamArgs& a, bool l2, float raw, float& p, float& m, float& v) {
  float g = raw * a.grad_scale;
  if (l2) g = std::fma(p, a.l2, g);
  p *= a.decay;
  const float d = g - m;
  m = a.one_minus_beta1 < 0.5f ? std::fma(a.one_minus_beta1, d, m) : std::fma(a.one_minus_beta1 - 1.0f, d, g);
  v = std::fma(a.one_minus_beta2 * g, g, v * a.beta2);
  const float numerator = a.neg_step_size * m;
  const float root = std::sqrt(v) / a.bias2_sqrt;
  p += numerator / (root + a.eps);
}

// What a kernel is called with: arrays of `size` elements behind the leading ones.
struct Call {
  State* state;
  std::size_t lead, size;
  const void* grad;
  Type grad_type;
  void* copy;
  Type copy_type;
};

// One step over arrays of many sizes, starts and types: `run` steps them with the kernel, `expect` one element by the
// formula.
template <class Run, class Expect>
void test_step_of(const std::string& name, std::size_t size, Type grad_type, Type copy_type, Run run, Expect expect) {
  const std::string what =
      name + " size " + std::to_string(size) + " grad " + name_of(grad_type) + " copy " + name_of(copy_type);
  const std::size_t lead = size % 4, copy_lead = (size + 1) % 3, all = size + lead;
  State s = make_state(all, static_cast<unsigned>(size));
  Elements grad(grad_type, all), copy(copy_type, size + copy_lead);
  for (std::size_t i = 0; i < all; ++i) {
    s.grad[i] = rounded(s.grad[i], grad_type);
    grad.set(i, s.grad[i]);
  }
  for (std::size_t i = 0; i < copy_lead; ++i) copy.set(i, 7);
  const State start = s;
  State want = s;
  run(Call{&s, lead, size, grad.at(lead), grad_type, copy.at(copy_lead), copy_type});
  for (std::size_t i = 0; i < lead; ++i) {
    check(same(s.param[i], start.param[i]) && same(s.exp_avg[i], start.exp_avg[i]) &&
              same(s.exp_avg_sq[i], start.exp_avg_sq[i]),
          what, " before the start ", i);
  }
  for (std::size_t i = lead; i < all; ++i) {
    expect(want.grad[i], want.param[i], want.exp_avg[i], want.exp_avg_sq[i]);
    check(same(s.param[i], want.param[i]), what, " param ", i);
    check(same(s.exp_avg[i], want.exp_avg[i]), what, " first state ", i);
    check(same(s.exp_avg_sq[i], want.exp_avg_sq[i]), what, " second state ", i);
    if (copy_type != Type::none) {
      check(same(copy.get(i - lead + copy_lead), rounded(want.param[i], copy_type)), what, " copy ", i);
    }
  }
  for (std::size_t i = 0; i < copy_lead && copy_type != Type::none; ++i) check(copy.get(i) == 7, what, " copy's lead");
}

template <class Run, class Expect>
void test_step(const std::string& name, Run run, Expect expect) {
  for (std::size_t size = 0; size <= 130; size += size == 66 ? 61 : 1) {
    for (const Type grad_type : {Type::f32, Type::bf16, Type::f16}) {
      for (const Type copy_type : {Type::none, Type::f32, Type::bf16, Type::f16}) {
        test_step_of(name, size, grad_type, copy_type, run, expect);
      }
    }
  }
}

void test_adam(const KernelTable& table) {
  for (const bool l2 : {false, true}) {
    for (const float weight : {0.1f, 0.75f, 1.0f}) {
      AdamArgs a = scalars(weight);
      const auto run = [&](const Call& call) {
        a.param = call.state->param.data() + call.lead;
        a.exp_avg = call.state->exp_avg.data() + call.lead;
        a.exp_avg_sq = call.state->exp_avg_sq.data() + call.lead;
        a.grad = call.grad;
        a.copy = call.copy;
        run_adam(table, a, call.size, call.grad_type, call.copy_type, l2, 1);
      };
      test_step(std::string(table.name) + " adam" + (l2 ? " l2" : "") + " weight " + std::to_string(weight), run,
                [&](float g, float& p, float& m, float& v) { expected_step(a, l2, g, p, m, v); });
    }
  }
}

void test_sgd(const KernelTable& table) {
  for (const float l2 : {0.0f, 0.01f}) {
    for (const float momentum : {0.0f, 0.9f}) {
      for (const bool first : {false, true}) {
        for (const bool nesterov : {false, true}) {
          SgdArgs a{};
          a.grad_scale = 0.37f;
          a.l2 = l2;
          a.momentum = momentum;
          a.one_minus_dampening = 0.8f;
          a.neg_lr = -0.05f;
          a.first = first;
          a.nesterov = nesterov;
          const auto run = [&](const Call& call) {
            a.param = call.state->param.data() + call.lead;
            a.momentum_buffer = momentum == 0 ? nullptr : call.state->exp_avg.data() + call.lead;
            a.grad = call.grad;
            a.copy = call.copy;
            run_sgd(table, a, call.size, call.grad_type, call.copy_type, 1);
          };
          const auto expect = [&](float raw, float& p, float& buffer, float&) {
            float g = raw * a.grad_scale;
            if (l2 != 0) g = std::fma(p, l2, g);
            if (momentum != 0) {
              buffer = first ? g : std::fma(a.one_minus_dampening, g, buffer * momentum);
              g = nesterov ? std::fma(momentum, buffer, g) : buffer;
            }
            p = std::fma(a.neg_lr, g, p);
          };
          test_step(std::string(table.name) + " sgd", run, expect);
        }
      }
    }
  }
}

void test_adagrad(const KernelTable& table) {
  for (const float l2 : {0.0f, 0.01f}) {
    AdagradArgs a{};
    a.grad_scale = 0.37f;
    a.l2 = l2;
    a.eps = 1e-10f;
    a.neg_step_size = -0.05f;
    const auto run = [&](const Call& call) {
      a.param = call.state->param.data() + call.lead;
      a.sum = call.state->exp_avg_sq.data() + call.lead;
      a.grad = call.grad;
      a.copy = call.copy;
      run_adagrad(table, a, call.size, call.grad_type, call.copy_type, 1);
    };
    const auto expect = [&](float raw, float& p, float&, float& sum) {
      float g = raw * a.grad_scale;
      if (l2 != 0) g = std::fma(p, l2, g);
      sum = std::fma(g, g, sum);
      const float numerator = a.neg_step_size * g;
      p += numerator / (std::sqrt(sum) + a.eps);
    };
    test_step(std::string(table.name) + " adagrad", run, expect);
  }
}

void test_lion(const KernelTable& table) {
  LionArgs a{};
  a.grad_scale = 0.37f;
  a.decay = 0.999f;
  a.beta1 = 0.9f;
  a.one_minus_beta1 = 0.1f;
  a.beta2 = 0.99f;
  a.one_minus_beta2 = 0.01f;
  a.neg_lr = -0.05f;
  const auto run = [&](const Call& call) {
    a.param = call.state->param.data() + call.lead;
    a.exp_avg = call.state->exp_avg.data() + call.lead;
    a.grad = call.grad;
    a.copy = call.copy;
    run_lion(table, a, call.size, call.grad_type, call.copy_type, 1);
  };
  const auto expect = [&](float raw, float& p, float& m, float&) {
    const float g = raw * a.grad_scale;
    const float update = std::fma(a.one_minus_beta1, g, m * a.beta1);
    const float sign = std::isnan(update) ? update : update > 0 ? 1.0f : update < 0 ? -1.0f : 0.0f;
    p = std::fma(a.neg_lr, sign, p * a.decay);
    m = std::fma(a.one_minus_beta2, g, m * a.beta2);
  };
  test_step(std::string(table.name) + " lion", run, expect);
}

void test_threads_and_cuts(const KernelTable& table) {
  const std::size_t size = 300007;
  const State start = make_state(size, 7);
  const auto step = [&](std::size_t chunk, int threads) {
    State s = start;
    for (std::size_t begin = 0; begin < size; begin += chunk) {
      AdamArgs a = scalars(0.1f);
      a.param = s.param.data() + begin;
      a.exp_avg = s.exp_avg.data() + begin;
      a.exp_avg_sq = s.exp_avg_sq.data() + begin;
      a.grad = s.grad.data() + begin;
      run_adam(table, a, std::min(chunk, size - begin), Type::f32, Type::none, false, threads);
    }
    return s;
  };
  const State whole = step(size, 1);
  for (const auto& [chunk, threads] : {std::pair<std::size_t, int>{size, 2}, {size, 5}, {60, 1}, {4097, 3}}) {
    const State other = step(chunk, threads);
    bool equal = true;
    for (std::size_t i = 0; i < size; ++i) equal = equal && same(whole.param[i], other.param[i]);
    check(equal, table.name, " chunks of ", chunk);
  }
}

void test_host_range() {
  const std::size_t sizes[] = {0, 1, 4096, 100000, std::size_t{5} << 20};
  for (const std::size_t size : sizes) {
    HostRange range(size);
    char* const bytes = static_cast<char*>(range.data());
    check(range.size() == size, "HostRange size");
    for (int round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < size; i += 997) check(bytes[i] == 0, "HostRange starts as zeros");
      if (size > 0) std::memset(bytes, 7, size);
      range.release();
      check(range.data() == bytes, "HostRange keeps its address");
    }
  }
  for (const std::size_t from : sizes) {
    for (const std::size_t to : sizes) {
      HostRange source(from), target(to);
      if (from > 0) std::memset(source.data(), 3, from);
      target.take_pages(source);
      if (to > 0) std::memset(target.data(), 4, to);
      const char* const left = static_cast<const char*>(source.data());
      for (std::size_t i = 0; i < from; i += 997) check(left[i] == 0, "HostRange left without pages reads as zeros");
      source.take_pages(source);
    }
  }
}

}  // namespace

int main() {
  for (const std::string& isa : available_isas()) {
    const KernelTable& table = table_for(isa);
    test_adam(table);
    test_sgd(table);
    test_adagrad(table);
    test_lion(table);
    test_threads_and_cuts(table);
    test_passes(table);
    std::printf("%s: done\n", table.name);
  }
  try {
    table_for("mmx");
    check(false, "an unknown instruction set is refused");
  } catch (const std::invalid_argument&) {
    check(true, "an unknown instruction set is refused");
  }
  test_host_range();
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
