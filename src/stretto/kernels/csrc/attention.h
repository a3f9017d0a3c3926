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

#include "blocks.h"
#include "simd.h"
#include "team.h"

namespace stretto {

constexpr int kChunk = 256;  // list entries per partial softmax
constexpr int kRows = 32;    // rows at a time

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

// Rows (bit r: row r) whose lists have the same slots from entry `first` to before `last`.
struct Group {
  uint32_t rows;
  int32_t first, last;
};

// The slots of a list's block from entry `at` on; after the list's end its last one again.
inline Words block_of(const View& view, int64_t at) {
  const Words last = set1_word(view.slots[view.length - 1]);
  return load_words(last, first_lanes(view.length - at), view.slots + at);
}

// The rows' blocks of the chunk that begins at entry `first`: neighbours with the same slots
// together, and blocks on end with the same rows. Each row's blocks come in order.
inline int64_t group_rows(const View* views, int64_t rows, int64_t first, Group* groups) {
  int64_t num = 0, open = 0;  // groups from `open` on may reach the block before
  for (int64_t b = 0; b < kChunk; b += kSlots) {
    Words shared = no_words();
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
      const Words own = block_of(views[r], first + b);
      if (together != 0 && unequal(own, shared) != 0) {
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
      store_words(slots, block_of(views[__builtin_ctz(g.rows)], first + b));
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
    Floats top = set1(-INFINITY), total = no_floats();
    for (int64_t i = 0; i < n; i += kLanes) {
      top = max(top, first_lanes(n - i), load_floats(s + i));
    }
    const float most = largest_of(top);
    const Floats nothing = set1(-1000.0f);  // whose exponential is 0
    for (int64_t i = 0; i < n; i += kLanes) {
      const Floats score = load_floats(s + i) - set1(most);
      store_exp(weights + i, select(nothing, first_lanes(n - i), score));
      total = total + load_floats(weights + i);
    }
    float* to = out.of(r, head(q), chunk);
    std::memset(to, 0, dim * sizeof(float));
    to[dim] = most;
    to[dim + 1] = total_of(total);
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
    store_floats(weight, first_lanes(1), exp(set1(part[p.dim] - most)));
    total += weight[0] * part[p.dim + 1];
    for (int64_t d = 0; d < p.dim; d += kLanes) {
      const Floats before = c == 0 ? no_floats() : load_floats(to + d);
      store_floats(to + d, fmadd(set1(weight[0]), load_floats(part + d), before));
    }
  }
  const Floats scale = set1(1.0f / total);
  for (int64_t d = 0; d < p.dim; d += kLanes) {
    store_floats(to + d, load_floats(to + d) * scale);
  }
}

}  // namespace stretto
