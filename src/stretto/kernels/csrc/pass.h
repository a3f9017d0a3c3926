// One pass of a Llama-shaped model: what it reads, its memory, and its phases.
#pragma once

#include <algorithm>

#include "attention.h"
#include "linear.h"
#include "simd.h"
#include "team.h"

namespace stretto {

struct Layer {
  Linear qkv, o, gate_up, down;  // gate and up in turns of 16 outputs
  const float *attention_norm, *mlp_norm;
  const float *q_norm, *k_norm;  // per head, or null
  void *keys, *values;           // kv_heads x slots x head_dim
};

struct Model {
  int32_t kind, embedding_is_bf16;
  int64_t hidden, intermediate, num_layers;
  Heads heads;
  float norm_eps, rope_scaling;
  const float* inverse_frequencies;  // head_dim / 2
  const void* embedding;             // vocab x hidden
  const float* final_norm;
  Linear head;
  const Layer* layers;
};

struct Pass {
  int64_t rows, kept;
  const int64_t *tokens, *positions, *slots;
  const View* views;
  const int64_t* keep;  // rows whose logits are wanted
  float* logits;        // kept x vocab
  char* scratch;
  int32_t num_threads;
};

inline Floats negated(Floats x) { return no_floats() - x; }

// Root-mean-square norm (Zhang and Sennrich 2019) of n floats. `to` may be `from`.
inline void rms_norm(const float* from, const float* weight, int64_t n, float eps, float* to) {
  Floats total = no_floats();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load_floats(first_lanes(n - i), from + i);
    total = fmadd(v, v, total);
  }
  const Floats scale = set1(1.0f / std::sqrt(total_of(total) / n + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Lanes m = first_lanes(n - i);
    const Floats v = load_floats(m, from + i) * scale;
    store_floats(to + i, m, v * load_floats(m, weight + i));
  }
}

inline Floats silu(Floats x) {
  const Floats one = set1(1.0f);
  // Of a large |x| the exponential's argument is cut: exp() is for arguments that are not large.
  const Floats e = exp(min(set1(88.0f), negated(x)));
  return x / (one + e);
}

// Rotary embedding of one head in place, halves paired (Su et al. 2021).
inline void rotate(float* head, int64_t dim, const float* cos, const float* sin) {
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float a = head[i], b = head[i + dim / 2];
    head[i] = a * cos[i] - b * sin[i];
    head[i + dim / 2] = b * cos[i] + a * sin[i];
  }
}

template <class T>
void copy_floats(const float* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; i += kLanes) store_floats(to + i, load_floats(from + i));
}

inline void embed(const Model& m, int64_t token, float* to) {
  if (m.embedding_is_bf16) {
    const bf16* from = static_cast<const bf16*>(m.embedding) + token * m.hidden;
    for (int64_t i = 0; i < m.hidden; ++i) to[i] = to_float(from[i]);
  } else {
    std::memcpy(to, static_cast<const float*>(m.embedding) + token * m.hidden, m.hidden * 4);
  }
}

inline int64_t num_phases(const Model& m, int64_t rows) {
  return 3 + m.num_layers * (8 + 2 * ((rows + kRows - 1) / kRows));
}

// The memory of a pass. With `memory` null only `bytes` is meant.
template <class K>
struct Buffers {
  using Cache = typename K::Cache;
  float *x, *qkv, *attended, *gated, *normed, *rotations, *partial;
  typename K::Query* queries;
  Workspace<typename K::Query>* spaces;
  char *hidden_rows, *q_rows, *inner_rows, *counters;
  int64_t bytes;

  Buffers(const Model& m, int64_t rows, int64_t longest, int threads, char* memory) {
    const Heads& h = m.heads;
    const int64_t q = h.heads * h.dim, kv = h.kv_heads * h.dim;
    const int64_t chunks = (longest + kChunk - 1) / kChunk;
    Arena arena(memory);
    x = arena.take<float>(rows * m.hidden);
    qkv = arena.take<float>(rows * (q + 2 * kv));
    attended = arena.take<float>(rows * q);
    gated = arena.take<float>(rows * m.intermediate);
    normed = arena.take<float>(rows * m.hidden);
    rotations = arena.take<float>(rows * h.dim);
    partial = arena.take<float>(Partials::floats(h.heads, chunks, h.dim));
    queries = arena.take<typename K::Query>(rows * q);
    spaces = arena.take<Workspace<typename K::Query>>(threads);
    for (int t = 0; t < threads; ++t) {
      const Workspace<typename K::Query> space(arena, h);
      if (memory != nullptr) spaces[t] = space;
    }
    hidden_rows = arena.take<char>(K::Rows::bytes(rows, m.hidden));
    q_rows = arena.take<char>(K::Rows::bytes(rows, q));
    inner_rows = arena.take<char>(K::Rows::bytes(rows, m.intermediate));
    counters = arena.take<char>(Team::bytes(threads, num_phases(m, rows)));
    bytes = arena.used();
  }
};

template <class K>
struct Runner {
  using Cache = typename K::Cache;
  using Rows = typename K::Rows;
  const Model& m;
  const Pass& pass;
  const Buffers<K>& b;
  Worker& worker;
  const int64_t chunks;

  const Heads& h() const { return m.heads; }
  int64_t q_size() const { return h().heads * h().dim; }
  int64_t kv_size() const { return h().kv_heads * h().dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }

  Rows bind(char* memory, int64_t rows, int64_t in) const {
    Rows result;
    result.bind(memory, rows, in);
    return result;
  }

  void run() {
    worker.each(pass.rows, [&](int64_t r) {
      embed(m, pass.tokens[r], b.x + r * m.hidden);
      float* cos = b.rotations + r * h().dim;
      for (int64_t i = 0; i < h().dim / 2; ++i) {
        const float angle = static_cast<float>(pass.positions[r]) * m.inverse_frequencies[i];
        cos[i] = std::cos(angle) * m.rope_scaling;
        cos[i + h().dim / 2] = std::sin(angle) * m.rope_scaling;
      }
    });
    for (int64_t l = 0; l < m.num_layers; ++l) {
      attention(m.layers[l]);
      mlp(m.layers[l]);
    }
    if (pass.kept > 0) logits();
  }

  // The linear layers of a pass alone, on rows of zeros: what a pass cannot take less time than.
  void linear_layers() {
    const Rows hidden = bind(b.hidden_rows, pass.rows, m.hidden);
    const Rows q = bind(b.q_rows, pass.rows, q_size());
    const Rows inner = bind(b.inner_rows, pass.rows, m.intermediate);
    worker.each(pass.rows, [&](int64_t r) {
      float* zeros = b.normed + r * m.hidden;
      std::memset(zeros, 0, m.hidden * sizeof(float));
      hidden.put(r, zeros, m.hidden);
      q.put(r, zeros, std::min(q_size(), m.hidden));
      inner.put(r, zeros, std::min(m.intermediate, m.hidden));
    });
    const auto multiply_into = [&](const Linear& w, const Rows& x, float* to) {
      multiply<K>(worker, w, x, pass.rows, [&](int64_t r, int64_t block, Floats lo, Floats hi) {
        store_block(to + r * w.out, block, w.out, lo, hi);
      });
    };
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      multiply_into(layer.qkv, hidden, b.qkv);
      multiply_into(layer.o, q, b.x);
      multiply<K>(worker, layer.gate_up, hidden, pass.rows,
                  [&](int64_t r, int64_t block, Floats gate, Floats up) {
                    store_floats(b.gated + r * m.intermediate + block * kLanes, gate * up);
                  });
      multiply_into(layer.down, inner, b.x);
    }
    multiply_into(m.head, hidden, pass.logits);
  }

  void norm_rows(const float* weight, const Rows& to) {
    worker.each(pass.rows, [&](int64_t r) {
      rms_norm(b.x + r * m.hidden, weight, m.hidden, m.norm_eps, b.normed + r * m.hidden);
      to.put(r, b.normed + r * m.hidden, m.hidden);
    });
  }

  void add_to_x(const Linear& w, const Rows& from) {
    multiply<K>(worker, w, from, pass.rows, [&](int64_t r, int64_t block, Floats lo, Floats hi) {
      add_block(b.x + r * m.hidden, block, w.out, lo, hi);
    });
  }

  void attention(const Layer& layer) {
    const Rows in = bind(b.hidden_rows, pass.rows, m.hidden);
    norm_rows(layer.attention_norm, in);
    multiply<K>(worker, layer.qkv, in, pass.rows,
                [&](int64_t r, int64_t block, Floats lo, Floats hi) {
                  store_block(b.qkv + r * qkv_size(), block, layer.qkv.out, lo, hi);
                });
    worker.each(pass.rows, [&](int64_t r) { place(layer, r); });

    const Rows out = bind(b.q_rows, pass.rows, q_size());
    const Partials partial{b.partial, h().heads, chunks, h().dim};
    for (int64_t first = 0; first < pass.rows; first += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, pass.rows - first);
      worker.each(h().kv_heads * chunks, [&](int64_t i) {
        const int64_t kv_head = i / chunks, at = kv_head * h().num_slots * h().dim;
        ChunkOfHead<Cache, typename K::Query>{h(),
                                              static_cast<const Cache*>(layer.keys) + at,
                                              static_cast<const Cache*>(layer.values) + at,
                                              b.queries + first * q_size(),
                                              pass.views + first,
                                              rows,
                                              kv_head,
                                              i % chunks,
                                              b.spaces[worker.me()],
                                              partial}
            .run();
      });
      worker.each(rows, [&](int64_t r) {
        float* to = b.attended + (first + r) * q_size();
        const int64_t own = (pass.views[first + r].length + kChunk - 1) / kChunk;
        for (int64_t head = 0; head < h().heads; ++head) {
          merge_chunks(partial, r, head, own, to + head * h().dim);
        }
        out.put(first + r, to, q_size());
      });
    }
    add_to_x(layer.o, out);
  }

  // Norms and rotates a row's queries and keys; writes its keys and values into its slot.
  void place(const Layer& layer, int64_t r) {
    float* row = b.qkv + r * qkv_size();
    const int64_t dim = h().dim;
    const float *cos = b.rotations + r * dim, *sin = cos + dim / 2;
    for (int64_t head = 0; head < h().heads + h().kv_heads; ++head) {
      const float* weight = head < h().heads ? layer.q_norm : layer.k_norm;
      if (weight != nullptr) rms_norm(row + head * dim, weight, dim, m.norm_eps, row + head * dim);
      rotate(row + head * dim, dim, cos, sin);
    }
    copy_floats(row, q_size(), b.queries + r * q_size());
    const float *key = row + q_size(), *value = key + kv_size();
    for (int64_t head = 0; head < h().kv_heads; ++head) {
      const int64_t at = (head * h().num_slots + pass.slots[r]) * dim;
      copy_floats(key + head * dim, dim, static_cast<Cache*>(layer.keys) + at);
      copy_floats(value + head * dim, dim, static_cast<Cache*>(layer.values) + at);
    }
  }

  void mlp(const Layer& layer) {
    const Rows in = bind(b.hidden_rows, pass.rows, m.hidden);
    norm_rows(layer.mlp_norm, in);
    multiply<K>(worker, layer.gate_up, in, pass.rows,
                [&](int64_t r, int64_t block, Floats gate, Floats up) {
                  store_floats(b.gated + r * m.intermediate + block * kLanes, silu(gate) * up);
                });
    const Rows inner = bind(b.inner_rows, pass.rows, m.intermediate);
    worker.each(pass.rows,
                [&](int64_t r) { inner.put(r, b.gated + r * m.intermediate, m.intermediate); });
    add_to_x(layer.down, inner);
  }

  void logits() {
    const Rows in = bind(b.hidden_rows, pass.kept, m.hidden);
    worker.each(pass.kept, [&](int64_t k) {
      float* to = b.normed + k * m.hidden;
      rms_norm(b.x + pass.keep[k] * m.hidden, m.final_norm, m.hidden, m.norm_eps, to);
      in.put(k, to, m.hidden);
    });
    multiply<K>(worker, m.head, in, pass.kept, [&](int64_t k, int64_t block, Floats lo, Floats hi) {
      store_block(pass.logits + k * m.head.out, block, m.head.out, lo, hi);
    });
  }
};

}  // namespace stretto
