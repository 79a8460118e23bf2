// The kernels that pass over memory once and step nothing, against scalar formulas.
#include "passes_test.hpp"

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "dispatch.hpp"

namespace zeroexp::test {
namespace {

constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};

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

// Ordinary numbers, and with `specials` among them everything that is not.
std::vector<float> values(std::size_t size, unsigned seed, bool specials) {
  const float odd[] = {0.0f,
                       -0.0f,
                       std::numeric_limits<float>::denorm_min(),
                       -3e-39f,
                       6e-8f,
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::max(),
                       65520.0f,
                       -65519.0f};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size);
  for (float& one : x) one = normal(random);
  for (std::size_t i = 0; specials && i < size; i += 3) x[i] = odd[(i / 3 + seed) % 11];
  return x;
}

// The documented order: blocks of 65536 elements, 16 lanes in each, lanes added in halves.
double squares_in_order(const std::vector<float>& x) {
  double total = 0;
  for (std::size_t block = 0; block < x.size(); block += 65536) {
    std::vector<double> lane(16, 0.0);
    for (std::size_t i = block; i < std::min(block + 65536, x.size()); ++i) {
      lane[(i - block) % 16] += static_cast<double>(x[i]) * x[i];
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    total += lane[0];
  }
  return total;
}

void test_scale_cast(const KernelTable& table, Type from, Type to, std::size_t size, bool specials, float scale) {
  const std::string what = std::string(table.name) + " scale_cast " + name_of(from) + " to " + name_of(to) + " size " +
                           std::to_string(size) + " by " + std::to_string(scale);
  const std::size_t lead = size % 5, out_lead = size % 3;
  const std::vector<float> x = values(size, static_cast<unsigned>(size), specials);
  Elements part(from, lead + size), out(to, out_lead + size);
  std::vector<float> want(size);
  for (std::size_t i = 0; i < size; ++i) {
    part.set(lead + i, rounded(x[i], from));
    want[i] = rounded(rounded(x[i], from) * scale, to);
  }
  for (std::size_t i = 0; i < out_lead; ++i) out.set(i, 7);
  const double sum = squares_in_order(want);
  bool finite = true;
  for (const float one : want) finite = finite && std::isfinite(one);
  check(std::isfinite(sum) == finite, what, " finite");
  for (const int threads : {1, 3}) {
    const double got = run_scale_cast(table, out.at(out_lead), part.at(lead), scale, size, from, to, threads);
    check(same(got, sum), what, " sum ", got, " not ", sum);
    for (std::size_t i = 0; i < size; ++i) check(same(out.get(out_lead + i), want[i]), what, " element ", i);
    for (std::size_t i = 0; i < out_lead; ++i) check(out.get(i) == 7, what, " before the start");
  }
  check(same(run_sum_squares(table, out.at(out_lead), size, to, 2), sum), what, " sum_squares");
  if (from != to) return;
  check(same(run_scale_cast(table, part.at(lead), part.at(lead), scale, size, from, to, 2), sum), what, " in place");
  for (std::size_t i = 0; i < size; ++i) check(same(part.get(lead + i), want[i]), what, " in place ", i);
}

void test_scale_casts(const KernelTable& table) {
  const float infinite = std::numeric_limits<float>::infinity();
  for (const Type from : kTypes) {
    for (const Type to : kTypes) {
      for (std::size_t size = 0; size <= 130; size += size == 36 ? 27 : 1) {
        for (const bool specials : {false, true}) {
          for (const float scale : {1.0f, 0.37f, -1e-6f}) test_scale_cast(table, from, to, size, specials, scale);
        }
      }
      for (const std::size_t size : {65535, 65537, 140001}) test_scale_cast(table, from, to, size, false, 0.37f);
      // Elements behind the end are no part of the sum, also where the scale makes NaN of zeros.
      for (const std::size_t size : {1, 15, 17}) test_scale_cast(table, from, to, size, false, infinite);
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void test_adopt_edits(const KernelTable& table, Type type, std::size_t size) {
  const std::string what = std::string(table.name) + " adopt_edits " + name_of(type) + " size " + std::to_string(size);
  const std::size_t lead = size % 4, low_lead = size % 3;
  std::vector<float> master = values(lead + size, static_cast<unsigned>(size), true);
  Elements low(type, low_lead + size);
  for (std::size_t i = 0; i < size; ++i) low.set(low_lead + i, rounded(master[lead + i], type));
  const auto adopt = [&] { return run_adopt_edits(table, master.data() + lead, low.at(low_lead), size, type, 3); };
  const std::vector<float> start = master;
  check(!adopt(), what, " finds nothing");
  check(same_bits(master, start), what, " leaves the master");
  // One edit at a time: another sign (also of a zero), a NaN, an infinity, a subnormal number, the next number.
  std::vector<float> want = master;
  const std::size_t step = size > 200 ? 997 : 1;
  for (std::size_t i = 0; i < size; i += step) {
    const float old = low.get(low_lead + i);
    const float edits[] = {-old, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                           std::ldexp(1.0f, type == Type::f16 ? -24 : -133), rounded(old * 1.01f, type)};
    const float edit = edits[i / step % 5];
    low.set(low_lead + i, edit);
    // Of 16 bits there is one NaN here, of 32 also the one with the other sign.
    const bool differs = type == Type::f32 ? std::memcmp(&old, &edit, sizeof old) != 0 : !same(old, edit);
    if (differs) want[lead + i] = edit;
    check(adopt() == differs, what, " edit ", i);
    check(same_bits(master, want), what, " master after edit ", i);
  }
  check(!adopt(), what, " finds nothing more");
  // All at once.
  master = start;
  for (std::size_t i = 0; i < size; ++i) {
    low.set(low_lead + i, rounded(static_cast<float>(i) - 20.5f, type));
    const float edit = low.get(low_lead + i), old = start[lead + i];
    want[lead + i] = same(rounded(old, type), edit) ? old : edit;
  }
  for (std::size_t i = 0; i < lead; ++i) want[i] = start[i];
  check(adopt() == (size > 0), what, " all");
  check(same_bits(master, want), what, " master after all");
}

// Where nothing was edited nothing is written: the pages of the master may not be.
void test_edits_only_read(const KernelTable& table, Type type) {
  const std::size_t size = 1000 + 13, bytes = 8192;
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    check(false, "no memory");
    return;
  }
  const std::vector<float> x = values(size, 1, true);
  Elements low(type, size);
  for (std::size_t i = 0; i < size; ++i) low.set(i, rounded(x[i], type));
  std::memcpy(pages, x.data(), size * sizeof(float));
  check(mprotect(pages, bytes, PROT_READ) == 0, "mprotect");
  check(!run_adopt_edits(table, static_cast<float*>(pages), low.at(0), size, type, 1), table.name, " only reads");
  munmap(pages, bytes);
}

// Bits of fp32 that a comparison of numbers would take for equal.
void test_payloads_are_bits(const KernelTable& table) {
  const std::uint32_t nan = 0x7fc00001u, other = 0x7fc00002u;
  std::vector<float> master(70, 1.0f), low(70, 1.0f);
  std::memcpy(&master[66], &nan, 4);
  std::memcpy(&low[66], &other, 4);
  check(run_adopt_edits(table, master.data(), low.data(), 70, Type::f32, 1), table.name, " another payload");
  check(same_bits(master, low), table.name, " payload taken over");
}

void test_mix_lanes(const KernelTable& table) {
  std::mt19937_64 random(11);
  std::vector<std::size_t> sizes(41);
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = i;
  sizes.push_back(4097);
  for (const std::size_t lanes : sizes) {
    const std::size_t lead = lanes % 8;
    std::vector<unsigned char> bytes(lead + lanes * 8);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    const std::uint64_t key = random();
    std::uint64_t want = 0;
    for (std::size_t i = 0; i < lanes; ++i) {
      std::uint64_t lane = 0;
      for (std::size_t j = 8; j > 0; --j) lane = lane << 8 | bytes[lead + i * 8 + j - 1];
      std::uint64_t x = lane ^ (key + (i + 1) * 0x9E3779B97F4A7C15u);
      x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
      x = (x ^ x >> 27) * 0x94D049BB133111EBu;
      want += x ^ x >> 31;
    }
    check(table.mix_lanes(bytes.data() + lead, lanes, key) == want, table.name, " mix_lanes ", lanes);
  }
}

}  // namespace

void test_passes(const KernelTable& table) {
  test_sums(table);
  test_scale_casts(table);
  for (const Type type : kTypes) {
    for (std::size_t size = 0; size <= 130; ++size) test_adopt_edits(table, type, size);
    test_adopt_edits(table, type, 140001);
    test_edits_only_read(table, type);
  }
  test_payloads_are_bits(table);
  test_mix_lanes(table);
}

}  // namespace zeroexp::test
