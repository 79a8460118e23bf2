// Sixteen lanes: AVX-512 F, BW, DQ, VL.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace zeroexp {
namespace {

struct Vec {
  static constexpr std::size_t kLanes = 16;
  __m512 x;

  static Vec all(float value) { return {_mm512_set1_ps(value)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_bf16(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
  void store_bf16(std::uint16_t* p) const {
    // By integer arithmetic: the AVX512-BF16 instruction would flush subnormals.
    const __m512i b = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_srli_epi32(r, 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }
  void store_f16(std::uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  // The same value, but the compiler does not know: a benchmark's loads and stores stay.
  static Vec opaque(Vec a) {
    __asm__ volatile("" : "+v"(a.x));
    return a;
  }
  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
  // -1, 0 or 1; NaN stays NaN.
  static Vec sign(Vec a) {
    const __m512 unit = _mm512_or_ps(_mm512_and_ps(a.x, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
    const __m512 r = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.x, _mm512_setzero_ps(), _CMP_NEQ_OQ), unit);
    return {_mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q), a.x)};
  }
  static Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.x)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
};

}  // namespace
}  // namespace zeroexp
