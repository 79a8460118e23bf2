// The kernels of every instruction set this machine has, against scalar formulas that use libm's correctly rounded
// fmaf. Arrays are heap blocks of the exact size, so that the address sanitizer sees a read or write past either end.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.hpp"
#include "host_range.hpp"

namespace {

using namespace zeroexp;

int failures = 0;
int checks = 0;

// The message is put together only when it is needed: there are millions of checks.
template <class... Parts>
void check(bool ok, const Parts&... message) {
  ++checks;
  if (ok) return;
  ++failures;
  if (failures > 20) return;
  std::ostringstream text;
  (text << ... << message);
  std::fprintf(stderr, "FAILED: %s\n", text.str().c_str());
}

bool same(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// bf16 is the upper half of a float: the gradients below are cut to it, so the expected value needs no rounding rule.
std::uint16_t upper_half(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}
float from_upper_half(std::uint16_t h) {
  const std::uint32_t bits = static_cast<std::uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

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

// One step over arrays of every size up to 130: `run` steps them with the kernel, `expect` one element by the formula.
template <class Run, class Expect>
void test_step(const std::string& name, Run run, Expect expect) {
  for (std::size_t size = 0; size <= 130; ++size) {
    for (const bool bf16 : {false, true}) {
      const std::string what = name + " size " + std::to_string(size) + (bf16 ? " bf16" : " fp32");
      State s = make_state(size, static_cast<unsigned>(size));
      std::vector<std::uint16_t> low, copy(size, 0xdead);
      for (float& g : s.grad) {
        low.push_back(upper_half(g));
        if (bf16) g = from_upper_half(low.back());
      }
      State want = s;
      const void* const grad = bf16 ? static_cast<const void*>(low.data()) : s.grad.data();
      run(s, size, grad, bf16 ? Type::bf16 : Type::f32, copy.data());
      for (std::size_t i = 0; i < size; ++i) {
        expect(want.grad[i], want.param[i], want.exp_avg[i], want.exp_avg_sq[i]);
        check(same(s.param[i], want.param[i]), what, " param ", i);
        check(same(s.exp_avg[i], want.exp_avg[i]), what, " first state ", i);
        check(same(s.exp_avg_sq[i], want.exp_avg_sq[i]), what, " second state ", i);
        const float error = std::fabs(from_upper_half(copy[i]) - s.param[i]);
        const bool finite = std::isfinite(s.param[i]) && std::fabs(s.param[i]) < 1e38f;
        check(!finite || error <= std::ldexp(std::fabs(s.param[i]), -8) || error < 1e-40f, what, " copy");
      }
    }
  }
}

void test_adam(const KernelTable& table) {
  for (const bool l2 : {false, true}) {
    for (const float weight : {0.1f, 0.75f, 1.0f}) {
      AdamArgs a = scalars(weight);
      const auto run = [&](State& s, std::size_t size, const void* grad, Type type, std::uint16_t* copy) {
        a.param = s.param.data();
        a.exp_avg = s.exp_avg.data();
        a.exp_avg_sq = s.exp_avg_sq.data();
        a.grad = grad;
        a.copy = copy;
        run_adam(table, a, size, type, Type::bf16, l2, 1);
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
          const auto run = [&](State& s, std::size_t size, const void* grad, Type type, std::uint16_t* copy) {
            a.param = s.param.data();
            a.momentum_buffer = momentum == 0 ? nullptr : s.exp_avg.data();
            a.grad = grad;
            a.copy = copy;
            run_sgd(table, a, size, type, Type::bf16, 1);
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
    const auto run = [&](State& s, std::size_t size, const void* grad, Type type, std::uint16_t* copy) {
      a.param = s.param.data();
      a.sum = s.exp_avg_sq.data();
      a.grad = grad;
      a.copy = copy;
      run_adagrad(table, a, size, type, Type::bf16, 1);
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
  const auto run = [&](State& s, std::size_t size, const void* grad, Type type, std::uint16_t* copy) {
    a.param = s.param.data();
    a.exp_avg = s.exp_avg.data();
    a.grad = grad;
    a.copy = copy;
    run_lion(table, a, size, type, Type::bf16, 1);
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

void test_sums(const KernelTable& table) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (const std::size_t size : {0, 1, 15, 16, 17, 63, 64, 65, 130, 65535, 65536, 200001}) {
    const std::string what = std::string(table.name) + " size " + std::to_string(size);
    std::vector<double> wide;
    std::vector<float> x, y;
    long double want = 0, want_wide = 0;
    for (std::size_t i = 0; i < size; ++i) {
      wide.push_back(normal(random));
      x.push_back(static_cast<float>(wide[i]));
      y.push_back(static_cast<float>(normal(random)));
      want += static_cast<long double>(x[i]) * x[i];
      want_wide += static_cast<long double>(wide[i]) * wide[i];
    }
    const double got = run_sum_squares(table, x.data(), size, Type::f32, 1);
    const double got_wide = run_sum_squares(table, wide.data(), size, Type::f64, 2);
    check(std::fabs(static_cast<double>(got - want)) <= 1e-13 * static_cast<double>(want), what, " sum_squares");
    check(std::fabs(static_cast<double>(got_wide - want_wide)) <= 1e-13 * static_cast<double>(want_wide), what,
          " sum_squares f64");
    check(got == run_sum_squares(table, x.data(), size, Type::f32, 4), what, " sum_squares threads");
    check(got == run_sum_squares(baseline_table(), x.data(), size, Type::f32, 1), what, " sum_squares baseline");

    std::vector<float> sum(size);
    run_sum_into(table, sum.data(), {x.data(), y.data(), x.data()}, size, Type::f32, 2);
    std::vector<double> sum_wide(size);
    run_sum_into(table, sum_wide.data(), {wide.data(), wide.data(), wide.data()}, size, Type::f64, 1);
    std::vector<float> in_place = x;
    run_sum_into(table, in_place.data(), {y.data(), in_place.data()}, size, Type::f32, 1);
    for (std::size_t i = 0; i < size; ++i) {
      check(same(sum[i], x[i] + y[i] + x[i]), what, " sum_into");
      check(sum_wide[i] == wide[i] + wide[i] + wide[i], what, " sum_into f64");
      check(same(in_place[i], y[i] + x[i]), what, " sum_into in place");
    }

    std::vector<float> quotient(size), added = x;
    run_divide_into(table, quotient.data(), y.data(), 3.0f, size, Type::f32, false, 2);
    run_divide_into(table, added.data(), y.data(), 3.0f, size, Type::f32, true, 2);
    for (std::size_t i = 0; i < size; ++i) {
      const float by_three = y[i] / 3.0f;
      check(same(quotient[i], by_three), what, " divide_into");
      check(same(added[i], x[i] + by_three), what, " divide_into, added");
    }
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
    test_sums(table);
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
