// Vectors of 16 numbers, and conversions to and from bfloat16. What a vector is, and what is done
// with it, has the same names in avx512.h and avx2.h; no other file has instructions.
#pragma once

#include <algorithm>
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

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace stretto

#include STRETTO_VECTORS  // avx512.h or avx2.h, by whoever compiles

namespace stretto {

inline Floats load_floats(const bf16* p) { return lower_floats(widened(p)); }
inline void store_floats(bf16* p, Floats v) { store_halves(p, to_bf16(v)); }

// exp(x) for x <= 0 or moderate, to 1-2 units in the last place. Cody-Waite reduction and the
// polynomial of Cephes' expf (Moshier).
inline Floats exp(Floats x) {
  x = max(set1(-104.0f), x);  // in this order NaN stays NaN
  const Floats n = round(x * set1(1.44269504f));
  Floats r = fnmadd(n, set1(0.693359375f), x);
  r = fnmadd(n, set1(-2.12194440e-4f), r);
  Floats p = set1(1.9875691500e-4f);
  p = fmadd(p, r, set1(1.3981999507e-3f));
  p = fmadd(p, r, set1(8.3334519073e-3f));
  p = fmadd(p, r, set1(4.1665795894e-2f));
  p = fmadd(p, r, set1(1.6666665459e-1f));
  p = fmadd(p, r, set1(5.0000001201e-1f));
  p = fmadd(p * r, r, r + set1(1.0f));
  return times_two_to(p, n);
}

}  // namespace stretto
