#include "vec_baseline.hpp"
// The include order matters: isa.inl uses the Vec above.
#include "isa.inl"

namespace zeroexp {

const KernelTable& baseline_table() {
  static const KernelTable table = make_table("baseline");
  return table;
}

}  // namespace zeroexp
