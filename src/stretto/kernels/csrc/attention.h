// Attention of rows over scattered slots: a row reads the slots it sees, in the order of its list.
//
// A list is cut into chunks of 256 entries, a chunk into blocks of 16. Each chunk gives a partial
// softmax, and a row's partial results are merged in order. So a row's bits depend on its query
// and on the keys and values in its list, in order; not on where they lie, nor on other rows.
// Rows whose lists have the same slots in a block share the work of reading it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace stretto {

constexpr int kSlots = 16;   // list entries per block
constexpr int kChunk = 256;  // list entries per partial softmax
constexpr int kRows = 32;    // rows at a time
constexpr int kQueries = 8;  // queries per tile of scores
constexpr int kSums = 6;     // queries per tile of weighted values
constexpr int kMaxHeadDim = 256;

// What one row may see: `length` slots at `slots`, its own one included.
struct View {
  const int32_t* slots;
  int64_t length;
};

struct Heads {
  int64_t heads, kv_heads, dim, num_slots;
  float scale;
  int64_t group() const { return heads / kv_heads; }
};

// Keys of 16 slots, transposed so that a vector holds one input (bfloat16: two) of all of them.
struct KeysOf16 {
  alignas(64) __m512i words[kMaxHeadDim];
};

inline void gather_keys(const float* keys, const int32_t* slots, int64_t dim, KeysOf16& out) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    __m512i rows[16];
    for (int s = 0; s < kSlots; ++s) rows[s] = _mm512_loadu_si512(keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16; ++i) out.words[d + i] = rows[i];
  }
}

inline void gather_keys(const bf16* keys, const int32_t* slots, int64_t dim, KeysOf16& out) {
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    __m512i rows[16];
    const __mmask16 part = first_lanes((dim - d) / 2);
    for (int s = 0; s < kSlots; ++s)
      rows[s] = _mm512_maskz_loadu_epi32(part, keys + slots[s] * dim + d);
    transpose16(rows);
    for (int i = 0; i < 16 && d / 2 + i < dim / 2; ++i) out.words[d / 2 + i] = rows[i];
  }
}

// Scores of N queries with 16 slots, to `scores[n][0..16)`.
template <int N>
void score(const KeysOf16& keys, const float* const* queries, int64_t dim, float scale,
           float* const* scores) {
  __m512 sum[N];
  for (int n = 0; n < N; ++n) sum[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; ++d) {
    const __m512 k = _mm512_castsi512_ps(keys.words[d]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[n] = _mm512_fmadd_ps(k, _mm512_set1_ps(queries[n][d]), sum[n]);
  }
  for (int n = 0; n < N; ++n)
    _mm512_storeu_ps(scores[n], _mm512_mul_ps(sum[n], _mm512_set1_ps(scale)));
}

template <int N>
void score(const KeysOf16& keys, const bf16* const* queries, int64_t dim, float scale,
           float* const* scores) {
  __m512 sum[N];
  for (int n = 0; n < N; ++n) sum[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim / 2; ++d) {
    const __m512bh k = (__m512bh)keys.words[d];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      int32_t pair;
      std::memcpy(&pair, queries[n] + 2 * d, sizeof pair);
      sum[n] = _mm512_dpbf16_ps(sum[n], k, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  for (int n = 0; n < N; ++n)
    _mm512_storeu_ps(scores[n], _mm512_mul_ps(sum[n], _mm512_set1_ps(scale)));
}

template <int N>
void score_bf16_keys(const KeysOf16& keys, const float* const* queries, int64_t dim, float scale,
                     float* const* scores) {
  __m512 sum[N];
  for (int n = 0; n < N; ++n) sum[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 2) {
    const __m512i pair = keys.words[d / 2];
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xFFFF0000)));
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_fmadd_ps(even, _mm512_set1_ps(queries[n][d]), sum[n]);
      sum[n] = _mm512_fmadd_ps(odd, _mm512_set1_ps(queries[n][d + 1]), sum[n]);
    }
  }
  for (int n = 0; n < N; ++n)
    _mm512_storeu_ps(scores[n], _mm512_mul_ps(sum[n], _mm512_set1_ps(scale)));
}

// Adds the 16 slots' values, weighted, to N sums of `dim` floats, in the slots' order.
template <int N>
void weigh(const float* values, const float* const* weights, int64_t dim, float* const* sums) {
  for (int64_t d = 0; d < dim; d += 4 * kLanes) {
    const int vectors = static_cast<int>(std::min<int64_t>(4, (dim - d) / kLanes));
    __m512 sum[N][4];
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = i < vectors ? _mm512_loadu_ps(sums[n] + d + i * kLanes) : _mm512_setzero_ps();
      }
    }
    if (vectors == 4) {
      for (int s = 0; s < kSlots; ++s) {
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
      for (int s = 0; s < kSlots; ++s) {
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

// Calls `work(n)` with n as a constant, 1 <= n <= M.
template <int M, class Work>
void exactly(int64_t n, Work work) {
  if (n == M) return work(std::integral_constant<int, M>());
  if constexpr (M > 1) exactly<M - 1>(n, work);
}

// Calls `work(N, i)` for the N <= M items from i on, over 0 <= i < n in tiles of about equal size.
template <int M, class Work>
void in_tiles(int64_t n, Work work) {
  const int64_t tiles = (n + M - 1) / M;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = n * t / tiles;
    exactly<M>(n * (t + 1) / tiles - first, [&](auto size) { work(size, first); });
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

// One thread's memory for a chunk.
struct Workspace {
  KeysOf16 keys;
  alignas(64) float values[kSlots * kMaxHeadDim];
};

// Where a row's partial results lie: per head and chunk the largest score, the sum of exps and
// the weighted sum of values.
struct Partials {
  float* memory;
  int64_t heads, chunks, dim;
  static int64_t floats(int64_t heads, int64_t chunks, int64_t dim) {
    return kRows * heads * chunks * (dim + kLanes);
  }
  float* of(int64_t row, int64_t head, int64_t chunk) const {
    return memory + ((row * heads + head) * chunks + chunk) * (dim + kLanes);
  }
};

// The partial results of chunk `chunk` for all query heads of `kv_head` and all rows that reach it.
// `queries`: rows x heads x dim. `scores`: rows x group x 256 floats of this thread.
template <class Cache, class Query>
void attend_chunk(const Heads& h, const Cache* keys, const Cache* values, const Query* queries,
                  const View* views, int64_t rows, int64_t kv_head, int64_t chunk, float* scores,
                  Workspace& space, const Partials& out) {
  const int64_t first = chunk * kChunk, group = h.group(), dim = h.dim;
  keys += kv_head * h.num_slots * dim;
  values += kv_head * h.num_slots * dim;
  const auto count = [&](int64_t r) { return std::min<int64_t>(kChunk, views[r].length - first); };
  int64_t longest = 0;
  for (int64_t r = 0; r < rows; ++r) longest = std::max(longest, count(r));

  for (int64_t r = 0; r < rows; ++r) {  // of rows that begin alike, the last is the longest
    const bool more = r + 1 < rows && views[r + 1].length > first;
    if (count(r) > 0 && !(more && views[r + 1].slots[first] == views[r].slots[first])) {
      bring(keys, values, views[r].slots + first, count(r), dim);
    }
  }

  // Calls `work(rows that share the block, how many, its 16 slots)` for each block.
  const auto for_blocks = [&](auto work) {
    int64_t members[kRows];
    int32_t shared[kSlots], own[kSlots];
    for (int64_t b = 0; b < longest; b += kSlots) {
      int64_t num = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = std::min<int64_t>(kSlots, count(r) - b);
        if (n <= 0) continue;
        const int32_t* list = views[r].slots + first + b;
        for (int64_t s = 0; s < kSlots; ++s) own[s] = list[s < n ? s : n - 1];
        if (num > 0 && std::memcmp(own, shared, sizeof own) != 0) {
          work(b, members, num, shared);
          num = 0;
        }
        if (num == 0) std::memcpy(shared, own, sizeof own);
        members[num++] = r;
      }
      if (num > 0) work(b, members, num, shared);
    }
  };

  for_blocks([&](int64_t b, const int64_t* members, int64_t num, const int32_t* slots) {
    gather_keys(keys, slots, dim, space.keys);
    in_tiles<kQueries>(num * group, [&](auto size, int64_t first_query) {
      constexpr int N = size();
      const Query* from[N];
      float* to[N];
      for (int n = 0; n < N; ++n) {
        const int64_t r = members[(first_query + n) / group], g = (first_query + n) % group;
        from[n] = queries + (r * h.heads + kv_head * group + g) * dim;
        to[n] = scores + (r * group + g) * kChunk + b;
      }
      if constexpr (std::is_same_v<Cache, bf16> && std::is_same_v<Query, float>) {
        score_bf16_keys<N>(space.keys, from, dim, h.scale, to);
      } else {
        score<N>(space.keys, from, dim, h.scale, to);
      }
    });
  });

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = count(r);
    if (n <= 0) continue;
    for (int64_t g = 0; g < group; ++g) {
      float* s = scores + (r * group + g) * kChunk;
      __m512 top = _mm512_set1_ps(-INFINITY);
      for (int64_t i = 0; i < n; i += kLanes) {
        top = _mm512_mask_max_ps(top, first_lanes(n - i), top, _mm512_loadu_ps(s + i));
      }
      const float most = _mm512_reduce_max_ps(top);
      __m512 total = _mm512_setzero_ps();
      for (int64_t i = 0; i < n; i += kLanes) {
        const __m512 e = _mm512_maskz_mov_ps(
            first_lanes(n - i), exp(_mm512_sub_ps(_mm512_loadu_ps(s + i), _mm512_set1_ps(most))));
        _mm512_storeu_ps(s + i, e);
        total = _mm512_add_ps(total, e);
      }
      float* to = out.of(r, kv_head * group + g, chunk);
      std::memset(to, 0, dim * sizeof(float));
      to[dim] = most;
      to[dim + 1] = _mm512_reduce_add_ps(total);
    }
  }

  for_blocks([&](int64_t b, const int64_t* members, int64_t num, const int32_t* slots) {
    for (int64_t s = 0; s < kSlots; ++s) {
      for (int64_t d = 0; d < dim; d += kLanes) {
        _mm512_storeu_ps(space.values + s * dim + d, load_floats(values + slots[s] * dim + d));
      }
    }
    in_tiles<kSums>(num * group, [&](auto size, int64_t first_query) {
      constexpr int N = size();
      const float* weights[N];
      float* sums[N];
      for (int n = 0; n < N; ++n) {
        const int64_t r = members[(first_query + n) / group], g = (first_query + n) % group;
        weights[n] = scores + (r * group + g) * kChunk + b;
        sums[n] = out.of(r, kv_head * group + g, chunk);
      }
      weigh<N>(space.values, weights, dim, sums);
    });
  });
}

// One row's and head's attention, from its partial results, to `to[0..dim)`.
inline void merge_chunks(const Partials& p, int64_t row, int64_t head, int64_t chunks, float* to) {
  float most = p.of(row, head, 0)[p.dim];
  for (int64_t c = 1; c < chunks; ++c) most = std::max(most, p.of(row, head, c)[p.dim]);
  float weight[1], total = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    const float* part = p.of(row, head, c);
    _mm512_mask_storeu_ps(weight, 1, exp(_mm512_set1_ps(part[p.dim] - most)));
    total += weight[0] * part[p.dim + 1];
    for (int64_t d = 0; d < p.dim; d += kLanes) {
      const __m512 before = c == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(to + d);
      _mm512_storeu_ps(
          to + d, _mm512_fmadd_ps(_mm512_set1_ps(weight[0]), _mm512_loadu_ps(part + d), before));
    }
  }
  const __m512 scale = _mm512_set1_ps(1.0f / total);
  for (int64_t d = 0; d < p.dim; d += kLanes) {
    _mm512_storeu_ps(to + d, _mm512_mul_ps(_mm512_loadu_ps(to + d), scale));
  }
}

}  // namespace stretto
