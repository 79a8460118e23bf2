#include "vec_avx512.hpp"
// The include order matters: isa.inl uses the Vec above.
#include "isa.inl"

namespace zeroexp {

const KernelTable& avx512_table() {
  static const KernelTable table = make_table("avx512");
  return table;
}

}  // namespace zeroexp
