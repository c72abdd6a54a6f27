// What a step does to each token on its own, apart from products: norms, rotations, the choice of experts, SwiGLU. One
// pass each.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kFewTokens = 4;  // for which waking other threads takes longer than the work

// 1 / rms of n values, each loaded 16 at a time.
template <class Load>
__m512 inverse_rms(int64_t n, float eps, Load load_from) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 x = load_from(i);
    sum = _mm512_fmadd_ps(x, x, sum);
  }
  return _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(sum) / n + eps));
}

// A head of D values, normed and rotated by its position's D/2 cosines and D/2 sines.
void rotate(const bf16* head, const float* norm, const float* cosines, int64_t D, float eps, bf16* out) {
  const int64_t half = D / 2;
  const __m512 scale = inverse_rms(D, eps, [&](int64_t i) { return load(head + i, first_lanes(D - i)); });
  for (int64_t i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first_lanes(half - i);
    const auto normed = [&](int64_t d) {
      return _mm512_mul_ps(_mm512_mul_ps(load(head + d, mask), scale), _mm512_maskz_loadu_ps(mask, norm + d));
    };
    const __m512 a = normed(i), b = normed(half + i);
    const __m512 cosine = _mm512_maskz_loadu_ps(mask, cosines + i);
    const __m512 sine = _mm512_maskz_loadu_ps(mask, cosines + half + i);
    store(out + i, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)), mask);
    store(out + half + i, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)), mask);
  }
}

}  // namespace

// x [T, H], residual [T, H] or null, weight [H] -> y [T, H] = weight * total / rms(total), where total = x + residual is
// left in `total` [T, H], or total = x and `total` null.
extern "C" void rms_norm(const bf16* x, const bf16* residual, const bf16* weight, bf16* y, bf16* total, int64_t T,
                         int64_t H, float eps) {
#pragma omp parallel for if (T > kFewTokens)
  for (int64_t t = 0; t < T; t++) {
    const bf16* row = x + t * H;
    if (residual) {
      for (int64_t i = 0; i < H; i += kLanes) {
        const __mmask16 mask = first_lanes(H - i);
        store(total + t * H + i, _mm512_add_ps(load(row + i, mask), load(residual + t * H + i, mask)), mask);
      }
      row = total + t * H;
    }
    const __m512 scale = inverse_rms(H, eps, [&](int64_t i) { return load(row + i, first_lanes(H - i)); });
    for (int64_t i = 0; i < H; i += kLanes) {
      const __mmask16 mask = first_lanes(H - i);
      store(y + t * H + i, _mm512_mul_ps(_mm512_mul_ps(load(row + i, mask), scale), load(weight + i, mask)), mask);
    }
  }
}

// qkv [T, Hq + 2 * Hkv, D] -> q [T, Hq, D], normed and rotated; keys, too, and values go to their slots of the caches
// [slots, Hkv, D]; those of a token whose slot is negative go nowhere. norms [Hq + Hkv, D], cos_sin [P, D].
extern "C" void cache_heads(const bf16* qkv, const float* norms, const float* cos_sin, const int32_t* positions,
                            const int32_t* slots, bf16* q, bf16* k_cache, bf16* v_cache, int64_t T, int64_t Hq,
                            int64_t Hkv, int64_t D, float eps) {
#pragma omp parallel for if (T > kFewTokens)
  for (int64_t t = 0; t < T; t++) {
    const bf16* heads = qkv + t * (Hq + 2 * Hkv) * D;
    const float* cosines = cos_sin + int64_t(positions[t]) * D;
    for (int64_t h = 0; h < Hq; h++) rotate(heads + h * D, norms + h * D, cosines, D, eps, q + (t * Hq + h) * D);
    if (slots[t] < 0) continue;
    const int64_t place = int64_t(slots[t]) * Hkv * D;
    for (int64_t h = 0; h < Hkv; h++)
      rotate(heads + (Hq + h) * D, norms + (Hq + h) * D, cosines, D, eps, k_cache + place + h * D);
    std::copy_n(heads + (Hq + Hkv) * D, Hkv * D, v_cache + place);
  }
}

// logits [T, E] -> weights, expert_ids [T, K]: the K largest by softmax, the lower id first on ties; with `renormalize`
// a token's weights sum to 1. A logit that is NaN makes all of its token's weights NaN.
extern "C" void route(const bf16* logits, float* weights, int32_t* expert_ids, int64_t T, int64_t E, int64_t K,
                      bool renormalize) {
#pragma omp parallel if (T > kFewTokens)
  {
    std::vector<float> row(E), keys(E);
    std::vector<int32_t> order(E);
#pragma omp for
    for (int64_t t = 0; t < T; t++) {
      for (int64_t e = 0; e < E; e++) {
        row[e] = to_float(logits[t * E + e]);
        keys[e] = std::isnan(row[e]) ? -INFINITY : row[e];  // which have an order
      }
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + K, order.end(),
                        [&](int32_t a, int32_t b) { return keys[a] != keys[b] ? keys[a] > keys[b] : a < b; });
      const __m512 most = _mm512_set1_ps(keys[order[0]]);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t e = 0; e < E; e += kLanes) {
        const __mmask16 mask = first_lanes(E - e);
        const __m512 mass = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, &row[e]), most));
        _mm512_mask_storeu_ps(&row[e], mask, mass);
        sum = _mm512_mask_add_ps(sum, mask, sum, mass);
      }
      float total = _mm512_reduce_add_ps(sum);
      if (renormalize && !std::isnan(total)) {
        total = 0;
        for (int64_t k = 0; k < K; k++) total += row[order[k]];
      }
      for (int64_t k = 0; k < K; k++) {
        weights[t * K + k] = row[order[k]] / total;
        expert_ids[t * K + k] = order[k];
      }
    }
  }
}

// x [T, 2 * F], gates first -> y [T, F].
extern "C" void swiglu(const bf16* x, bf16* y, int64_t T, int64_t F) {
#pragma omp parallel for if (T > kFewTokens)
  for (int64_t t = 0; t < T; t++) {
    const bf16* gates = x + t * 2 * F;
    for (int64_t f = 0; f < F; f += kLanes) {
      const __mmask16 mask = first_lanes(F - f);
      store(y + t * F + f, swiglu(load(gates + f, mask), load(gates + F + f, mask)), mask);
    }
  }
}
