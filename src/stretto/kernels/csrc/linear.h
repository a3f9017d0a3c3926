// y = x W^T (+ b) for few rows x over packed weights, in float32, bfloat16 or int8.
//
// Weights are cut into blocks of 32 outputs that lie one after the other in memory, so a pass
// reads them once, as a stream:
//   float32   [out/32][in]  [32]
//   bfloat16  [out/32][in/2][32][2]
//   int8      [out/32][in/32] groups of 32 bfloat16 scales, one per output, and [8][32][4] unsigned
//             numbers w + 128: a weight is its scale times w
// A row's sum runs over the inputs in one fixed order, whatever other rows are in the batch and
// whichever thread computes it: its bits depend on nothing else.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace stretto {

enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt8OnBfloat16 = 3 };

constexpr int kBlock = 32;    // outputs per block: two vectors
constexpr int kAhead = 8192;  // bytes: what memory delivers in about its latency
constexpr int kPad = 64;      // inputs are padded to a multiple of this
constexpr int kGroup = 32;    // inputs that share a scale in int8, of weights and of rows
constexpr float kLargest = 3.4e38f, kSmallest = 1e-36f;  // of what int8 rounds to a multiple
constexpr int kGroupBytes = 2 * kBlock + kGroup * kBlock;

struct Linear {
  const void* weight;  // packed; outputs padded to a multiple of 32 and inputs to one of 64
  const float* bias;   // per output, or null
  int64_t in, out;     // unpadded
};

// Hardware prefetching lags behind once several rows share a weight's arrival: ask ahead.
inline void fetch_ahead(const void* weight) {
  _mm_prefetch(static_cast<const char*>(weight) + kAhead, _MM_HINT_T0);
  _mm_prefetch(static_cast<const char*>(weight) + kAhead + 64, _MM_HINT_T0);
}

// Rows in the form that the weights want: `stride` inputs a row, zero-padded.
struct Float32 {
  using Cache = float;  // of keys and values
  using Query = float;
  struct Rows {
    float* values;
    int64_t stride;
    static int64_t bytes(int64_t rows, int64_t in) { return rows * round_up(in, kPad) * 4; }
    void bind(char* memory, int64_t, int64_t in) {
      values = reinterpret_cast<float*>(memory);
      stride = round_up(in, kPad);
    }
    void put(int64_t row, const float* from, int64_t n) const {
      std::memcpy(values + row * stride, from, n * sizeof(float));
      std::memset(values + row * stride + n, 0, (stride - n) * sizeof(float));
    }
  };
  static constexpr int kTile = 12;  // rows at a time: 24 sums, 2 weights and 1 input in registers

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    __m512 (&out)[R][2]) {
    __m512 sum[R][2];  // not `out`: the compiler would store it in every turn
    const float* weight = static_cast<const float*>(w.weight) + block * x.stride * kBlock;
    const float* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < x.stride; ++i, weight += kBlock) {
      fetch_ahead(weight);
      const __m512 w0 = _mm512_loadu_ps(weight), w1 = _mm512_loadu_ps(weight + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512 v = _mm512_set1_ps(from[r * x.stride + i]);
        sum[r][0] = _mm512_fmadd_ps(w0, v, sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(w1, v, sum[r][1]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      out[r][0] = sum[r][0];
      out[r][1] = sum[r][1];
    }
  }
};

struct Bfloat16 {
  using Cache = bf16;
  using Query = bf16;
  struct Rows {
    bf16* values;
    int64_t stride;
    static int64_t bytes(int64_t rows, int64_t in) { return rows * round_up(in, kPad) * 2; }
    void bind(char* memory, int64_t, int64_t in) {
      values = reinterpret_cast<bf16*>(memory);
      stride = round_up(in, kPad);
    }
    void put(int64_t row, const float* from, int64_t n) const {
      bf16* to = values + row * stride;
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store_floats(to + i, _mm512_loadu_ps(from + i));
      for (; i < stride; i += kLanes) {
        store_floats(to + i, _mm512_maskz_loadu_ps(first_lanes(n - i), from + i));
      }
    }
  };
  static constexpr int kTile = 12;

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    __m512 (&out)[R][2]) {
    __m512 sum[R][2];  // not `out`: the compiler would store it in every turn
    const bf16* weight = static_cast<const bf16*>(w.weight) + block * x.stride * kBlock;
    const bf16* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < x.stride; i += 2, weight += 2 * kBlock) {
      fetch_ahead(weight);
      const __m512bh w0 = (__m512bh)_mm512_loadu_si512(weight);
      const __m512bh w1 = (__m512bh)_mm512_loadu_si512(weight + kBlock);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, from + r * x.stride + i, sizeof pair);
        const __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], w0, v);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], w1, v);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      out[r][0] = sum[r][0];
      out[r][1] = sum[r][1];
    }
  }
};

struct Int8 {
  using Cache = bf16;
  using Query = float;  // CPUs with int8 instructions may have none for bfloat16
  struct Rows {
    int8_t* values;
    float* scale;    // per row and group
    int32_t* start;  // -128 times the group's sum: takes back the weights' offset
    int64_t stride, groups;
    static int64_t bytes(int64_t rows, int64_t in) {
      const int64_t stride = round_up(in, kPad);
      return rows * (stride + stride / kGroup * 8);
    }
    void bind(char* memory, int64_t rows, int64_t in) {
      stride = round_up(in, kPad);
      groups = stride / kGroup;
      scale = reinterpret_cast<float*>(memory);
      start = reinterpret_cast<int32_t*>(memory + rows * groups * 4);
      values = reinterpret_cast<int8_t*>(memory + rows * groups * 8);
    }
    void put(int64_t row, const float* from, int64_t n) const {
      for (int64_t g = 0; g < groups; ++g) {
        __m512 v[2], most = _mm512_setzero_ps();
        __mmask16 unordered = 0;
        for (int i = 0; i < 2; ++i) {
          const int64_t at = g * kGroup + i * kLanes;
          v[i] = _mm512_maskz_loadu_ps(first_lanes(n - at), from + at);
          most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
          unordered |= _mm512_cmp_ps_mask(v[i], v[i], _CMP_UNORD_Q);
        }
        const float top = _mm512_reduce_max_ps(most);
        if (unordered != 0 || top > kLargest) {  // what is not finite makes the sums NaN
          std::memset(values + row * stride + g * kGroup, 0, kGroup);
          scale[row * groups + g] = NAN;
          start[row * groups + g] = 0;
          continue;
        }
        const __m512 inverse = _mm512_set1_ps(top > kSmallest ? 127.0f / top : 0.0f);
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < 2; ++i) {
          const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
          total = _mm512_add_epi32(total, q);
          _mm_storeu_si128(
              reinterpret_cast<__m128i*>(values + row * stride + g * kGroup + i * kLanes),
              _mm512_cvtsepi32_epi8(q));
        }
        scale[row * groups + g] = top / 127.0f;
        start[row * groups + g] = -128 * _mm512_reduce_add_epi32(total);
      }
    }
  };
  static constexpr int kTile = 6;  // 12 sums of integers and 12 of floats in registers

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    __m512 (&out)[R][2]) {
    __m512 sum[R][2];  // not `out`: the compiler would store it in every turn
    const char* weight = static_cast<const char*>(w.weight) + block * x.groups * kGroupBytes;
    const int8_t* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g, from += kGroup) {
      const bf16* scales = reinterpret_cast<const bf16*>(weight);
      const __m512 s0 = load_floats(scales), s1 = load_floats(scales + kLanes);
      _mm_prefetch(weight + kAhead, _MM_HINT_T0);
      weight += 2 * kBlock;
      __m512i part[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        part[r][0] = part[r][1] = _mm512_set1_epi32(x.start[(row + r) * x.groups + g]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; i += 4, weight += 4 * kBlock) {
        fetch_ahead(weight);
        const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, from + r * x.stride + i, sizeof four);
          const __m512i v = _mm512_set1_epi32(four);
          part[r][0] = _mm512_dpbusd_epi32(part[r][0], w0, v);
          part[r][1] = _mm512_dpbusd_epi32(part[r][1], w1, v);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512 s = _mm512_set1_ps(x.scale[(row + r) * x.groups + g]);
        sum[r][0] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][0]), _mm512_mul_ps(s, s0), sum[r][0]);
        sum[r][1] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][1]), _mm512_mul_ps(s, s1), sum[r][1]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      out[r][0] = sum[r][0];
      out[r][1] = sum[r][1];
    }
  }
};

// int8 weights on a CPU that has bfloat16 instructions as well, which attention then uses.
struct Int8OnBfloat16 : Int8 {
  using Query = bf16;
};

// Calls `done(row, block, lower 16 sums, upper 16 sums)`, bias added, for R rows of one block.
template <class K, int R, class Done>
void rows_of_block(const Linear& w, int64_t block, const typename K::Rows& x, int64_t row,
                   Done done) {
  __m512 sum[R][2];
  K::template block<R>(w, block, x, row, sum);
  if (w.bias != nullptr) {
    const __m512 b0 = _mm512_loadu_ps(w.bias + block * kBlock);
    const __m512 b1 = _mm512_loadu_ps(w.bias + block * kBlock + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r][0] = _mm512_add_ps(sum[r][0], b0);
      sum[r][1] = _mm512_add_ps(sum[r][1], b1);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) done(row + r, block, sum[r][0], sum[r][1]);
}

template <class K, int R, class Done>
void some_rows(int n, const Linear& w, int64_t block, const typename K::Rows& x, int64_t row,
               Done done) {
  if (n == R) return rows_of_block<K, R>(w, block, x, row, done);
  if constexpr (R > 1) some_rows<K, R - 1>(n, w, block, x, row, done);
}

// All rows times all blocks, shared among the workers.
template <class K, class Done>
void multiply(Worker& worker, const Linear& w, const typename K::Rows& x, int64_t rows, Done done) {
  const int64_t tiles = (rows + K::kTile - 1) / K::kTile;
  worker.each(rows == 0 ? 0 : (w.out + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of about equal size
      const int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
      some_rows<K, K::kTile>(static_cast<int>(last - first), w, block, x, first, done);
    }
  });
}

// Stores 32 sums at `to`, or those of the last block that exist.
inline void store_block(float* to, int64_t block, int64_t out, __m512 lower, __m512 upper) {
  const int64_t at = block * kBlock;
  _mm512_mask_storeu_ps(to + at, first_lanes(out - at), lower);
  _mm512_mask_storeu_ps(to + at + kLanes, first_lanes(out - at - kLanes), upper);
}

inline void add_block(float* to, int64_t block, int64_t out, __m512 lower, __m512 upper) {
  const int64_t at = block * kBlock;
  const __mmask16 m0 = first_lanes(out - at), m1 = first_lanes(out - at - kLanes);
  _mm512_mask_storeu_ps(to + at, m0, _mm512_add_ps(_mm512_maskz_loadu_ps(m0, to + at), lower));
  float* next = to + at + kLanes;
  _mm512_mask_storeu_ps(next, m1, _mm512_add_ps(_mm512_maskz_loadu_ps(m1, next), upper));
}

}  // namespace stretto
