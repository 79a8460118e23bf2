# The file engine as a static library: linked into zeroexp._C, and into its C++ tests. Include kernels.cmake first.
set(io ${CMAKE_CURRENT_LIST_DIR}/io)
add_library(zeroexp_io STATIC ${io}/checksum.cpp ${io}/engine.cpp ${io}/file.cpp ${io}/pool.cpp ${io}/queue.cpp
  ${io}/system.cpp ${io}/uring.cpp)
set_target_properties(zeroexp_io PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_options(zeroexp_io PRIVATE -fvisibility=hidden)
find_package(Threads REQUIRED)
target_link_libraries(zeroexp_io PUBLIC zeroexp_kernels Threads::Threads)
zeroexp_warnings(zeroexp_io)
