// The Python face of the file engine, as a part of zeroexp._C.
#pragma once
#include <pybind11/pybind11.h>

namespace zeroexp::io {

void bind(pybind11::module_& module);

}  // namespace zeroexp::io
