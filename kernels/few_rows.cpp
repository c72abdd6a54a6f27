// What a step that decodes computes in bfloat16, on CPUs with AVX512-BF16: products of few rows with weights, experts,
// attention of one query a sequence. few_rows_cpu.py compiles this and calls it.
//
// A step that decodes reads all the weights that it uses for a few rows each, so its time is that of reading memory.
// A core reads fastest in one stretch: on an EPYC 30 GB/s, but 11 to 15 if it takes several rows of a matrix side by
// side, as products in blocks do, those of oneDNN among them. So each row of a weight is read from its beginning to its
// end, and multiplied meanwhile with up to eight rows of x, which the first-level cache holds. For many rows that is
// slow: a block of weights would serve more products each time that it is loaded.
//
// Weights are as checkpoints have them: [N, K], one row after the other. A result does not depend on the number of rows
// beside it. Sums are in float32.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

using bf16 = uint16_t;
using Rows = const bf16* const*;

namespace {

constexpr int64_t kLinearBlock = 32;  // rows of a weight that a thread takes at a time
constexpr int64_t kInnerBlock = 32;   // of a gate matrix, and as many of the up matrix
constexpr int64_t kDownBlock = 128;   // of each expert's down matrix

float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// To the nearest, to even on ties.
bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7fc0 : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// out[m * stride] = w . x[m], over K columns, in two sums that do not wait for each other.
template <int M>
void dots(const bf16* w, int64_t K, Rows x, float* out, int64_t stride) {
  __m512 even[M], odd[M];
  std::fill(even, even + M, _mm512_setzero_ps());
  std::fill(odd, odd + M, _mm512_setzero_ps());
  int64_t k = 0;
  for (; k + 64 <= K; k += 64) {
    const auto first = (__m512bh)_mm512_loadu_si512(w + k), second = (__m512bh)_mm512_loadu_si512(w + k + 32);
    for (int m = 0; m < M; m++) {
      even[m] = _mm512_dpbf16_ps(even[m], first, (__m512bh)_mm512_loadu_si512(x[m] + k));
      odd[m] = _mm512_dpbf16_ps(odd[m], second, (__m512bh)_mm512_loadu_si512(x[m] + k + 32));
    }
  }
  for (; k < K; k += 32) {
    const __mmask32 mask = K - k < 32 ? (1u << (K - k)) - 1 : ~0u;
    const auto last = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + k);
    for (int m = 0; m < M; m++)
      even[m] = _mm512_dpbf16_ps(even[m], last, (__m512bh)_mm512_maskz_loadu_epi16(mask, x[m] + k));
  }
  for (int m = 0; m < M; m++) out[m * stride] = _mm512_reduce_add_ps(_mm512_add_ps(even[m], odd[m]));
}

template <int M>
void dots_of_rows(const bf16* w, int64_t N, int64_t K, Rows x, float* out, int64_t stride) {
  for (int64_t n = 0; n < N; n++) dots<M>(w + n * K, K, x, out + n, stride);
}

// out[m * stride + n] = w[n] . x[m], for w [N, K] and M rows of K elements each.
void product(const bf16* w, int64_t N, int64_t K, Rows x, int64_t M, float* out, int64_t stride) {
  for (; M >= 8; M -= 8, x += 8, out += 8 * stride) dots_of_rows<8>(w, N, K, x, out, stride);
  if (M >= 4) {
    dots_of_rows<4>(w, N, K, x, out, stride);
    M -= 4, x += 4, out += 4 * stride;
  }
  if (M == 3) dots_of_rows<3>(w, N, K, x, out, stride);
  if (M == 2) dots_of_rows<2>(w, N, K, x, out, stride);
  if (M == 1) dots_of_rows<1>(w, N, K, x, out, stride);
}

// e^x to 2e-7 of it; 0 below -104.
__m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110), x);  // in this order it keeps NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts: r = x - n ln 2
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.f / 720);
  for (const float coefficient : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(sum, n);
}

// gate[i] becomes weight * silu(gate[i]) * up[i]. n is a multiple of 16.
void weighted_swiglu(float* gate, const float* up, float weight, int64_t n) {
  const __m512 one = _mm512_set1_ps(1);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 g = _mm512_loadu_ps(gate + i);
    const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), g))));
    _mm512_storeu_ps(gate + i, _mm512_mul_ps(_mm512_mul_ps(silu, _mm512_loadu_ps(up + i)), _mm512_set1_ps(weight)));
  }
}

// scores[i] becomes e^(scale * (scores[i] - max)); returns their sum.
float unnormalized_softmax(float* scores, int64_t n, float scale) {
  const __m512 max = _mm512_set1_ps(*std::max_element(scores, scores + n));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i < 16 ? (1u << (n - i)) - 1 : 0xffff;
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + i), max), _mm512_set1_ps(scale));
    const __m512 mass = _mm512_maskz_mov_ps(mask, exponential(x));
    _mm512_mask_storeu_ps(scores + i, mask, mass);
    sum = _mm512_add_ps(sum, mass);
  }
  return _mm512_reduce_add_ps(sum);
}

// Which rows go through which experts. Assignment a is token a / top_k's choice a % top_k.
struct Routes {
  std::vector<int32_t> starts;  // [E + 1] where each expert's begin in `order`
  std::vector<int32_t> order;   // [A] the assignments, by expert
  int64_t most = 0;             // of one expert

  Routes(const int32_t* expert_ids, int64_t A, int64_t E) : starts(E + 1), order(A) {
    for (int64_t a = 0; a < A; a++) starts[expert_ids[a] + 1]++;
    most = *std::max_element(starts.begin(), starts.end());
    for (int64_t e = 0; e < E; e++) starts[e + 1] += starts[e];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (int64_t a = 0; a < A; a++) order[next[expert_ids[a]]++] = a;
  }
};

// Some columns of an expert.
struct Columns {
  int64_t expert, first, size;
};

}  // namespace

// x [T, K], w [N, K], bias [N] or null -> y [T, N].
extern "C" void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t T, int64_t N, int64_t K) {
  std::vector<const bf16*> rows(T);
  for (int64_t t = 0; t < T; t++) rows[t] = x + t * K;
#pragma omp parallel
  {
    std::vector<float> sums(T * kLinearBlock);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < N; first += kLinearBlock) {
      const int64_t size = std::min(kLinearBlock, N - first);
      product(w + first * K, size, K, rows.data(), T, sums.data(), kLinearBlock);
      for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < size; n++)
          y[t * N + first + n] = to_bf16(sums[t * kLinearBlock + n] + (bias ? to_float(bias[first + n]) : 0));
    }
  }
}

// x [T, H] -> y [T, H], the sum over each token's experts of weight * (down @ (silu(gate @ x) * (up @ x))). Expert e has
// F = offsets[e + 1] - offsets[e] columns, 0 allowed: [F, H] gate rows and as many up rows from row 2 * offsets[e] of
// gate_up on, and a [H, F] down matrix from down + H * offsets[e] on. weights, expert_ids [T, top_k].
// Returns false, and does nothing, where an id is none of an expert.
extern "C" bool experts(const bf16* x, const bf16* gate_up, const bf16* down, const int32_t* offsets,
                        const float* weights, const int32_t* expert_ids, bf16* y, int64_t T, int64_t top_k, int64_t E,
                        int64_t H) {
  const int64_t A = T * top_k;
  if (std::any_of(expert_ids, expert_ids + A, [E](int32_t e) { return e < 0 || e >= E; })) return false;
  const Routes routes(expert_ids, A, E);
  const auto& starts = routes.starts;
  std::vector<Columns> work;
  int64_t widest = 0;
  for (int64_t e = 0; e < E; e++) {
    const int64_t F = offsets[e + 1] - offsets[e];
    widest = std::max(widest, F);
    for (int64_t f = 0; f < F && starts[e + 1] > starts[e]; f += kInnerBlock)
      work.push_back({e, f, std::min(kInnerBlock, F - f)});
  }
  std::vector<bf16> inner(A * widest);  // in the routes' order: weight * silu(gate) * up
  std::vector<const bf16*> x_rows(A), inner_rows(A);
  for (int64_t i = 0; i < A; i++) {
    x_rows[i] = x + routes.order[i] / top_k * H;
    inner_rows[i] = inner.data() + i * widest;
  }
#pragma omp parallel
  {
    std::vector<float> gate(routes.most * kInnerBlock), up(gate), part(routes.most * kDownBlock), sums(T * kDownBlock);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < work.size(); i++) {
      const auto [e, f, size] = work[i];
      const int64_t first = starts[e], M = starts[e + 1] - first, F = offsets[e + 1] - offsets[e];
      const bf16* w = gate_up + (2 * int64_t(offsets[e]) + f) * H;
      product(w, size, H, &x_rows[first], M, gate.data(), kInnerBlock);
      product(w + F * H, size, H, &x_rows[first], M, up.data(), kInnerBlock);
      for (int64_t m = 0; m < M; m++) {
        float* row = &gate[m * kInnerBlock];
        weighted_swiglu(row, &up[m * kInnerBlock], weights[routes.order[first + m]], kInnerBlock);
        for (int64_t n = 0; n < size; n++) inner[(first + m) * widest + f + n] = to_bf16(row[n]);
      }
    }
#pragma omp for schedule(dynamic)
    for (int64_t h = 0; h < H; h += kDownBlock) {  // a thread has these columns of y alone
      const int64_t size = std::min(kDownBlock, H - h);
      std::fill(sums.begin(), sums.end(), 0.f);
      for (int64_t e = 0; e < E; e++) {
        const int64_t first = starts[e], M = starts[e + 1] - first, F = offsets[e + 1] - offsets[e];
        if (M == 0 || F == 0) continue;
        product(down + H * int64_t(offsets[e]) + h * F, size, F, &inner_rows[first], M, part.data(), kDownBlock);
        for (int64_t m = 0; m < M; m++) {
          float* sum = &sums[routes.order[first + m] / top_k * kDownBlock];
          for (int64_t n = 0; n < size; n++) sum[n] += part[m * kDownBlock + n];
        }
      }
      for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < size; n++) y[t * H + h + n] = to_bf16(sums[t * kDownBlock + n]);
    }
  }
  return true;
}

// q, y [S, Hq, D], caches [blocks, block_size, Hkv, D], tables [S, B], lens [S]: each sequence's one query attends to the
// first `len` positions of its pages, none of them for 0.
extern "C" void attention(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int32_t* tables,
                          const int32_t* lens, bf16* y, int64_t S, int64_t Hq, int64_t Hkv, int64_t D,
                          int64_t block_size, int64_t B, float scale) {
  const int64_t G = Hq / Hkv;  // query heads of a KV head
#pragma omp parallel
  {
    std::vector<float> scores, sums(G * D);
    std::vector<const bf16*> queries(G);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t s = 0; s < S; s++)
      for (int64_t h = 0; h < Hkv; h++) {
        const int64_t len = lens[s], first = (s * Hq + h * G) * D;
        const auto place = [&](int64_t p) {
          return ((tables[s * B + p / block_size] * block_size + p % block_size) * Hkv + h) * D;
        };
        for (int64_t g = 0; g < G; g++) queries[g] = q + first + g * D;
        scores.resize(G * len);
        for (int64_t p = 0; p < len; p++) product(k_cache + place(p), 1, D, queries.data(), G, &scores[p], len);
        std::fill(sums.begin(), sums.end(), 0.f);
        std::vector<float> totals(G, 1.f);
        for (int64_t g = 0; g < G && len > 0; g++) totals[g] = unnormalized_softmax(&scores[g * len], len, scale);
        for (int64_t p = 0; p < len; p++) {
          const bf16* v = v_cache + place(p);
          for (int64_t g = 0; g < G; g++) {
            const float mass = scores[g * len + p];
            for (int64_t d = 0; d < D; d++) sums[g * D + d] += mass * to_float(v[d]);
          }
        }
        for (int64_t g = 0; g < G; g++)
          for (int64_t d = 0; d < D; d++) y[first + g * D + d] = to_bf16(sums[g * D + d] / totals[g]);
      }
  }
}
