// Attention of rows over scattered slots: a row reads the slots it sees, in the order of its list.
//
// A list is cut into chunks of 256 entries, a chunk into blocks of 16. Each chunk gives a partial
// softmax, and a row's partial results are merged in order. So a row's bits depend on its query
// and on the keys and values in its list, in order; not on where they lie, nor on other rows.
// Rows whose lists have the same slots in blocks on end share the work of reading them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"
#include "team.h"

namespace stretto {

constexpr int kSlots = 16;    // list entries per block
constexpr int kChunk = 256;   // list entries per partial softmax
constexpr int kRows = 32;     // rows at a time
constexpr int kQueries = 12;  // queries per tile of scores
constexpr int kSums = 6;      // queries per tile of weighted values
constexpr int kMaxHeadDim = 256;
constexpr int kStride = kMaxHeadDim + 32;  // between a group's queries: in cache they fall apart

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

// Rows (bit r: row r) whose lists have the same slots from entry `first` to before `last`.
struct Group {
  uint32_t rows;
  int32_t first, last;
};

// The slots of a list's block from entry `at` on; after the list's end its last one again.
inline __m512i block_of(const View& view, int64_t at) {
  const __m512i last = _mm512_set1_epi32(view.slots[view.length - 1]);
  return _mm512_mask_loadu_epi32(last, first_lanes(view.length - at), view.slots + at);
}

// The rows' blocks of the chunk that begins at entry `first`: neighbours with the same slots
// together, and blocks on end with the same rows. Each row's blocks come in order.
inline int64_t group_rows(const View* views, int64_t rows, int64_t first, Group* groups) {
  int64_t num = 0, open = 0;  // groups from `open` on may reach the block before
  for (int64_t b = 0; b < kChunk; b += kSlots) {
    __m512i shared = _mm512_setzero_si512();
    uint32_t together = 0;
    const int64_t num_before = num;
    const auto close = [&] {
      if (together == 0) return;
      for (int64_t i = open; i < num_before; ++i) {
        if (groups[i].rows == together && groups[i].last == b) {
          groups[i].last = b + kSlots;
          return;
        }
      }
      groups[num++] = {together, static_cast<int32_t>(b), static_cast<int32_t>(b + kSlots)};
    };
    for (int64_t r = 0; r < rows; ++r) {
      if (views[r].length <= first + b) continue;
      const __m512i own = block_of(views[r], first + b);
      if (together != 0 && _mm512_cmpneq_epi32_mask(own, shared) != 0) {
        close();
        together = 0;
      }
      shared = own;
      together |= 1u << r;
    }
    close();
    while (open < num && groups[open].last < b + kSlots) ++open;
  }
  return num;
}

// One thread's memory for a chunk. `gathered` holds a group's keys, then its values.
template <class Query>
struct Workspace {
  float* scores;    // rows x group x 256
  Query* queries;   // kQueries x kStride
  float* gathered;  // 256 x dim
  Group* groups;    // rows x 16

  Workspace(Arena& arena, const Heads& h)
      : scores(arena.take<float>(kRows * h.group() * kChunk)),
        queries(arena.take<Query>(kQueries * kStride)),
        gathered(arena.take<float>(kChunk * h.dim)),
        groups(arena.take<Group>(kRows * kChunk / kSlots)) {}
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

// The partial results of one chunk for the query heads of one head of keys and values, and all
// rows that reach it. `queries`: rows x heads x dim; `keys` and `values`: slots x dim.
template <class Cache, class Query>
struct ChunkOfHead {
  using Keys = std::conditional_t<std::is_same_v<Cache, float>, float, uint32_t>;
  using Weight = Query;
  using Values = std::conditional_t<std::is_same_v<Query, bf16>, uint32_t, float>;
  static constexpr int64_t kKeysPerWord = sizeof(Keys) / sizeof(Cache);
  static constexpr int64_t kValuesPerWord = sizeof(Values) / sizeof(Weight);

  const Heads& h;
  const Cache *keys, *values;
  const Query* queries;
  const View* views;
  const int64_t rows, kv_head, chunk;
  const Workspace<Query>& space;
  const Partials& out;
  const int64_t first = chunk * kChunk, group = h.group(), dim = h.dim;

  void run() const {
    const int64_t num_groups = group_rows(views, rows, first, space.groups);
    for (int64_t i = 0; i < num_groups; ++i) {
      const Group& g = space.groups[i];
      const View& view = views[__builtin_ctz(g.rows)];
      const int64_t last = std::min(first + g.last, view.length);
      bring(keys, values, view.slots + first + g.first, last - first - g.first, dim);
    }
    for (int64_t i = 0; i < num_groups; ++i) score_group(space.groups[i]);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t q = 0; q < group && count(r) > 0; ++q) soften(r, q);
    }
    for (int64_t i = 0; i < num_groups; ++i) weigh_group(space.groups[i]);
  }

  int64_t count(int64_t r) const { return std::min<int64_t>(kChunk, views[r].length - first); }
  int64_t head(int64_t q) const { return kv_head * group + q; }
  float* scores(int64_t r, int64_t q) const { return space.scores + (r * group + q) * kChunk; }

  // Calls `work(N, which)` for tiles of N of a group's queries; `which(n)` is the row of the n-th,
  // and the query of that row.
  template <int M, class Work>
  void in_tiles_of(const Group& g, Work work) const {
    int64_t members[kRows], num = 0;
    for (uint32_t left = g.rows; left != 0; left &= left - 1) {
      members[num++] = __builtin_ctz(left);
    }
    in_tiles<M>(num * group, [&](auto size, int64_t i) {
      work(size, [&](int n) { return std::pair(members[(i + n) / group], (i + n) % group); });
    });
  }

  template <class Gather>
  void for_blocks(const Group& g, Gather gather) const {  // gather(place in the group, slots)
    for (int64_t b = g.first; b < g.last; b += kSlots) {
      alignas(64) int32_t slots[kSlots];
      _mm512_store_si512(slots, block_of(views[__builtin_ctz(g.rows)], first + b));
      gather(b - g.first, slots);
    }
  }

  void score_group(const Group& g) const {
    Keys* gathered = reinterpret_cast<Keys*>(space.gathered);
    for_blocks(g, [&](int64_t at, const int32_t* slots) {
      gather_keys(keys, slots, dim, gathered + at * dim / kKeysPerWord);
    });
    in_tiles_of<kQueries>(g, [&](auto size, auto which) {
      constexpr int N = size();
      float* to[N];
      for (int n = 0; n < N; ++n) {
        const auto [r, q] = which(n);
        std::memcpy(space.queries + n * kStride, queries + (r * h.heads + head(q)) * dim,
                    dim * sizeof(Query));
        to[n] = scores(r, q) + g.first;
      }
      score<N>(gathered, g.last - g.first, space.queries, dim, h.scale, to);
    });
  }

  // The exponentials of a query's scores, in their place, and what goes with them.
  void soften(int64_t r, int64_t q) const {
    const int64_t n = count(r);
    float* s = scores(r, q);
    Weight* weights = reinterpret_cast<Weight*>(s);  // no weight lies beyond its score
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += kLanes) {
      top = _mm512_mask_max_ps(top, first_lanes(n - i), top, _mm512_loadu_ps(s + i));
    }
    const float most = _mm512_reduce_max_ps(top);
    const __m512 nothing = _mm512_set1_ps(-1000.0f);  // whose exponential is 0
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m512 score = _mm512_sub_ps(_mm512_loadu_ps(s + i), _mm512_set1_ps(most));
      store_exp(weights + i, _mm512_mask_mov_ps(nothing, first_lanes(n - i), score));
      total = _mm512_add_ps(total, load_floats(weights + i));
    }
    float* to = out.of(r, head(q), chunk);
    std::memset(to, 0, dim * sizeof(float));
    to[dim] = most;
    to[dim + 1] = _mm512_reduce_add_ps(total);
  }

  void weigh_group(const Group& g) const {
    Values* gathered = reinterpret_cast<Values*>(space.gathered);
    for_blocks(g, [&](int64_t at, const int32_t* slots) {
      gather_values(values, slots, dim, gathered + at * dim / kValuesPerWord);
    });
    in_tiles_of<kSums>(g, [&](auto size, auto which) {
      constexpr int N = size();
      const Weight* weights[N];
      float* sums[N];
      for (int n = 0; n < N; ++n) {
        const auto [r, q] = which(n);
        weights[n] = reinterpret_cast<const Weight*>(scores(r, q)) + g.first;
        sums[n] = out.of(r, head(q), chunk);
      }
      weigh<N>(gathered, g.last - g.first, weights, dim, sums);
    });
  }
};

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
