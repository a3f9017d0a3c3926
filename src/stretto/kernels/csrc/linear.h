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
#include <type_traits>

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
  static constexpr int kTile = kTileFloat32;  // rows at a time

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    Floats (&out)[R][2]) {
    Floats sum[R][2];  // not `out`: the compiler would store it in every turn
    const float* weight = static_cast<const float*>(w.weight) + block * x.stride * kBlock;
    const float* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = no_floats();
    for (int64_t i = 0; i < x.stride; ++i, weight += kBlock) {
      fetch_ahead(weight);
      const Floats w0 = load_floats(weight), w1 = load_floats(weight + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Floats v = set1(from[r * x.stride + i]);
        sum[r][0] = fmadd(w0, v, sum[r][0]);
        sum[r][1] = fmadd(w1, v, sum[r][1]);
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
  using Query = PairQuery;
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
      for (; i + kLanes <= n; i += kLanes) store_floats(to + i, load_floats(from + i));
      for (; i < stride; i += kLanes) {
        store_floats(to + i, load_floats(first_lanes(n - i), from + i));
      }
    }
  };
  static constexpr int kTile = kTileBfloat16;

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    Floats (&out)[R][2]) {
    Floats sum[R][2];  // not `out`: the compiler would store it in every turn
    const bf16* weight = static_cast<const bf16*>(w.weight) + block * x.stride * kBlock;
    const bf16* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = no_floats();
    for (int64_t i = 0; i < x.stride; i += 2, weight += 2 * kBlock) {
      fetch_ahead(weight);
      const Pairs w0 = pairs_at(weight);
      const Pairs w1 = pairs_at(weight + kBlock);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, from + r * x.stride + i, sizeof pair);
        const Pairs v = set1_pair(pair);
        sum[r][0] = add_products(sum[r][0], w0, v);
        sum[r][1] = add_products(sum[r][1], w1, v);
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
        Floats v[2], most = no_floats();
        uint16_t nan = 0;
        for (int i = 0; i < 2; ++i) {
          const int64_t at = g * kGroup + i * kLanes;
          v[i] = load_floats(first_lanes(n - at), from + at);
          most = max(most, abs(v[i]));
          nan |= unordered(v[i]);
        }
        const float top = largest_of(most);
        if (nan != 0 || top > kLargest) {  // what is not finite makes the sums NaN
          std::memset(values + row * stride + g * kGroup, 0, kGroup);
          scale[row * groups + g] = NAN;
          start[row * groups + g] = 0;
          continue;
        }
        const Floats inverse = set1(top > kSmallest ? 127.0f / top : 0.0f);
        Words total = no_words();
        for (int i = 0; i < 2; ++i) {
          const Words q = rounded(v[i] * inverse);
          total = add(total, q);
          store_bytes(values + row * stride + g * kGroup + i * kLanes, q);
        }
        scale[row * groups + g] = top / 127.0f;
        start[row * groups + g] = -128 * total_of(total);
      }
    }
  };
  static constexpr int kTile = kTileInt8;

  template <int R>
  static void block(const Linear& w, int64_t block, const Rows& x, int64_t row,
                    Floats (&out)[R][2]) {
    Floats sum[R][2];  // not `out`: the compiler would store it in every turn
    const char* weight = static_cast<const char*>(w.weight) + block * x.groups * kGroupBytes;
    const int8_t* from = x.values + row * x.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = no_floats();
    for (int64_t g = 0; g < x.groups; ++g, from += kGroup) {
      const bf16* scales = reinterpret_cast<const bf16*>(weight);
      const Floats s0 = load_floats(scales), s1 = load_floats(scales + kLanes);
      _mm_prefetch(weight + kAhead, _MM_HINT_T0);
      weight += 2 * kBlock;
      Words part[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        part[r][0] = part[r][1] = set1_word(x.start[(row + r) * x.groups + g]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; i += 4, weight += 4 * kBlock) {
        fetch_ahead(weight);
        const Fours w0 = fours_at(weight), w1 = fours_at(weight + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, from + r * x.stride + i, sizeof four);
          const Fours v = set1_four(four);
          part[r][0] = add_products(part[r][0], w0, v);
          part[r][1] = add_products(part[r][1], w1, v);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Floats s = set1(x.scale[(row + r) * x.groups + g]);
        sum[r][0] = fmadd(as_floats(part[r][0]), s * s0, sum[r][0]);
        sum[r][1] = fmadd(as_floats(part[r][1]), s * s1, sum[r][1]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      out[r][0] = sum[r][0];
      out[r][1] = sum[r][1];
    }
  }
};

// int8 weights on a CPU that has bfloat16 instructions as well, which attention then uses; the
// same as without, where there are none.
struct Int8OnBfloat16 : Int8 {
  using Query = PairQuery;
};
using Int8Beside = std::conditional_t<std::is_same_v<PairQuery, float>, Int8, Int8OnBfloat16>;

// Calls `done(row, block, lower 16 sums, upper 16 sums)`, bias added, for R rows of one block.
template <class K, int R, class Done>
void rows_of_block(const Linear& w, int64_t block, const typename K::Rows& x, int64_t row,
                   Done done) {
  Floats sum[R][2];
  K::template block<R>(w, block, x, row, sum);
  if (w.bias != nullptr) {
    const Floats b0 = load_floats(w.bias + block * kBlock);
    const Floats b1 = load_floats(w.bias + block * kBlock + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r][0] = sum[r][0] + b0;
      sum[r][1] = sum[r][1] + b1;
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
inline void store_block(float* to, int64_t block, int64_t out, Floats lower, Floats upper) {
  const int64_t at = block * kBlock;
  store_floats(to + at, first_lanes(out - at), lower);
  store_floats(to + at + kLanes, first_lanes(out - at - kLanes), upper);
}

inline void add_block(float* to, int64_t block, int64_t out, Floats lower, Floats upper) {
  const int64_t at = block * kBlock;
  const Lanes m0 = first_lanes(out - at), m1 = first_lanes(out - at - kLanes);
  store_floats(to + at, m0, load_floats(m0, to + at) + lower);
  float* next = to + at + kLanes;
  store_floats(next, m1, load_floats(m1, next) + upper);
}

}  // namespace stretto
