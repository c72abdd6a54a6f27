// Attention of any number of queries of a sequence over its pages, in blocks of keys with a running softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// A block's keys, and then its values, are put into strips, so both products are those of product.h. Blocks begin at
// multiples of kKeys positions: what a query gives does not depend on the other queries, nor on whether the keys before
// it were written in this step or in an earlier one. (But a later value of its sequence in the step may be taken 0 times,
// which is NaN for one that is not finite.)

#include <limits>
#include <vector>

#include "product.h"

namespace {

constexpr int64_t kKeys = 128;  // at a time
constexpr int64_t kRows = 240;  // queries times heads of one KV head, at a time

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One head of one sequence in a paged cache [blocks, block_size, Hkv, D].
struct Pages {
  const int32_t* table;
  int64_t block_size, num_heads, head, D;

  // places[i] = where position `first` + i begins in the cache, for n positions.
  void find(int64_t first, int64_t n, int64_t* places) const {
    int64_t block = first / block_size, offset = first % block_size;
    for (int64_t i = 0; i < n; block++, offset = 0)
      for (; i < n && offset < block_size; i++, offset++)
        places[i] = ((table[block] * block_size + offset) * num_heads + head) * D;
  }
};

// `size` keys -> the strips of a matrix [size rounded up to kPair, D]; past the last it is repeated.
void keys_as_strips(const bf16* cache, const int64_t* places, int64_t size, int64_t D, bf16* strips) {
  for (int64_t n = 0; n < rounded_up(size, kPair); n += kLanes) {
    const bf16* rows[kLanes];
    for (int64_t i = 0; i < kLanes; i++) rows[i] = cache + places[std::min(n + i, size - 1)];
    pack_strip(rows, D, strips + n * D);
  }
}

// `size` values -> the strips of a matrix [D rounded up to kPair, size rounded up to 2].
void values_as_strips(const bf16* cache, const int64_t* places, int64_t size, int64_t D, bf16* strips) {
  const int64_t even = rounded_up(size, 2);
  for (int64_t n = 0; n < even; n += 2) {
    const bf16* values = cache + places[n];
    const bool has_next = n + 1 < size;
    const bf16* next = has_next ? cache + places[n + 1] : values;
    for (int64_t d = 0; d < rounded_up(D, kPair); d += kLanes) {
      const __mmask16 mask = D > d ? first_lanes(D - d) : 0;
      const __m512i even_lanes = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values + d));
      const __m512i odd_lanes = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_next ? mask : 0, next + d));
      _mm512_storeu_si512(strips + d * even + n * kLanes, _mm512_or_si512(even_lanes, _mm512_slli_epi32(odd_lanes, 16)));
    }
  }
}

// A query's softmax over the keys so far: e^(scale * (score - max)) are summed.
struct Softmax {
  float max = std::numeric_limits<float>::lowest(), total = 0;  // below it only -infinity, whose mass is 0

  // The masses of the first n of a block's scores, and 0 for the others up to `width`. Returns by what to multiply the
  // sums of the keys before.
  float add(const float* scores, int64_t n, int64_t width, float scale, bf16* masses) {
    __m512 most = _mm512_set1_ps(max);
    for (int64_t i = 0; i < n; i += kLanes)
      most = _mm512_mask_max_ps(most, first_lanes(n - i), most, _mm512_loadu_ps(scores + i));
    const float old_max = max;
    max = _mm512_reduce_max_ps(most);
    const __m512 new_max = _mm512_set1_ps(max), factor = _mm512_set1_ps(scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += kLanes) {
      const __mmask16 mask = n > i ? first_lanes(n - i) : 0;
      const __m512 exponent = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), new_max), factor);
      const __m512 mass = _mm512_maskz_mov_ps(mask, exponential(exponent));
      store(masses + i, mass);
      sum = _mm512_add_ps(sum, mass);
    }
    const __m512 change = exponential(_mm512_set1_ps((old_max - max) * scale));
    const float kept = old_max == max ? 1.f : _mm512_cvtss_f32(change);
    total = total * kept + _mm512_reduce_add_ps(sum);
    return kept;
  }
};

// What a thread needs for up to `rows` rows.
struct Scratch {
  int64_t width;  // of a row of sums
  std::vector<bf16> keys, values, masses;
  std::vector<float> scores, sums;
  std::vector<Softmax> softmax;
  std::vector<const bf16*> queries, mass_rows;

  Scratch(int64_t rows, int64_t D)
      : width(rounded_up(D, kPair)), keys(kKeys * D), values(kKeys * width), masses(rows * kKeys),
        scores(rows * kKeys), sums(rows * width), softmax(rows), queries(rows), mass_rows(rows) {
    for (int64_t r = 0; r < rows; r++) mass_rows[r] = &masses[r * kKeys];
  }
};

// Adds the keys from `first` on to `rows` rows, of which row r sees visible(r) positions.
template <class Visible>
void add_block(Scratch& scratch, const Pages& pages, const bf16* k_cache, const bf16* v_cache, int64_t first,
               int64_t size, int64_t rows, float scale, Visible visible) {
  const int64_t D = pages.D, width = rounded_up(size, kLanes);
  int64_t places[kKeys];
  pages.find(first, size, places);
  for (const bf16* cache : {k_cache, v_cache})  // all at once: pages lie anywhere
    for (int64_t i = 0; i < size; i++)
      for (int64_t d = 0; d < D; d += kPair) _mm_prefetch((const char*)(cache + places[i] + d), _MM_HINT_T1);
  keys_as_strips(k_cache, places, size, D, scratch.keys.data());
  for (int64_t n = 0; n < size; n += kPair) {
    const bf16* strip = &scratch.keys[n * D];
    products(strip, strip + kLanes * D, D, scratch.queries.data(), rows, &scratch.scores[n], kKeys);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t seen = std::clamp<int64_t>(visible(r) - first, 0, size);
    bf16* masses = &scratch.masses[r * kKeys];
    if (seen == 0) {
      std::fill(masses, masses + width, 0);
      continue;
    }
    const float kept = scratch.softmax[r].add(&scratch.scores[r * kKeys], seen, width, scale, masses);
    if (kept == 1) continue;
    float* sums = &scratch.sums[r * scratch.width];
    for (int64_t d = 0; d < scratch.width; d++) sums[d] *= kept;
  }
  values_as_strips(v_cache, places, size, D, scratch.values.data());
  const int64_t even = rounded_up(size, 2);
  for (int64_t d = 0; d < D; d += kPair) {
    const bf16* strip = &scratch.values[d * even];
    products(strip, strip + kLanes * even, even, scratch.mass_rows.data(), rows, [&](int64_t r, const float* added) {
      float* sums = &scratch.sums[r * scratch.width + d];
      for (int64_t i = 0; i < kPair; i++) sums[i] += added[i];
    });
  }
}

// Some queries of a sequence.
struct Queries {
  int64_t sequence, first, size;  // `first` is the row of the first
  int64_t before;                 // positions before that one
};

}  // namespace

// q, y [T, Hq, D], caches [blocks, block_size, Hkv, D], tables [S, B], starts [S + 1], lens [S]: the queries of sequence s
// are rows starts[s] to starts[s + 1] of q, row s where `starts` is null, and the last of the `lens[s]` positions of its
// pages. Each attends to its own position and those before it; one without any gives 0. D is even.
extern "C" void attention(const bf16* q, const bf16* k_cache, const bf16* v_cache, const int32_t* tables,
                          const int32_t* starts, const int32_t* lens, bf16* y, int64_t S, int64_t Hq, int64_t Hkv,
                          int64_t D, int64_t block_size, int64_t B, float scale) {
  const int64_t G = Hq / Hkv, most = std::max<int64_t>(1, kRows / G);  // query heads of a KV head; queries at a time
  std::vector<Queries> work;
  int64_t widest = 0;
  for (int64_t s = 0; s < S; s++)
    for (int64_t row = starts ? starts[s] : s, end = starts ? starts[s + 1] : s + 1; row < end; row += most) {
      work.push_back({s, row, std::min(most, end - row), lens[s] - (end - row)});
      widest = std::max(widest, work.back().size);
    }
#pragma omp parallel
  {
    Scratch scratch(widest * G, D);
#pragma omp for schedule(dynamic) collapse(2)
    for (size_t w = 0; w < work.size(); w++)
      for (int64_t h = 0; h < Hkv; h++) {
        const auto [s, first, size, before] = work[w];
        const Pages pages{tables + s * B, block_size, Hkv, h, D};
        const int64_t rows = size * G, begin = first * Hq + h * G;  // where they begin in q and y, in heads
        const auto place = [&](int64_t r) { return (begin + r / G * Hq + r % G) * D; };
        const auto visible = [&](int64_t r) { return before + r / G + 1; };
        for (int64_t r = 0; r < rows; r++) scratch.queries[r] = q + place(r);
        std::fill(scratch.softmax.begin(), scratch.softmax.end(), Softmax());
        std::fill(scratch.sums.begin(), scratch.sums.end(), 0.f);
        for (int64_t p = 0, end = visible(rows - 1); p < end; p += kKeys)
          add_block(scratch, pages, k_cache, v_cache, p, std::min(kKeys, end - p), rows, scale, visible);
        for (int64_t r = 0; r < rows; r++) {
          const float total = scratch.softmax[r].total;
          const __m512 factor = _mm512_set1_ps(visible(r) > 0 ? 1 / total : 0);
          for (int64_t d = 0; d < D; d += kLanes) {
            const __m512 sums = _mm512_loadu_ps(&scratch.sums[r * scratch.width + d]);
            store(y + place(r) + d, _mm512_mul_ps(sums, factor), first_lanes(D - d));
          }
        }
      }
  }
}
