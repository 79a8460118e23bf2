// Eight lanes: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace zeroexp {
namespace {

struct Vec {
  static constexpr std::size_t kLanes = 8;
  __m256 x;

  static Vec all(float value) { return {_mm256_set1_ps(value)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load_bf16(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
  void store_bf16(std::uint16_t* p) const {
    // Round to nearest, ties to even, by integer arithmetic (subnormals stay); NaN becomes 0x7fc0 as in torch.
    const __m256i b = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_packus_epi32(r, r);  // per 128-bit half
    const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(joined));
  }
  void store_f16(std::uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  // The same value, but the compiler does not know: a benchmark's loads and stores stay.
  static Vec opaque(Vec a) {
    __asm__ volatile("" : "+x"(a.x));
    return a;
  }
  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
  // -1, 0 or 1; NaN stays NaN.
  static Vec sign(Vec a) {
    const __m256 unit = _mm256_or_ps(_mm256_and_ps(a.x, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    const __m256 r = _mm256_and_ps(_mm256_cmp_ps(a.x, _mm256_setzero_ps(), _CMP_NEQ_OQ), unit);
    return {_mm256_blendv_ps(r, a.x, _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q))};
  }
  static Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.x)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
};

}  // namespace
}  // namespace zeroexp
