// Vectors of sixteen lanes, which the compiler maps to any CPU; the available instruction sets; exp.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(HFS_PORTABLE)
#include <immintrin.h>
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_AVX512 1
#if defined(__AVX512BF16__)
#define HAS_BF16 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__) && HAS_BF16 && !defined(HFS_NO_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#endif
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16, COLUMNS = 32, SUPER_CELLS = 8;
constexpr int CHUNK = 128;  // most rows of an input in one call
constexpr int CELL = COLUMNS * LANES;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

#ifndef HAS_AVX512
#define HAS_AVX512 0
#endif
#ifndef HAS_AVX2
#define HAS_AVX2 0
#endif
#ifndef HAS_BF16
#define HAS_BF16 0
#endif

// Number of lanes that the CPU computes at once.
#if HAS_AVX512
constexpr int WIDE = 16;
#elif HAS_AVX2
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
constexpr int PARTS = LANES / WIDE;
typedef float WideFloats __attribute__((vector_size(4 * WIDE)));
typedef int32_t WideInts __attribute__((vector_size(4 * WIDE)));
typedef uint32_t WideWords __attribute__((vector_size(4 * WIDE)));

template <class V> INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V> INLINE void store(void* to, const V& v) { memcpy(to, &v, sizeof v); }
template <class V, class U> INLINE V reinterpret(const U& u) { return load<V>(&u); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t x) { return reinterpret<float>(uint32_t(x) << 16); }

// Loads sixteen values as float32.
INLINE Floats widen(const float* from) { return load<Floats>(from); }
INLINE Floats widen(const uint16_t* from) {
#if HAS_AVX512
  return reinterpret<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#else
  return reinterpret<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
}

// Stores sixteen values; bfloat16 is rounded to nearest, ties to even.
INLINE void narrow(float* to, const Floats& v) { store(to, v); }
INLINE void narrow(uint16_t* to, const Floats& v) {
#if HAS_BF16
  store(to, _mm512_cvtneps_pbh((__m512)v));
#else
  const Words bits = reinterpret<Words>(v);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words quiet = (bits >> 16) | 64;  // a NaN must not be rounded to infinity
  store(to, __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded, Halves));
#endif
}

// Alternating lanes of two vectors, from their lower or their upper halves.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
INLINE Words lower_lanes(Words a, Words b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE Words upper_lanes(Words a, Words b) {
  return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Turns rows into columns: each round rotates the bits of (row, lane) by one.
INLINE void transpose(Words v[LANES]) {
  for (int round = 0; round < 4; round++) {
    Words turned[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      turned[2 * i] = lower_lanes(v[i], v[i + LANES / 2]);
      turned[2 * i + 1] = upper_lanes(v[i], v[i + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) v[i] = turned[i];
  }
}

// The sum of all lanes, always in this order, so that the bits do not depend on the surrounding code.
INLINE float sum_of(const Floats& v) {
  float part[LANES];
  store(part, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

// 1.5 * 2^23: adding it rounds a value to an integer, ties to even, in the low bits of the sum.
constexpr float ROUNDING = 12582912.0f;

// e^x to 2 units in the last place; 0 below -87, constant above 88. Cody-Waite reduction, polynomial of Cephes.
INLINE Floats exponential(Floats x) {
  const Floats low = Floats{} - 87.0f, high = Floats{} + 88.0f;
  const Ints vanishes = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Floats shifted = x * 1.44269504f + ROUNDING, n = shifted - ROUNDING;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Ints exponent = reinterpret<Ints>(shifted) << 23;
  const Floats value = reinterpret<Floats>(reinterpret<Ints>(y) + exponent);
  return reinterpret<Floats>(reinterpret<Ints>(value) & ~vanishes);
}

}  // namespace
