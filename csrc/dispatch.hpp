// Which instruction sets this machine has, and the ops over whole arrays: the range is cut into a fixed pattern of
// parts, one per thread, and every part goes through one KernelTable. Results do not depend on the number of threads.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "kernels/table.hpp"

namespace zeroexp {

// Names of the tables this machine can run, slowest first ("baseline" always).
std::vector<std::string> available_isas();

// The table of that name; "" takes the fastest. Throws std::invalid_argument for a name that this machine has not.
const KernelTable& table_for(const std::string& isa);

void run_adam(const KernelTable& table, const AdamArgs& args, std::size_t size, Type grad, Type copy, bool l2,
              int threads);
// The momentum buffer tells which SGD: nullptr is the plain one.
void run_sgd(const KernelTable& table, const SgdArgs& args, std::size_t size, Type grad, Type copy, int threads);
void run_adagrad(const KernelTable& table, const AdagradArgs& args, std::size_t size, Type grad, Type copy,
                 int threads);
void run_lion(const KernelTable& table, const LionArgs& args, std::size_t size, Type grad, Type copy, int threads);
void run_adam_traffic(const KernelTable& table, const AdamArgs& args, std::size_t size, int threads);
double run_sum_squares(const KernelTable& table, const void* data, std::size_t size, Type type, int threads);
void run_sum_into(const KernelTable& table, void* out, const std::vector<const void*>& parts, std::size_t size,
                  Type type, int threads);
void run_divide_into(const KernelTable& table, float* out, const void* part, float divisor, std::size_t size, Type type,
                     bool add, int threads);
// out = part * scale; returns the sum of squares of out, as run_sum_squares would.
double run_scale_cast(const KernelTable& table, void* out, const void* part, float scale, std::size_t size,
                      Type part_type, Type out_type, int threads);
// master = low where low is not the rounded master; returns whether there was any such element.
bool run_adopt_edits(const KernelTable& table, float* master, const void* low, std::size_t size, Type low_type,
                     int threads);

}  // namespace zeroexp
