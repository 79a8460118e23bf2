// What the kernels take and the table through which they are called. One KernelTable exists per instruction set; all
// of them are built from the same sources (kernels/*.inl) and give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zeroexp {

// Element type of a gradient or of a copy. The numbers are shared with module.cpp only.
enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, none = 4 };
constexpr int kNumGradTypes = 3;  // f32, bf16, f16
constexpr int kNumCopyTypes = 4;  // f32, bf16, f16, none

// The column of a step's table.
constexpr int copy_index(Type copy) { return copy == Type::none ? kNumCopyTypes - 1 : static_cast<int>(copy); }

// One AdamW or Adam step over flat arrays. The scalars are already rounded to the precision they are used in.
struct AdamArgs {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;  // grad_type elements
  void* copy;        // copy_type elements: receives the new parameter; nullptr without a copy
  float grad_scale;  // the gradient is multiplied by this first
  float decay;       // 1 - lr * weight_decay (decoupled), else 1
  float l2;          // weight_decay (added to the gradient), else 0
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias2_sqrt;  // sqrt(1 - beta2^step)
  float eps;
  float neg_step_size;  // -lr / (1 - beta1^step)
};

// One step of stochastic gradient descent.
struct SgdArgs {
  float* param;
  float* momentum_buffer;  // nullptr without momentum
  const void* grad;
  void* copy;
  float grad_scale;
  float l2;
  float momentum;
  float one_minus_dampening;
  float neg_lr;
  bool first;  // the momentum buffer starts as the gradient; what is in it is not looked at
  bool nesterov;
};

struct AdagradArgs {
  float* param;
  float* sum;
  const void* grad;
  void* copy;
  float grad_scale;
  float l2;
  float eps;
  float neg_step_size;  // -lr / (1 + (step - 1) * lr_decay)
};

struct LionArgs {
  float* param;
  float* exp_avg;
  const void* grad;
  void* copy;
  float grad_scale;
  float decay;  // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float neg_lr;
};

// One step over elements [begin, end).
template <class Args>
using StepFn = void (*)(const Args&, std::size_t begin, std::size_t end);
using SumSquaresFn = double (*)(const void*, std::size_t begin, std::size_t end);
using SumIntoFn = void (*)(void* out, const void* const* parts, std::size_t num_parts, std::size_t begin,
                           std::size_t end);

using DivideIntoFn = void (*)(float* out, const void* part, float divisor, std::size_t begin, std::size_t end);
using ScaleCastFn = double (*)(void* out, const void* part, float scale, std::size_t begin, std::size_t end);
using AdoptEditsFn = bool (*)(float* master, const void* low, std::size_t begin, std::size_t end);
using MixLanesFn = std::uint64_t (*)(const void* data, std::size_t num_lanes, std::uint64_t key);

// The checksum's constants: the golden ratio's increment and the multipliers of SplitMix64 (Steele, Lea and Flood,
// OOPSLA 2014), and its mixing of one value, which can be undone.
constexpr std::uint64_t kMixStep = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kMixFirst = 0xBF58476D1CE4E5B9u;
constexpr std::uint64_t kMixSecond = 0x94D049BB133111EBu;
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  return x ^ (x >> 31);
}

struct KernelTable {
  const char* name;
  // [grad type][copy type], and a flag: decay added to the gradient (Adam), momentum (SGD).
  StepFn<AdamArgs> adam[kNumGradTypes][kNumCopyTypes][2];
  StepFn<SgdArgs> sgd[kNumGradTypes][kNumCopyTypes][2];
  StepFn<AdagradArgs> adagrad[kNumGradTypes][kNumCopyTypes];
  StepFn<LionArgs> lion[kNumGradTypes][kNumCopyTypes];
  // Benchmark only: the memory traffic of one Adam step (4 reads, 3 writes) without its arithmetic; changes no value.
  StepFn<AdamArgs> adam_traffic;
  SumSquaresFn sum_squares[4];  // by Type f32, bf16, f16, f64
  SumIntoFn sum_into[4];        // by Type of the parts; out is f64 for f64, else f32
  // [type of the part][added to what is there?]
  DivideIntoFn divide_into[kNumGradTypes][2];
  ScaleCastFn scale_cast[3][3];  // [type of the part][type of out]
  AdoptEditsFn adopt_edits[3];   // by Type of the narrow values
  MixLanesFn mix_lanes;          // see io/checksum.hpp
};

const KernelTable& baseline_table();
#ifdef ZEROEXP_X86
const KernelTable& avx2_table();
const KernelTable& avx512_table();
#endif

}  // namespace zeroexp
