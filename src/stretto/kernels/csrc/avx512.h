// Vectors by AVX-512: each is one register. Included by simd.h.
#pragma once

#include <immintrin.h>

namespace stretto {

using Floats = __m512;    // 16 floats, with operators
using Words = __m512i;    // 16 words of 32 bits
using Halves = __m256i;   // 16 numbers of 16 bits
using Pairs = __m512bh;   // two bfloat16 numbers in each lane
using Fours = __m512i;    // four numbers of 8 bits in each lane
using Lanes = __mmask16;  // the first n lanes

// Rows or queries at a time, whose sums are to stay in the 32 registers.
constexpr int kTileFloat32 = 12;  // 24 sums, 2 weights and 1 input
constexpr int kTileBfloat16 = 12;
constexpr int kTileInt8 = 6;  // 12 sums of integers and 12 of floats
constexpr int kQueries = 12;  // of scores
constexpr int kSums = 6;      // of weighted values

using PairQuery = bf16;  // queries and weights of attention over bfloat16 keys and values

inline Lanes first_lanes(int64_t n) {
  return n >= kLanes ? 0xFFFF : static_cast<Lanes>((1u << (n < 0 ? 0 : n)) - 1);
}

inline Floats set1(float x) { return _mm512_set1_ps(x); }
inline Words set1_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Words no_words() { return _mm512_setzero_si512(); }

// Lanes that are left out are not read: they are 0, or as in `other`.
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load_floats(Lanes m, const float* p) { return _mm512_maskz_loadu_ps(m, p); }
inline Floats load_floats(Floats other, Lanes m, const float* p) {
  return _mm512_mask_loadu_ps(other, m, p);
}
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Words load_words(Lanes m, const void* p) { return _mm512_maskz_loadu_epi32(m, p); }
inline Words load_words(Words other, Lanes m, const void* p) {
  return _mm512_mask_loadu_epi32(other, m, p);
}
inline Words widened(const bf16* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store_floats(float* p, Lanes m, Floats v) { _mm512_mask_storeu_ps(p, m, v); }
inline void store_words(void* p, Words v) { _mm512_storeu_si512(p, v); }
inline void store_halves(bf16* p, Halves v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
inline void store_halves(bf16* p, Lanes m, Halves v) { _mm256_mask_storeu_epi16(p, m, v); }
inline void store_bytes(int8_t* p, Words v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v));
}

inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one is NaN
inline Floats max(Floats a, Lanes m, Floats b) { return _mm512_mask_max_ps(a, m, a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats v) { return _mm512_abs_ps(v); }
inline Floats round(Floats v) { return _mm512_roundscale_ps(v, 0x08); }  // ties to even
inline Floats times_two_to(Floats v, Floats power) { return _mm512_scalef_ps(v, power); }
inline Floats select(Floats other, Lanes m, Floats v) { return _mm512_mask_mov_ps(other, m, v); }
inline float largest_of(Floats v) { return _mm512_reduce_max_ps(v); }
inline float total_of(Floats v) { return _mm512_reduce_add_ps(v); }
inline int32_t total_of(Words v) { return _mm512_reduce_add_epi32(v); }

// A bit for each lane.
inline uint16_t unordered(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
inline uint16_t equal(Floats a, Floats b) { return _mm512_cmpeq_ps_mask(a, b); }
inline uint16_t unequal(Words a, Words b) { return _mm512_cmpneq_epi32_mask(a, b); }

inline Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words both(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words raised(Words v) { return _mm512_slli_epi32(v, 16); }  // lower halves to upper ones
inline Words rounded(Floats v) { return _mm512_cvtps_epi32(v); }
inline Floats as_floats(Words v) { return _mm512_cvtepi32_ps(v); }

// bfloat16 numbers in the lower and in the upper halves of words.
inline Floats lower_floats(Words v) { return _mm512_castsi512_ps(raised(v)); }
inline Floats upper_floats(Words v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xFFFF0000)));
}

// Rounds to nearest, ties to even, as torch does. Without AVX512_BF16, which int8 need not have;
// its instruction would also turn denormal numbers to zero.
inline Halves to_bf16(Floats v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
// The same by that instruction.
inline Halves to_bf16_quickly(Floats v) { return (Halves)_mm512_cvtneps_pbh(v); }

// Adds the products of a lane's two bfloat16 numbers.
inline Pairs pairs_at(const void* p) { return (Pairs)_mm512_loadu_si512(p); }
inline Pairs set1_pair(int32_t pair) { return (Pairs)_mm512_set1_epi32(pair); }
inline Floats add_products(Floats sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }

// Adds the products of a lane's four numbers, unsigned weights and signed inputs.
inline Fours fours_at(const void* p) { return _mm512_loadu_si512(p); }
inline Fours set1_four(int32_t four) { return _mm512_set1_epi32(four); }
inline Words add_products(Words sums, Fours weights, Fours inputs) {
  return _mm512_dpbusd_epi32(sums, weights, inputs);
}

// Rows x columns of words, transposed in registers.
inline void transpose16(Words rows[16]) {
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

// For what is read only to have it in cache.
inline void count_as_used(Words v) { asm volatile("" : : "v"(v)); }

}  // namespace stretto
