// What the kernels take and the table through which they are called. One KernelTable exists per instruction set; all
// of them are built from the same sources (kernels/*.inl) and give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zeroexp {

// Element type of a gradient or of a low-precision copy. The numbers are shared with module.cpp only.
enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, none = 4 };
constexpr int kNumGradTypes = 3;  // f32, bf16, f16
constexpr int kNumCopyTypes = 3;  // none, bf16, f16

// One AdamW or Adam step over flat arrays. The scalars are already rounded to the precision they are used in.
struct AdamArgs {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;     // grad_type elements
  std::uint16_t* copy;  // low-precision copy of the new parameter, or nullptr
  float grad_scale;     // the gradient is multiplied by this first
  float decay;          // 1 - lr * weight_decay (decoupled), else 1
  float l2;             // weight_decay (added to the gradient), else 0
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
  std::uint16_t* copy;
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
  std::uint16_t* copy;
  float grad_scale;
  float l2;
  float eps;
  float neg_step_size;  // -lr / (1 + (step - 1) * lr_decay)
};

struct LionArgs {
  float* param;
  float* exp_avg;
  const void* grad;
  std::uint16_t* copy;
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
};

const KernelTable& baseline_table();
#ifdef ZEROEXP_X86
const KernelTable& avx2_table();
const KernelTable& avx512_table();
#endif

}  // namespace zeroexp
