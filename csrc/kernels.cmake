# The kernels as a static library: linked into zeroexp._C, and into the C++ tests.
# No -march=native, no -ffast-math. Contraction is off: fused multiply-adds are written where they are meant, so that
# every instruction set and every position in an array rounds alike.
function(zeroexp_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion)
  if(ZEROEXP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

set(csrc ${CMAKE_CURRENT_LIST_DIR})
add_library(zeroexp_kernels STATIC ${csrc}/dispatch.cpp ${csrc}/host_range.cpp ${csrc}/kernels/isa_baseline.cpp)
set_target_properties(zeroexp_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(zeroexp_kernels PUBLIC ${csrc})
target_compile_options(zeroexp_kernels PRIVATE -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden)
zeroexp_warnings(zeroexp_kernels)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_definitions(zeroexp_kernels PUBLIC ZEROEXP_X86)
  target_sources(zeroexp_kernels PRIVATE ${csrc}/kernels/isa_avx2.cpp ${csrc}/kernels/isa_avx512.cpp)
  # GCC's own AVX-512 headers warn about their "undefined" vectors (GCC bug 105593).
  set(gcc_105593 $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>)
  set_source_files_properties(${csrc}/kernels/isa_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(${csrc}/kernels/isa_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c;${gcc_105593}")
endif()

# torch ships its own OpenMP runtime under the same name; whoever is loaded first serves both.
find_package(OpenMP COMPONENTS CXX)
if(OpenMP_CXX_FOUND)
  target_link_libraries(zeroexp_kernels PRIVATE OpenMP::OpenMP_CXX)
endif()
