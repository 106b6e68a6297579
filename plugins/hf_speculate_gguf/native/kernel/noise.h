// Exponential noise as torch draws it on a CPU, bit for bit. A value is the double-precision logarithm of two numbers
// of a Mersenne Twister (ATen's CPUGeneratorImpl and exponential_distribution).
#pragma once

#include <cmath>

#include "vectors.h"

namespace {

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));

constexpr int TWISTER = 624, TWIST = 397;

// The beginning of a generator's state, as in `torch.Generator.get_state`.
struct Twister {
  uint64_t seed;
  int32_t left, is_seeded;  // left: unused numbers of this state, plus one
  uint64_t next;
  uint64_t state[TWISTER];
};

// The numbers of a generator, in order.
class Numbers {
 public:
  explicit Numbers(Twister& twister) : from(twister), left(twister.left - 1), next(twister.next) {
    for (int i = 0; i < TWISTER; i++) state[i] = from.state[i];
  }

  ~Numbers() {
    from.left = left + 1, from.next = next;
    for (int i = 0; i < TWISTER; i++) from.state[i] = state[i];
  }

  void take(uint32_t* to, int64_t count) {
    while (count) {
      if (!left) renew();
      const int64_t now = count < left ? count : left;
      for (int64_t i = 0; i < now; i++) {
        uint32_t y = state[next + i];
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c5680;
        y ^= y << 15 & 0xefc60000;
        to[i] = y ^ y >> 18;
      }
      to += now, count -= now, next += now, left -= now;
    }
  }

 private:
  static uint32_t twist(uint32_t u, uint32_t v) { return ((u & 0x80000000) | (v & 0x7fffffff)) >> 1 ^ (-(v & 1) & 0x9908b0df); }

  void renew() {
    uint32_t* p = state;
    for (int i = 0; i < TWISTER - TWIST; i++) p[i] = p[i + TWIST] ^ twist(p[i], p[i + 1]);
    for (int i = TWISTER - TWIST; i < TWISTER - 1; i++) p[i] = p[i + TWIST - TWISTER] ^ twist(p[i], p[i + 1]);
    p[TWISTER - 1] = p[TWIST - 1] ^ twist(p[TWISTER - 1], p[0]);
    left = TWISTER, next = 0;
  }

  Twister& from;
  int64_t left, next;
  uint32_t state[TWISTER];
};

constexpr uint64_t MANTISSA = (uint64_t(1) << 53) - 1;

// The formula of torch.
inline float exponential(uint64_t number) { return -std::log1p(-((number & MANTISSA) * 0x1p-53)); }

// Eight values from 64-bit numbers, whose lower half was drawn first. The logarithms are exact to 1e-13. Where that
// leaves the rounding to float open, the library's logarithm decides.
inline void exponential(const uint64_t* numbers, float* to) {
  const Longs halves = load<Longs>(numbers);
  const Longs k = ((halves << 32) | (halves >> 32 & 0xffffffff)) & (int64_t)MANTISSA;
  const Doubles value = __builtin_convertvector((int64_t(1) << 53) - k, Doubles);  // 2^53 (1 - u), exact
  const Longs bits = reinterpret<Longs>(value);
  Longs exponent = (bits >> 52) - (1023 + 53);
  Doubles m = reinterpret<Doubles>((bits & 0xfffffffffffff) | 0x3ff0000000000000);
  const Longs is_large = m > 1.4142135623730951;  // all ones
  m = is_large ? m * 0.5 : m;
  exponent -= is_large;
  const Doubles s = (m - 1) / (m + 1), z = s * s;
  Doubles sum = z * 0 + 1.0 / 19;
  for (int n = 17; n > 1; n -= 2) sum = sum * z + 1.0 / n;
  const Doubles log_m = 2 * s + 2 * s * z * sum;
  const Doubles found = 0 - (__builtin_convertvector(exponent, Doubles) * 0.6931471805599453 + log_m);
  const EightFloats low = __builtin_convertvector(found * (1 - 1e-13), EightFloats);
  const EightFloats high = __builtin_convertvector(found * (1 + 1e-13), EightFloats);
  store(to, low);
  for (int i = 0; i < 8; i++)
    if (low[i] != high[i]) to[i] = exponential(numbers[i] << 32 | numbers[i] >> 32);
}

inline void draw_exponential(Twister& twister, float* values, int64_t count) {
  constexpr int64_t AT_ONCE = 512;
  alignas(64) uint64_t numbers[AT_ONCE];
  Numbers drawn(twister);
  for (int64_t i = 0; i < count; i += AT_ONCE) {
    const int64_t now = count - i < AT_ONCE ? count - i : AT_ONCE;
    drawn.take((uint32_t*)numbers, 2 * now);
    int64_t j = 0;
    for (; j + 8 <= now; j += 8) exponential(numbers + j, values + i + j);
    for (; j < now; j++) values[i + j] = exponential(numbers[j] << 32 | numbers[j] >> 32);
  }
}

}  // namespace
