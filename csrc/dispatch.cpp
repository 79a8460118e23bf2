#include "dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>

#ifdef ZEROEXP_X86
#include <cpuid.h>
#endif

namespace zeroexp {
namespace {

// Below this many elements a second thread costs more than it brings.
constexpr std::size_t kMinPerThread = 32768;
// Parts start at multiples of this many elements: whole cache lines of 16-bit copies, whole vectors everywhere.
constexpr std::size_t kAlign = 64;
// Sums of squares are added in blocks of this fixed size, so that their rounding does not depend on the threads.
constexpr std::size_t kSumBlock = 65536;

template <class F>
void parallel(std::size_t size, int threads, F run) {
  const std::size_t wanted = std::max<std::size_t>(
      1, std::min<std::size_t>(threads < 1 ? 1 : static_cast<std::size_t>(threads), size / kMinPerThread));
  if (wanted == 1) {
    run(std::size_t{0}, size);
    return;
  }
  const std::size_t part = ((size + wanted - 1) / wanted + kAlign - 1) / kAlign * kAlign;
  const int parts = static_cast<int>((size + part - 1) / part);
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(parts)
#endif
  for (int k = 0; k < parts; ++k) {
    const std::size_t begin = static_cast<std::size_t>(k) * part;
    run(begin, std::min(begin + part, size));
  }
}

template <class Args>
void run_step(StepFn<Args> kernel, const Args& args, std::size_t size, int threads) {
  parallel(size, threads, [&](std::size_t begin, std::size_t end) { kernel(args, begin, end); });
}

// The sum of `run` over blocks of fixed size, added in their order.
template <class F>
double sum_blocks(std::size_t size, int threads, F run) {
  const std::size_t blocks = (size + kSumBlock - 1) / kSumBlock;
  std::vector<double> partial(blocks);
  const std::int64_t count = static_cast<std::int64_t>(blocks);
  const int team = std::max(1, std::min(threads, static_cast<int>(std::min<std::size_t>(blocks, 1024))));
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
#endif
  for (std::int64_t k = 0; k < count; ++k) {
    const std::size_t begin = static_cast<std::size_t>(k) * kSumBlock;
    partial[static_cast<std::size_t>(k)] = run(begin, std::min(begin + kSumBlock, size));
  }
  static_cast<void>(team);
  double total = 0;
  for (const double value : partial) total += value;
  return total;
}

int index_of(Type type) { return static_cast<int>(type); }

#ifdef ZEROEXP_X86
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}
#endif

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables{&baseline_table()};
#ifdef ZEROEXP_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (avx2) tables.push_back(&avx2_table());
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&avx512_table());
  }
#endif
  return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

const KernelTable& table_for(const std::string& isa) {
  const std::vector<const KernelTable*> tables = available_tables();
  if (isa.empty()) return *tables.back();
  for (const KernelTable* table : tables) {
    if (isa == table->name) return *table;
  }
  throw std::invalid_argument("instruction set '" + isa + "' is not available");
}

void run_adam(const KernelTable& table, const AdamArgs& args, std::size_t size, Type grad, Type copy, bool l2,
              int threads) {
  run_step(table.adam[index_of(grad)][copy_index(copy)][l2 ? 1 : 0], args, size, threads);
}

void run_sgd(const KernelTable& table, const SgdArgs& args, std::size_t size, Type grad, Type copy, int threads) {
  const bool momentum = args.momentum_buffer != nullptr;
  run_step(table.sgd[index_of(grad)][copy_index(copy)][momentum ? 1 : 0], args, size, threads);
}

void run_adagrad(const KernelTable& table, const AdagradArgs& args, std::size_t size, Type grad, Type copy,
                 int threads) {
  run_step(table.adagrad[index_of(grad)][copy_index(copy)], args, size, threads);
}

void run_lion(const KernelTable& table, const LionArgs& args, std::size_t size, Type grad, Type copy, int threads) {
  run_step(table.lion[index_of(grad)][copy_index(copy)], args, size, threads);
}

void run_adam_traffic(const KernelTable& table, const AdamArgs& args, std::size_t size, int threads) {
  run_step(table.adam_traffic, args, size, threads);
}

double run_sum_squares(const KernelTable& table, const void* data, std::size_t size, Type type, int threads) {
  const SumSquaresFn kernel = table.sum_squares[index_of(type)];
  return sum_blocks(size, threads, [&](std::size_t begin, std::size_t end) { return kernel(data, begin, end); });
}

double run_scale_cast(const KernelTable& table, void* out, const void* part, float scale, std::size_t size,
                      Type part_type, Type out_type, int threads) {
  const ScaleCastFn kernel = table.scale_cast[index_of(part_type)][index_of(out_type)];
  return sum_blocks(size, threads,
                    [&](std::size_t begin, std::size_t end) { return kernel(out, part, scale, begin, end); });
}

bool run_adopt_edits(const KernelTable& table, float* master, const void* low, std::size_t size, Type low_type,
                     int threads) {
  const AdoptEditsFn kernel = table.adopt_edits[index_of(low_type)];
  std::atomic<bool> changed{false};
  parallel(size, threads, [&](std::size_t begin, std::size_t end) {
    if (kernel(master, low, begin, end)) changed.store(true, std::memory_order_relaxed);
  });
  return changed.load();
}

void run_sum_into(const KernelTable& table, void* out, const std::vector<const void*>& parts, std::size_t size,
                  Type type, int threads) {
  const SumIntoFn kernel = table.sum_into[index_of(type)];
  parallel(size, threads,
           [&](std::size_t begin, std::size_t end) { kernel(out, parts.data(), parts.size(), begin, end); });
}

void run_divide_into(const KernelTable& table, float* out, const void* part, float divisor, std::size_t size, Type type,
                     bool add, int threads) {
  const DivideIntoFn kernel = table.divide_into[index_of(type)][add ? 1 : 0];
  parallel(size, threads, [&](std::size_t begin, std::size_t end) { kernel(out, part, divisor, begin, end); });
}

}  // namespace zeroexp
