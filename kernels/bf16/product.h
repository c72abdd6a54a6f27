// Products of a few rows with strips of a weight: what linears, experts and attention are made of.
//
// A weight [N, K], N a multiple of 16 and K of 2, lies in strips of 16 rows. A strip has, for one pair of columns after
// the other, that pair of each row: [N / 16, K / 2, 16, 2]. One instruction then adds a pair's products to the sums of 16
// outputs, nothing is summed across a vector, and memory is read in one stretch, which alone is fast.
//
// Each sum is taken in float32 and in the order of K, for any number of rows: what a row gives depends on nothing
// beside it.

#pragma once

#include <algorithm>

#include "vectors.h"

using Rows = const bf16* const*;

constexpr int64_t kTile = 12;          // rows at a time: their sums with two strips fill 24 of 32 registers
constexpr int64_t kPair = 2 * kLanes;  // outputs of two strips
constexpr int64_t kReading = 8;        // for so few rows the time is that of reading memory, which needs no help
constexpr int64_t kAhead = 2048;       // bytes: for more, strips come from a cache, and are asked for in time

// 16 rows of up to 16 pairs -> one strip's part for those pairs: lane n of out[k] is lane k of rows[n].
inline void transpose(__m512i (&rows)[kLanes], __m512i (&out)[kLanes]) {
  __m512i t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {  // rows[4 i + k] has, in quarter q, lane 4 q + k of rows 4 i to 4 i + 3
    const __m512i low = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0xee);
    const __m512i next_low = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0x44);
    const __m512i next_high = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0xee);
    out[k] = _mm512_shuffle_i32x4(low, next_low, 0x88);
    out[4 + k] = _mm512_shuffle_i32x4(low, next_low, 0xdd);
    out[8 + k] = _mm512_shuffle_i32x4(high, next_high, 0x88);
    out[12 + k] = _mm512_shuffle_i32x4(high, next_high, 0xdd);
  }
}

// One strip [K / 2, 16, 2] of 16 rows of K elements.
inline void pack_strip(const bf16* const* rows, int64_t K, bf16* strip) {
  for (int64_t k = 0; k < K; k += kPair) {
    const int64_t pairs = std::min(kLanes, (K - k) / 2);
    const __mmask16 mask = first_lanes(pairs);
    __m512i in[kLanes], out[kLanes];
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; n++) in[n] = _mm512_maskz_loadu_epi32(mask, rows[n] + k);
    transpose(in, out);
    if (pairs == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) _mm512_storeu_si512(strip + (k + 2 * i) * kLanes, out[i]);
    } else {
      for (int i = 0; i < pairs; i++) _mm512_storeu_si512(strip + (k + 2 * i) * kLanes, out[i]);
    }
  }
}

// out[m * stride] and the 31 after it = the products of x[m], K elements, with the rows of two strips.
template <int M>
void tile(const bf16* first, const bf16* second, int64_t K, Rows x, float* out, int64_t stride) {
  __m512 low[M], high[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) low[m] = high[m] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2) {
    if (M > kReading) {
      _mm_prefetch((const char*)(first + k * kLanes) + kAhead, _MM_HINT_T0);
      _mm_prefetch((const char*)(second + k * kLanes) + kAhead, _MM_HINT_T0);
    }
    const auto a = (__m512bh)_mm512_loadu_si512(first + k * kLanes);
    const auto b = (__m512bh)_mm512_loadu_si512(second + k * kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      int32_t bits;
      std::memcpy(&bits, x[m] + k, sizeof bits);
      const auto pair = (__m512bh)_mm512_set1_epi32(bits);
      low[m] = _mm512_dpbf16_ps(low[m], a, pair);
      high[m] = _mm512_dpbf16_ps(high[m], b, pair);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) {
    _mm512_storeu_ps(out + m * stride, low[m]);
    _mm512_storeu_ps(out + m * stride + kLanes, high[m]);
  }
}

constexpr decltype(&tile<1>) kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                                         tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

// M rows in tiles of much the same size: use(first, size) for each.
template <class Use>
void for_tiles(int64_t M, Use use) {
  for (int64_t m = 0, tiles = (M + kTile - 1) / kTile; tiles > 0; tiles--) {
    const int64_t size = (M - m + tiles - 1) / tiles;
    use(m, size);
    m += size;
  }
}

// As `tile`, for any number of rows.
inline void products(const bf16* first, const bf16* second, int64_t K, Rows x, int64_t M, float* out, int64_t stride) {
  for_tiles(M, [&](int64_t m, int64_t size) { kTiles[size - 1](first, second, K, x + m, out + m * stride, stride); });
}

// use(m, sums) with the products of each row m, 32 of them.
template <class Use>
void products(const bf16* first, const bf16* second, int64_t K, Rows x, int64_t M, Use use) {
  float sums[kTile * kPair];
  for_tiles(M, [&](int64_t m, int64_t size) {
    kTiles[size - 1](first, second, K, x + m, sums, kPair);
    for (int64_t i = 0; i < size; i++) use(m + i, sums + i * kPair);
  });
}
