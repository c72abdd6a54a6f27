// bfloat16 and float32 in vectors of 512 bits.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

// The 16 rows of a strip, and the floats of a vector.
constexpr int64_t kLanes = 16;

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// 1 for each of the first n lanes, of all 16 for more.
inline __mmask16 first_lanes(int64_t n) { return n >= kLanes ? 0xffff : __mmask16((1u << n) - 1); }

// Lanes outside of the mask are 0.
inline __m512 load(const bf16* from, __mmask16 mask = 0xffff) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// To the nearest, to even on ties. Numbers below 2^-126 become 0.
inline void store(bf16* to, __m512 values, __mmask16 mask = 0xffff) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// e^x to 2e-7 of it; 0 below -104.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110), x);  // in this order it keeps NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts: r = x - n ln 2
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.f / 720);
  for (const float coefficient : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(sum, n);
}

// silu(gate) * up
inline __m512 swiglu(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1);
  const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
  return _mm512_mul_ps(silu, up);
}
