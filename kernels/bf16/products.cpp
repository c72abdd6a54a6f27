// Linears and experts. product.h says how weights lie.

#include <vector>

#include "product.h"

namespace {

constexpr int64_t kRowBlock = 192;   // rows of x that a second-level cache holds while strips go by
constexpr int64_t kInnerBlock = 32;  // columns of an expert that a thread takes at a time
constexpr int64_t kFewTokens = 64;   // up to so many, a thread takes kDownBlock columns of y at a time, else kPair
constexpr int64_t kDownBlock = 128;

// The strip after one, or itself where that is the last.
const bf16* next_strip(const bf16* strip, int64_t K, bool is_last) { return is_last ? strip : strip + kLanes * K; }

// Which rows go through which experts. Assignment a is token a / top_k's choice a % top_k.
struct Routes {
  std::vector<int32_t> starts;  // [E + 1] where each expert's begin in `order`
  std::vector<int32_t> order;   // [A] the assignments, by expert

  Routes(const int32_t* expert_ids, int64_t A, int64_t E) : starts(E + 1), order(A) {
    for (int64_t a = 0; a < A; a++) starts[expert_ids[a] + 1]++;
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

// w [N, K] -> the same in strips. It may not be done in place.
extern "C" void pack(const bf16* w, bf16* strips, int64_t N, int64_t K) {
#pragma omp parallel for
  for (int64_t first = 0; first < N; first += kLanes) {
    const bf16* rows[kLanes];
    for (int64_t n = 0; n < kLanes; n++) rows[n] = w + (first + n) * K;
    pack_strip(rows, K, strips + first * K);
  }
}

// x [T, K], w [N, K] in strips, bias [N] or null -> y [T, N].
extern "C" void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t T, int64_t N, int64_t K) {
  std::vector<const bf16*> rows(T);
  for (int64_t t = 0; t < T; t++) rows[t] = x + t * K;
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (int64_t block = 0; block < T; block += kRowBlock)
    for (int64_t n = 0; n < N; n += kPair) {
      const bool is_last = n + kLanes == N;
      const bf16* strip = w + n * K;
      const __m512 low = bias ? load(bias + n) : _mm512_setzero_ps();
      const __m512 high = bias && !is_last ? load(bias + n + kLanes) : _mm512_setzero_ps();
      const int64_t size = std::min(kRowBlock, T - block);
      products(strip, next_strip(strip, K, is_last), K, &rows[block], size, [&](int64_t m, const float* sums) {
        bf16* out = y + (block + m) * N + n;
        store(out, _mm512_add_ps(_mm512_loadu_ps(sums), low));
        if (!is_last) store(out + kLanes, _mm512_add_ps(_mm512_loadu_ps(sums + kLanes), high));
      });
    }
}

// x [T, H] -> y [T, H], the sum over each token's experts of weight * (down @ (silu(gate @ x) * (up @ x))). Expert e has
// F = offsets[e + 1] - offsets[e] columns, a multiple of 16, 0 allowed: gate [F, H] and up [F, H], one after the other,
// from row 2 * offsets[e] of gate_up on, and down [H, F] from down + H * offsets[e] on, all in strips.
// weights, expert_ids [T, top_k]. Returns false, and does nothing, where an id is none of an expert.
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
  const int64_t down_block = T <= kFewTokens ? kDownBlock : kPair;
#pragma omp parallel
  {
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < work.size(); i++) {
      const auto [e, first, size] = work[i];
      const int64_t begin = starts[e], F = offsets[e + 1] - offsets[e];
      for (int64_t f = first; f < first + size; f += kLanes) {
        const bf16* gate = gate_up + (2 * int64_t(offsets[e]) + f) * H;
        products(gate, gate + F * H, H, &x_rows[begin], starts[e + 1] - begin, [&](int64_t m, const float* sums) {
          const __m512 value = swiglu(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + kLanes));
          const __m512 weight = _mm512_set1_ps(weights[routes.order[begin + m]]);
          store(&inner[(begin + m) * widest + f], _mm512_mul_ps(value, weight));
        });
      }
    }
    std::vector<float> totals(T * down_block);
#pragma omp for schedule(dynamic)
    for (int64_t block = 0; block < H; block += down_block) {  // a thread has these columns of y alone
      const int64_t size = std::min(down_block, H - block);
      std::fill(totals.begin(), totals.end(), 0.f);
      for (int64_t e = 0; e < E; e++) {
        const int64_t begin = starts[e], M = starts[e + 1] - begin, F = offsets[e + 1] - offsets[e];
        if (M == 0 || F == 0) continue;
        const bf16* matrix = down + H * int64_t(offsets[e]);
        for (int64_t h = 0; h < size; h += kPair) {
          const bf16* strip = matrix + (block + h) * F;
          products(strip, next_strip(strip, F, h + kLanes == size), F, &inner_rows[begin], M, [&](int64_t m, const float* sums) {
            float* total = &totals[routes.order[begin + m] / top_k * down_block + h];  // there is room for a pair
            for (int64_t n = 0; n < kPair; n += kLanes)
              _mm512_storeu_ps(total + n, _mm512_add_ps(_mm512_loadu_ps(total + n), _mm512_loadu_ps(sums + n)));
          });
        }
      }
      for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < size; n += kLanes)
          store(y + t * H + block + n, _mm512_loadu_ps(&totals[t * down_block + n]));
    }
  }
  return true;
}
