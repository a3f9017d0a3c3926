// Blocks of 16 slots in attention: their keys and values gathered, scores, weights, weighted sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace stretto {

constexpr int kSlots = 16;  // list entries per block
constexpr int kMaxHeadDim = 256;
constexpr int kStride = kMaxHeadDim + 32;  // between a group's queries: in cache they fall apart

// Two bfloat16 numbers of a row in every lane.
inline Pairs pair_of(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return set1_pair(pair);
}

// Keys of a block, transposed: for each input the 16 slots' floats,
inline void gather_keys(const float* keys, const int32_t* slots, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    Words rows[16];
    for (int s = 0; s < kSlots; ++s) rows[s] = load_words(keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16; ++i) store_words(to + (d + i) * kSlots, rows[i]);
  }
}
// or for each two inputs the 16 slots' pairs of bfloat16.
inline void gather_keys(const bf16* keys, const int32_t* slots, int64_t dim, uint32_t* to) {
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    Words rows[16];
    const Lanes part = first_lanes((dim - d) / 2);
    for (int s = 0; s < kSlots; ++s) rows[s] = load_words(part, keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16 && d / 2 + i < dim / 2; ++i)
      store_words(to + (d / 2 + i) * kSlots, rows[i]);
  }
}

// Values of a block: floats, 16 x dim,
template <class T>
void gather_values(const T* values, const int32_t* slots, int64_t dim, float* to) {
  for (int64_t s = 0; s < kSlots; ++s) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      store_floats(to + s * dim + d, load_floats(values + slots[s] * dim + d));
    }
  }
}
// or pairs of bfloat16, 8 x dim: a word holds one input of two slots.
inline void gather_values(const bf16* values, const int32_t* slots, int64_t dim, uint32_t* to) {
  for (int64_t s = 0; s < kSlots; s += 2) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Words first = widened(values + slots[s] * dim + d);
      const Words second = widened(values + slots[s + 1] * dim + d);
      store_words(to + s / 2 * dim + d, both(first, raised(second)));
    }
  }
}

// exp(x), as a weight is stored.
inline void store_exp(float* to, Floats x) { store_floats(to, exp(x)); }
// Of 2^r, |r| <= 1/2, a cubic within 8e-5 of it (least squares of the relative error, reweighted
// until it is level): a small part of what bfloat16 rounds away.
inline void store_exp(bf16* to, Floats x) {
  const Floats y = x * set1(1.44269504f);
  const Floats n = round(y), r = y - n;
  Floats p = set1(0.05517166f);
  p = fmadd(p, r, set1(0.24261112f));
  p = fmadd(p, r, set1(0.69326099f));
  p = fmadd(p, r, set1(0.99992807f));
  store_halves(to, to_bf16_quickly(times_two_to(p, n)));
}

// Products of N queries with a block's keys, one lane a slot.
template <int N>
void dot(const float* keys, const float* queries, int64_t dim, Floats* sums) {
  Floats sum[N];
  for (int n = 0; n < N; ++n) sum[n] = no_floats();
  for (int64_t d = 0; d < dim; ++d) {
    const Floats k = load_floats(keys + d * kSlots);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
      sum[n] = fmadd(k, set1(queries[n * kStride + d]), sum[n]);
  }
  for (int n = 0; n < N; ++n) sums[n] = sum[n];
}

template <int N>
void dot(const uint32_t* keys, const bf16* queries, int64_t dim, Floats* sums) {
  Floats sum[N], other[N];  // two, or few queries would wait for each product in turn
  for (int n = 0; n < N; ++n) sum[n] = other[n] = no_floats();
  for (int64_t d = 0; d < dim; d += 4) {
    const Pairs k = pairs_at(keys + d / 2 * kSlots),
                   next = pairs_at(keys + (d / 2 + 1) * kSlots);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      sum[n] = add_products(sum[n], k, pair_of(queries + n * kStride + d));
      other[n] = add_products(other[n], next, pair_of(queries + n * kStride + d + 2));
    }
  }
  for (int n = 0; n < N; ++n) sums[n] = other[n] + sum[n];
}

template <int N>
void dot(const uint32_t* keys, const float* queries, int64_t dim, Floats* sums) {
  Floats sum[N];
  for (int n = 0; n < N; ++n) sum[n] = no_floats();
  for (int64_t d = 0; d < dim; d += 2) {
    const Words pair = load_words(keys + d / 2 * kSlots);
    const Floats even = lower_floats(pair), odd = upper_floats(pair);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      sum[n] = fmadd(even, set1(queries[n * kStride + d]), sum[n]);
      sum[n] = fmadd(odd, set1(queries[n * kStride + d + 1]), sum[n]);
    }
  }
  for (int n = 0; n < N; ++n) sums[n] = sum[n];
}

// Scores of N queries with `slots` slots, to `scores[n][0..slots)`.
template <int N, class Keys, class Query>
void score(const Keys* keys, int64_t slots, const Query* queries, int64_t dim, float scale,
           float* const* scores) {
  for (int64_t s = 0; s < slots; s += kSlots) {
    Floats sums[N];
    dot<N>(keys, queries, dim, sums);
    for (int n = 0; n < N; ++n)
      store_floats(scores[n] + s, sums[n] * set1(scale));
    keys += kSlots * dim / (std::is_same_v<Keys, float> ? 1 : 2);
  }
}

// Adds `slots` slots' values, weighted, to N sums of `dim` floats, in the slots' order.
template <int N>
void weigh(const float* values, int64_t slots, const float* const* weights, int64_t dim,
           float* const* sums) {
  for (int64_t d = 0; d < dim; d += 4 * kLanes) {
    const int vectors = static_cast<int>(std::min<int64_t>(4, (dim - d) / kLanes));
    Floats sum[N][4];
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = i < vectors ? load_floats(sums[n] + d + i * kLanes) : no_floats();
      }
    }
    if (vectors == 4) {
      for (int s = 0; s < slots; ++s) {
        const float* v = values + s * dim + d;
        const Floats v0 = load_floats(v), v1 = load_floats(v + kLanes);
        const Floats v2 = load_floats(v + 2 * kLanes), v3 = load_floats(v + 3 * kLanes);
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
          const Floats w = set1(weights[n][s]);
          sum[n][0] = fmadd(w, v0, sum[n][0]);
          sum[n][1] = fmadd(w, v1, sum[n][1]);
          sum[n][2] = fmadd(w, v2, sum[n][2]);
          sum[n][3] = fmadd(w, v3, sum[n][3]);
        }
      }
    } else {
      for (int s = 0; s < slots; ++s) {
        for (int n = 0; n < N; ++n) {
          const Floats w = set1(weights[n][s]);
          for (int i = 0; i < vectors; ++i) {
            const Floats v = load_floats(values + s * dim + d + i * kLanes);
            sum[n][i] = fmadd(w, v, sum[n][i]);
          }
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < vectors; ++i) store_floats(sums[n] + d + i * kLanes, sum[n][i]);
    }
  }
}

// The same in bfloat16: slots two by two, a word of `values` holding one input of both.
template <int N>
void weigh(const uint32_t* values, int64_t slots, const bf16* const* weights, int64_t dim,
           float* const* sums) {
  for (int64_t d = 0; d < dim; d += 4 * kLanes) {
    const int vectors = static_cast<int>(std::min<int64_t>(4, (dim - d) / kLanes));
    Floats sum[N][4];
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = i < vectors ? load_floats(sums[n] + d + i * kLanes) : no_floats();
      }
    }
    if (vectors == 4) {
      for (int s = 0; s < slots; s += 2) {
        const uint32_t* v = values + s / 2 * dim + d;
        const Pairs v0 = pairs_at(v), v1 = pairs_at(v + kLanes);
        const Pairs v2 = pairs_at(v + 2 * kLanes), v3 = pairs_at(v + 3 * kLanes);
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
          const Pairs w = pair_of(weights[n] + s);
          sum[n][0] = add_products(sum[n][0], w, v0);
          sum[n][1] = add_products(sum[n][1], w, v1);
          sum[n][2] = add_products(sum[n][2], w, v2);
          sum[n][3] = add_products(sum[n][3], w, v3);
        }
      }
    } else {
      for (int s = 0; s < slots; s += 2) {
        for (int n = 0; n < N; ++n) {
          const Pairs w = pair_of(weights[n] + s);
          for (int i = 0; i < vectors; ++i) {
            const Pairs v = pairs_at(values + s / 2 * dim + d + i * kLanes);
            sum[n][i] = add_products(sum[n][i], w, v);
          }
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < vectors; ++i) store_floats(sums[n] + d + i * kLanes, sum[n][i]);
    }
  }
}

// Reads the entries' keys and values once, one after the other, which memory delivers several times
// as fast as to the blocks below, each of which waits for its own.
template <class T>
void bring(const T* keys, const T* values, const int32_t* slots, int64_t n, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T), kPerWord = 4 / sizeof(T);
  Words all = no_words();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < dim; d += kLine) {
      const Lanes part = first_lanes((dim - d) / kPerWord);
      const int64_t at = slots[i] * dim + d;
      all = both(all, load_words(part, keys + at));
      all = both(all, load_words(part, values + at));
    }
  }
  count_as_used(all);  // or the compiler would leave the reading out
}

}  // namespace stretto
