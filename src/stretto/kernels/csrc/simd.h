// Vectors of 16 floats, and conversions to and from bfloat16.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace stretto {

using bf16 = uint16_t;
constexpr int kLanes = 16;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Hands out pieces of one block of memory, each on a cache line of its own.
class Arena {
 public:
  explicit Arena(char* memory) : at_(memory), begin_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(at_);
    at_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return result;
  }
  int64_t used() const { return at_ - begin_; }

 private:
  char *at_, *begin_;
};

inline __mmask16 first_lanes(int64_t n) {
  return n >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << (n < 0 ? 0 : n)) - 1);
}

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline __m512 load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 as_floats(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m512i load_words(const bf16* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 load_floats(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(load_words(p), 16));
}

// Rounds to nearest, ties to even, as torch does. Without AVX512_BF16, which int8 need not have;
// its instruction would also turn denormal numbers to zero.
inline __m256i to_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline void store_floats(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store_floats(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
}

// exp(x) for x <= 0 or moderate, to 1-2 units in the last place. Cody-Waite reduction and the
// polynomial of Cephes' expf (Moshier).
inline __m512 exp(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order NaN stays NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0x08);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Rows x columns of 32-bit words, transposed in registers.
inline void transpose16(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  __m512i u[16];
  for (int i = 0; i < 4; ++i) {
    u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

}  // namespace stretto
