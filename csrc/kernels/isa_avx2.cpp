#include "vec_avx2.hpp"
// The include order matters: isa.inl uses the Vec above.
#include "isa.inl"

namespace zeroexp {

const KernelTable& avx2_table() {
  static const KernelTable table = make_table("avx2");
  return table;
}

}  // namespace zeroexp
