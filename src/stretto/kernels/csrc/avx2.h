// Vectors by AVX2 and FMA: each is two registers, or four of the widened kinds. Included by simd.h.
#pragma once

#include <immintrin.h>

namespace stretto {

struct Floats {  // 16 floats
  __m256 lo, hi;
};
struct Words {  // 16 words of 32 bits
  __m256i lo, hi;
};
using Halves = __m256i;  // 16 numbers of 16 bits
struct Pairs {           // two bfloat16 numbers in each lane, widened
  Floats even, odd;
};
struct Fours {  // four numbers of 8 bits in each lane, widened to 16: the first and third, the rest
  Words even, odd;
};
struct Lanes {  // the first n lanes
  int32_t num;
};

// Rows or queries at a time. More sums than the 16 registers hold are worth it where weights are
// widened first: four rows share that, and hide that some sums come from memory.
constexpr int kTileFloat32 = 3;  // 12 sums, 3 inputs and 1 weight
constexpr int kTileBfloat16 = 4;
constexpr int kTileInt8 = 4;
constexpr int kQueries = 6;   // of scores: 12 sums, 2 keys and 1 query
constexpr int kSums = 1;      // of weighted values: 8 sums and 1 weight

using PairQuery = float;  // queries and weights of attention over bfloat16 keys and values

inline Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

inline Lanes first_lanes(int64_t n) {
  return {static_cast<int32_t>(std::clamp<int64_t>(n, 0, kLanes))};
}
inline Words mask_of(Lanes m) {  // all bits of the lanes that are meant
  const __m256i num = _mm256_set1_epi32(m.num);
  return {_mm256_cmpgt_epi32(num, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(num, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

inline Floats set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Words set1_word(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats no_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

inline Floats select(Floats other, Lanes m, Floats v) {
  const Words mask = mask_of(m);
  return {_mm256_blendv_ps(other.lo, v.lo, _mm256_castsi256_ps(mask.lo)),
          _mm256_blendv_ps(other.hi, v.hi, _mm256_castsi256_ps(mask.hi))};
}

// Lanes that are left out are not read: they are 0, or as in `other`.
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load_floats(Lanes m, const float* p) {
  const Words mask = mask_of(m);
  return {_mm256_maskload_ps(p, mask.lo), _mm256_maskload_ps(p + 8, mask.hi)};
}
inline Floats load_floats(Floats other, Lanes m, const float* p) {
  return select(other, m, load_floats(m, p));
}
inline Words load_words(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Words load_words(Lanes m, const void* p) {
  const int* at = static_cast<const int*>(p);
  const Words mask = mask_of(m);
  return {_mm256_maskload_epi32(at, mask.lo), _mm256_maskload_epi32(at + 8, mask.hi)};
}
inline Words load_words(Words other, Lanes m, const void* p) {
  const Words mask = mask_of(m), v = load_words(m, p);
  return {_mm256_blendv_epi8(other.lo, v.lo, mask.lo), _mm256_blendv_epi8(other.hi, v.hi, mask.hi)};
}
inline Words widened(const bf16* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
}

inline void store_floats(float* p, Floats v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline void store_floats(float* p, Lanes m, Floats v) {
  if (m.num == kLanes) return store_floats(p, v);  // masked stores are slow on some CPUs
  const Words mask = mask_of(m);
  _mm256_maskstore_ps(p, mask.lo, v.lo);
  _mm256_maskstore_ps(p + 8, mask.hi, v.hi);
}
inline void store_words(void* p, Words v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v.lo);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, v.hi);
}
inline void store_halves(bf16* p, Halves v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
inline void store_halves(bf16* p, Lanes m, Halves v) {
  bf16 all[kLanes];
  store_halves(all, v);
  std::memcpy(p, all, m.num * sizeof(bf16));
}
inline void store_bytes(int8_t* p, Words v) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xD8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) {  // b if one is NaN
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline Floats max(Floats a, Lanes m, Floats b) { return select(a, m, max(a, b)); }
inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline Floats abs(Floats v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.lo), _mm256_andnot_ps(sign, v.hi)};
}
inline Floats round(Floats v) {  // ties to even
  return {_mm256_round_ps(v.lo, 0x08), _mm256_round_ps(v.hi, 0x08)};
}
inline float largest_of(Floats v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float total_of(Floats v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline int32_t total_of(Words v) {
  const __m256i eight = _mm256_add_epi32(v.lo, v.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

// A bit for each lane.
inline uint16_t bits_of(__m256 lo, __m256 hi) {
  return static_cast<uint16_t>(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}
inline uint16_t unordered(Floats v) {
  return bits_of(_mm256_cmp_ps(v.lo, v.lo, _CMP_UNORD_Q), _mm256_cmp_ps(v.hi, v.hi, _CMP_UNORD_Q));
}
inline uint16_t equal(Floats a, Floats b) {
  return bits_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline uint16_t unequal(Words a, Words b) {
  return ~bits_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)),
                  _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi)));
}

inline Words add(Words a, Words b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline Words both(Words a, Words b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline Words raised(Words v) {  // lower halves to upper ones
  return {_mm256_slli_epi32(v.lo, 16), _mm256_slli_epi32(v.hi, 16)};
}
inline Words rounded(Floats v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
inline Floats as_floats(Words v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

// v * 2^power for whole powers from -252 to 254; lower ones are taken for -252, which turns what
// is not huge to 0. In two steps, each by a power that a float has.
inline __m256 times_two_to(__m256 v, __m256 power) {
  const __m256i n = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_set1_ps(-252.0f), power));
  const __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(v, first), second);
}
inline Floats times_two_to(Floats v, Floats power) {
  return {times_two_to(v.lo, power.lo), times_two_to(v.hi, power.hi)};
}

// bfloat16 numbers in the lower and in the upper halves of words.
inline __m256 lower_floats(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
inline __m256 upper_floats(__m256i v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xFFFF0000)));
}
inline Floats lower_floats(Words v) { return {lower_floats(v.lo), lower_floats(v.hi)}; }
inline Floats upper_floats(Words v) { return {upper_floats(v.lo), upper_floats(v.hi)}; }

// Rounds to nearest, ties to even, as torch does.
inline __m256i to_bf16(__m256 v) {  // to words
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, half), quiet, is_nan), 16);
}
inline Halves to_bf16(Floats v) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bf16(v.lo), to_bf16(v.hi)), 0xD8);
}
inline Halves to_bf16_quickly(Floats v) { return to_bf16(v); }

// Adds the products of a lane's two bfloat16 numbers.
inline Pairs pairs_at(const void* p) {
  const Words words = load_words(p);
  return {lower_floats(words), upper_floats(words)};
}
inline Pairs set1_pair(int32_t pair) {
  const __m256i words = _mm256_set1_epi32(pair);
  const __m256 even = lower_floats(words), odd = upper_floats(words);
  return {{even, even}, {odd, odd}};
}
inline Floats add_products(Floats sums, Pairs a, Pairs b) {
  return fmadd(a.odd, b.odd, fmadd(a.even, b.even, sums));
}

// Adds the products of a lane's four numbers, unsigned weights and signed inputs. By 16 bits:
// AVX2's product of bytes is cut off at 2^15.
inline Fours fours_at(const void* p) {
  const Words v = load_words(p);
  const __m256i even = _mm256_set1_epi16(0xFF);
  return {{_mm256_and_si256(v.lo, even), _mm256_and_si256(v.hi, even)},
          {_mm256_srli_epi16(v.lo, 8), _mm256_srli_epi16(v.hi, 8)}};
}
inline Fours set1_four(int32_t four) {
  const __m256i v = _mm256_set1_epi32(four);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
  return {{even, even}, {odd, odd}};
}
inline __m256i products(__m256i even, __m256i odd, __m256i even_inputs, __m256i odd_inputs) {
  return _mm256_add_epi32(_mm256_madd_epi16(even, even_inputs), _mm256_madd_epi16(odd, odd_inputs));
}
inline Words add_products(Words sums, Fours weights, Fours inputs) {
  return add(sums, {products(weights.even.lo, weights.odd.lo, inputs.even.lo, inputs.odd.lo),
                    products(weights.even.hi, weights.odd.hi, inputs.even.hi, inputs.odd.hi)});
}

inline void transpose8(__m256i rows[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
  }
}

// Rows x columns of words, transposed: by quarters.
inline void transpose16(Words rows[16]) {
  __m256i quarters[4][8];
  for (int i = 0; i < 8; ++i) {
    quarters[0][i] = rows[i].lo;
    quarters[1][i] = rows[8 + i].lo;
    quarters[2][i] = rows[i].hi;
    quarters[3][i] = rows[8 + i].hi;
  }
  for (auto& quarter : quarters) transpose8(quarter);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarters[0][i], quarters[1][i]};
    rows[8 + i] = {quarters[2][i], quarters[3][i]};
  }
}

// For what is read only to have it in cache.
inline void count_as_used(Words v) { asm volatile("" : : "x"(v.lo), "x"(v.hi)); }

}  // namespace stretto
