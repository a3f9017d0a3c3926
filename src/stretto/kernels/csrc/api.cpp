// The C interface: one linear layer, and one pass of a Llama-shaped model. Called through ctypes;
// nothing here knows Python or torch. Only reached on CPUs with the instructions it is built for.
#include <omp.h>

#include <algorithm>

#include "pass.h"

#ifndef STRETTO_SOURCE
#define STRETTO_SOURCE "unknown"
#endif

namespace stretto {

namespace {

int64_t longest_view(const Pass& pass) {
  int64_t longest = 0;
  for (int64_t r = 0; r < pass.rows; ++r) longest = std::max(longest, pass.views[r].length);
  return longest;
}

// Calls `work(worker)` on so many threads, or on fewer if there are no more. `memory` is of
// `Team::bytes(threads, phases)`.
template <class Work>
void with_team(int threads, int64_t phases, char* memory, Work work) {
  std::memset(memory, 0, Team::bytes(threads, phases));
#pragma omp parallel num_threads(threads)
  {
    const Team team(memory, omp_get_num_threads());
    Worker worker(team, omp_get_thread_num());
    work(worker);
  }
}

int num_threads(const Pass& pass) { return std::clamp<int>(pass.num_threads, 1, kMaxThreads); }

template <class K>
void run_pass(const Model& m, const Pass& pass, bool only_linear_layers) {
  const int64_t longest = longest_view(pass);
  const Buffers<K> buffers(m, pass.rows, longest, num_threads(pass), pass.scratch);
  with_team(num_threads(pass), num_phases(m, pass.rows), buffers.counters, [&](Worker& worker) {
    Runner<K> runner{m, pass, buffers, worker, (longest + kChunk - 1) / kChunk};
    if (only_linear_layers)
      runner.linear_layers();
    else
      runner.run();
  });
}

template <class T>
void load_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2)
      to[i] = to_float(from[i]);
    else
      to[i] = from[i];
  }
}

template <class K, class T>
void run_linear(const Linear& w, const T* x, int64_t rows, T* y, char* scratch, int threads) {
  typename K::Rows in;
  in.bind(scratch, rows, w.in);
  threads = std::clamp(threads, 1, kMaxThreads);
  float* memory = reinterpret_cast<float*>(scratch + round_up(K::Rows::bytes(rows, w.in), 64));
  char* counters = reinterpret_cast<char*>(memory + rows * round_up(w.in, kPad));
  with_team(threads, 2, counters, [&](Worker& worker) {
    worker.each(rows, [&](int64_t r) {
      float* row = memory + r * round_up(w.in, kPad);
      load_row(x + r * w.in, w.in, row);
      in.put(r, row, w.in);
    });
    multiply<K>(worker, w, in, rows, [&](int64_t r, int64_t block, Floats lo, Floats hi) {
      if constexpr (sizeof(T) == 4) {
        store_block(reinterpret_cast<float*>(y) + r * w.out, block, w.out, lo, hi);
      } else {
        const int64_t at = block * kBlock;
        bf16* to = reinterpret_cast<bf16*>(y) + r * w.out + at;
        store_halves(to, first_lanes(w.out - at), to_bf16(lo));
        store_halves(to + kLanes, first_lanes(w.out - at - kLanes), to_bf16(hi));
      }
    });
  });
}

float peak(const float* row, int64_t n, int64_t* place) {
  const Floats lowest = set1(-INFINITY);
  Floats top = lowest;
  uint16_t nan = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load_floats(lowest, first_lanes(n - i), row + i);
    nan |= unordered(v);
    top = max(top, v);
  }
  const float largest = largest_of(top);
  if (nan != 0 || !std::isfinite(largest)) return NAN;
  int64_t at = 0;
  while (equal(load_floats(lowest, first_lanes(n - at), row + at),
                              set1(largest)) == 0) {
    at += kLanes;
  }
  *place = std::find(row + at, row + n, largest) - row;
  Floats sum[4] = {};
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      const Lanes m = first_lanes(n - i - k * kLanes);
      const Floats v = load_floats(lowest, m, row + i + k * kLanes);
      sum[k] = sum[k] + exp(v - set1(largest));
    }
  }
  return total_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace
}  // namespace stretto

using namespace stretto;

extern "C" {

// Hash of the sources and flags that this was compiled from.
const char* stretto_source() { return STRETTO_SOURCE; }

// Bytes of scratch that a pass of `rows` rows over lists of up to `longest` slots needs.
int64_t stretto_pass_bytes(const Model* m, int64_t rows, int64_t longest, int32_t threads) {
  threads = std::clamp<int>(threads, 1, kMaxThreads);
  switch (m->kind) {
    case kFloat32:
      return Buffers<Float32>(*m, rows, longest, threads, nullptr).bytes;
    case kBfloat16:
      return Buffers<Bfloat16>(*m, rows, longest, threads, nullptr).bytes;
    case kInt8:
      return Buffers<Int8>(*m, rows, longest, threads, nullptr).bytes;
    default:
      return Buffers<Int8Beside>(*m, rows, longest, threads, nullptr).bytes;
  }
}

// `only_linear_layers`: the pass writes no keys and values, and its logits mean nothing.
void stretto_pass(const Model* m, const Pass* pass, int32_t only_linear_layers) {
  switch (m->kind) {
    case kFloat32:
      return run_pass<Float32>(*m, *pass, only_linear_layers);
    case kBfloat16:
      return run_pass<Bfloat16>(*m, *pass, only_linear_layers);
    case kInt8:
      return run_pass<Int8>(*m, *pass, only_linear_layers);
    default:
      return run_pass<Int8Beside>(*m, *pass, only_linear_layers);
  }
}

int64_t stretto_linear_bytes(int64_t rows, int64_t in, int32_t threads) {
  return Team::bytes(std::clamp<int>(threads, 1, kMaxThreads), 2) +
         2 * rows * round_up(in, kPad) * 4 + rows * round_up(in, kPad) / kGroup * 8 + 128;
}

// y = x W^T + b for `rows` rows; x and y in float32 or bfloat16.
void stretto_linear(const Linear* w, int32_t kind, int32_t is_bf16, const void* x, int64_t rows,
                    void* y, char* scratch, int32_t threads) {
  const auto run = [&](auto type) {
    using K = decltype(type);
    if (is_bf16) {
      run_linear<K>(*w, static_cast<const bf16*>(x), rows, static_cast<bf16*>(y), scratch, threads);
    } else {
      run_linear<K>(*w, static_cast<const float*>(x), rows, static_cast<float*>(y), scratch,
                    threads);
    }
  };
  switch (kind) {
    case kFloat32:
      return run(Float32());
    case kBfloat16:
      return run(Bfloat16());
    default:
      return run(Int8());
  }
}

// The sum of exp(row[i] - largest) over n floats, and the first place of the largest. Not a number
// if the largest is not finite.
float stretto_peak(const float* row, int64_t n, int64_t* place) { return peak(row, n, place); }

}  // extern "C"
