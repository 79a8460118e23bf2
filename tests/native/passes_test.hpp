// Sums, casts, edits and the checksum's loop of one instruction set.
#pragma once
#include "kernels/table.hpp"

namespace zeroexp::test {

void test_passes(const KernelTable& table);

}  // namespace zeroexp::test
