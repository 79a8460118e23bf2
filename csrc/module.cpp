// The Python face of the compiled ops: zeroexp._C. Import torch first, so that both share one OpenMP runtime.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, module) { module.doc() = "Compiled ops of zeroexp; use zeroexp.ops."; }
