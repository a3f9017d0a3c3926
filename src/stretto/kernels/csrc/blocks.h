// Blocks of 16 slots in attention: their keys and values gathered, scores, weights, weighted sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace stretto {

constexpr int kSlots = 16;    // list entries per block
constexpr int kQueries = 12;  // queries per tile of scores
constexpr int kSums = 6;      // queries per tile of weighted values
constexpr int kMaxHeadDim = 256;
constexpr int kStride = kMaxHeadDim + 32;  // between a group's queries: in cache they fall apart

// Two bfloat16 numbers of a row in every lane, and two of each lane's own.
inline __m512bh pair_of(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}
inline __m512bh pairs_at(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Keys of a block, transposed: for each input the 16 slots' floats,
inline void gather_keys(const float* keys, const int32_t* slots, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    __m512i rows[16];
    for (int s = 0; s < kSlots; ++s) rows[s] = _mm512_loadu_si512(keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i) * kSlots, rows[i]);
  }
}
// or for each two inputs the 16 slots' pairs of bfloat16.
inline void gather_keys(const bf16* keys, const int32_t* slots, int64_t dim, uint32_t* to) {
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    __m512i rows[16];
    const __mmask16 part = first_lanes((dim - d) / 2);
    for (int s = 0; s < kSlots; ++s)
      rows[s] = _mm512_maskz_loadu_epi32(part, keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16 && d / 2 + i < dim / 2; ++i)
      _mm512_storeu_si512(to + (d / 2 + i) * kSlots, rows[i]);
  }
}

// Values of a block: floats, 16 x dim,
template <class T>
void gather_values(const T* values, const int32_t* slots, int64_t dim, float* to) {
  for (int64_t s = 0; s < kSlots; ++s) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      _mm512_storeu_ps(to + s * dim + d, load_floats(values + slots[s] * dim + d));
    }
  }
}
// or pairs of bfloat16, 8 x dim: a word holds one input of two slots.
inline void gather_values(const bf16* values, const int32_t* slots, int64_t dim, uint32_t* to) {
  for (int64_t s = 0; s < kSlots; s += 2) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const __m512i first = load_words(values + slots[s] * dim + d);
      const __m512i second = load_words(values + slots[s + 1] * dim + d);
      _mm512_storeu_si512(to + s / 2 * dim + d,
                          _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
  }
}

// exp(x), as a weight is stored.
inline void store_exp(float* to, __m512 x) { _mm512_storeu_ps(to, exp(x)); }
// Of 2^r, |r| <= 1/2, a cubic within 8e-5 of it (least squares of the relative error, reweighted
// until it is level): a small part of what bfloat16 rounds away.
inline void store_exp(bf16* to, __m512 x) {
  const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(y, 0x08), r = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(0.05517166f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24261112f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69326099f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992807f));
  const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_scalef_ps(p, n));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)rounded);
}

// Products of N queries with a block's keys, one lane a slot.
template <int N>
void dot(const float* keys, const float* queries, int64_t dim, __m512* sums) {
  __m512 sum[N];
  for (int n = 0; n < N; ++n) sum[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; ++d) {
    const __m512 k = _mm512_loadu_ps(keys + d * kSlots);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
      sum[n] = _mm512_fmadd_ps(k, _mm512_set1_ps(queries[n * kStride + d]), sum[n]);
  }
  for (int n = 0; n < N; ++n) sums[n] = sum[n];
}

template <int N>
void dot(const uint32_t* keys, const bf16* queries, int64_t dim, __m512* sums) {
  __m512 sum[N], other[N];  // two, or few queries would wait for each product in turn
  for (int n = 0; n < N; ++n) sum[n] = other[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 4) {
    const __m512bh k = pairs_at(keys + d / 2 * kSlots),
                   next = pairs_at(keys + (d / 2 + 1) * kSlots);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_dpbf16_ps(sum[n], k, pair_of(queries + n * kStride + d));
      other[n] = _mm512_dpbf16_ps(other[n], next, pair_of(queries + n * kStride + d + 2));
    }
  }
  for (int n = 0; n < N; ++n) sums[n] = _mm512_add_ps(sum[n], other[n]);
}

template <int N>
void dot(const uint32_t* keys, const float* queries, int64_t dim, __m512* sums) {
  __m512 sum[N];
  for (int n = 0; n < N; ++n) sum[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 2) {
    const __m512i pair = _mm512_loadu_si512(keys + d / 2 * kSlots);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xFFFF0000)));
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_fmadd_ps(even, _mm512_set1_ps(queries[n * kStride + d]), sum[n]);
      sum[n] = _mm512_fmadd_ps(odd, _mm512_set1_ps(queries[n * kStride + d + 1]), sum[n]);
    }
  }
  for (int n = 0; n < N; ++n) sums[n] = sum[n];
}

// Scores of N queries with `slots` slots, to `scores[n][0..slots)`.
template <int N, class Keys, class Query>
void score(const Keys* keys, int64_t slots, const Query* queries, int64_t dim, float scale,
           float* const* scores) {
  for (int64_t s = 0; s < slots; s += kSlots) {
    __m512 sums[N];
    dot<N>(keys, queries, dim, sums);
    for (int n = 0; n < N; ++n)
      _mm512_storeu_ps(scores[n] + s, _mm512_mul_ps(sums[n], _mm512_set1_ps(scale)));
    keys += kSlots * dim / (std::is_same_v<Keys, float> ? 1 : 2);
  }
}

// Adds `slots` slots' values, weighted, to N sums of `dim` floats, in the slots' order.
template <int N>
void weigh(const float* values, int64_t slots, const float* const* weights, int64_t dim,
           float* const* sums) {
  for (int64_t d = 0; d < dim; d += 4 * kLanes) {
    const int vectors = static_cast<int>(std::min<int64_t>(4, (dim - d) / kLanes));
    __m512 sum[N][4];
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = i < vectors ? _mm512_loadu_ps(sums[n] + d + i * kLanes) : _mm512_setzero_ps();
      }
    }
    if (vectors == 4) {
      for (int s = 0; s < slots; ++s) {
        const float* v = values + s * dim + d;
        const __m512 v0 = _mm512_loadu_ps(v), v1 = _mm512_loadu_ps(v + kLanes);
        const __m512 v2 = _mm512_loadu_ps(v + 2 * kLanes), v3 = _mm512_loadu_ps(v + 3 * kLanes);
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
          const __m512 w = _mm512_set1_ps(weights[n][s]);
          sum[n][0] = _mm512_fmadd_ps(w, v0, sum[n][0]);
          sum[n][1] = _mm512_fmadd_ps(w, v1, sum[n][1]);
          sum[n][2] = _mm512_fmadd_ps(w, v2, sum[n][2]);
          sum[n][3] = _mm512_fmadd_ps(w, v3, sum[n][3]);
        }
      }
    } else {
      for (int s = 0; s < slots; ++s) {
        for (int n = 0; n < N; ++n) {
          const __m512 w = _mm512_set1_ps(weights[n][s]);
          for (int i = 0; i < vectors; ++i) {
            const __m512 v = _mm512_loadu_ps(values + s * dim + d + i * kLanes);
            sum[n][i] = _mm512_fmadd_ps(w, v, sum[n][i]);
          }
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < vectors; ++i) _mm512_storeu_ps(sums[n] + d + i * kLanes, sum[n][i]);
    }
  }
}

// The same in bfloat16: slots two by two, a word of `values` holding one input of both.
template <int N>
void weigh(const uint32_t* values, int64_t slots, const bf16* const* weights, int64_t dim,
           float* const* sums) {
  for (int64_t d = 0; d < dim; d += 4 * kLanes) {
    const int vectors = static_cast<int>(std::min<int64_t>(4, (dim - d) / kLanes));
    __m512 sum[N][4];
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = i < vectors ? _mm512_loadu_ps(sums[n] + d + i * kLanes) : _mm512_setzero_ps();
      }
    }
    if (vectors == 4) {
      for (int s = 0; s < slots; s += 2) {
        const uint32_t* v = values + s / 2 * dim + d;
        const __m512bh v0 = pairs_at(v), v1 = pairs_at(v + kLanes);
        const __m512bh v2 = pairs_at(v + 2 * kLanes), v3 = pairs_at(v + 3 * kLanes);
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
          const __m512bh w = pair_of(weights[n] + s);
          sum[n][0] = _mm512_dpbf16_ps(sum[n][0], w, v0);
          sum[n][1] = _mm512_dpbf16_ps(sum[n][1], w, v1);
          sum[n][2] = _mm512_dpbf16_ps(sum[n][2], w, v2);
          sum[n][3] = _mm512_dpbf16_ps(sum[n][3], w, v3);
        }
      }
    } else {
      for (int s = 0; s < slots; s += 2) {
        for (int n = 0; n < N; ++n) {
          const __m512bh w = pair_of(weights[n] + s);
          for (int i = 0; i < vectors; ++i) {
            const __m512bh v = pairs_at(values + s / 2 * dim + d + i * kLanes);
            sum[n][i] = _mm512_dpbf16_ps(sum[n][i], w, v);
          }
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < vectors; ++i) _mm512_storeu_ps(sums[n] + d + i * kLanes, sum[n][i]);
    }
  }
}

// Reads the entries' keys and values once, one after the other, which memory delivers several times
// as fast as to the blocks below, each of which waits for its own.
template <class T>
void bring(const T* keys, const T* values, const int32_t* slots, int64_t n, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T), kPerWord = 4 / sizeof(T);
  __m512i all = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < dim; d += kLine) {
      const __mmask16 part = first_lanes((dim - d) / kPerWord);
      const int64_t at = slots[i] * dim + d;
      all = _mm512_or_si512(all, _mm512_maskz_loadu_epi32(part, keys + at));
      all = _mm512_or_si512(all, _mm512_maskz_loadu_epi32(part, values + at));
    }
  }
  asm volatile("" : : "v"(all));  // or the compiler would leave the reading out
}

}  // namespace stretto
