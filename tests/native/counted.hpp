// Checks that are counted, and tell of the first failures.
#pragma once
#include <cstdio>
#include <sstream>

namespace zeroexp::test {

inline int failures = 0;
inline int checks = 0;

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

}  // namespace zeroexp::test
