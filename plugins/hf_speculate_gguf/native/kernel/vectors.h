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
#elif defined(__aarch64__) && !defined(HFS_PORTABLE)
#include <arm_neon.h>
#define HAS_NEON 1
#ifdef __ARM_FEATURE_DOTPROD
#define HAS_DOT 1
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
#define HAS_MMLA 1
#endif
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16, COLUMNS = 32, SUPER_CELLS = 8;
constexpr int CHUNK = 128;  // most rows of an input in one call
constexpr int CELL = COLUMNS * LANES;

#ifndef HAS_AVX512
#define HAS_AVX512 0
#endif
#ifndef HAS_AVX2
#define HAS_AVX2 0
#endif
#ifndef HAS_BF16
#define HAS_BF16 0
#endif
#ifndef HAS_NEON
#define HAS_NEON 0
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
typedef uint16_t WideHalves __attribute__((vector_size(2 * WIDE)));
typedef int8_t WideBytes __attribute__((vector_size(WIDE)));
typedef uint8_t Octets __attribute__((vector_size(16)));

// Sixteen lanes. Compilers keep vectors that are wider than the CPU's in memory, and often compute them lane by lane.
template <class V> struct Sixteen {
  V parts[PARTS];

  INLINE auto operator[](int i) const { return parts[i / WIDE][i % WIDE]; }
};

template <class V> constexpr bool IS_SIXTEEN = false;
template <class V> constexpr bool IS_SIXTEEN<Sixteen<V>> = true;

template <class V> INLINE V load(const void* from) {
  V v;
  if constexpr (IS_SIXTEEN<V>)
    for (int i = 0; i < PARTS; i++) memcpy(&v.parts[i], (const char*)from + 4 * WIDE * i, 4 * WIDE);
  else
    memcpy(&v, from, sizeof v);
  return v;
}
template <class V> INLINE void store(void* to, const V& v) {
  if constexpr (IS_SIXTEEN<V>)
    for (int i = 0; i < PARTS; i++) memcpy((char*)to + 4 * WIDE * i, &v.parts[i], 4 * WIDE);
  else
    memcpy(to, &v, sizeof v);
}
template <class V, class U> INLINE V reinterpret(const U& u) { return load<V>(&u); }

// The part of sixteen lanes with this number, and the sixteen lanes of what `of` returns for each part.
template <class V> INLINE const V& part(const Sixteen<V>& v, int i) { return v.parts[i]; }
#if HAS_AVX512
typedef WideFloats Floats;
typedef WideInts Ints;
typedef WideWords Words;
typedef uint16_t Shorts __attribute__((vector_size(64)));

template <class V> INLINE const V& part(const V& v, int) { return v; }
template <class Of> INLINE auto by_part(const Of& of) { return of(0); }
#else
typedef Sixteen<WideFloats> Floats;
typedef Sixteen<WideInts> Ints;
typedef Sixteen<WideWords> Words;

template <class Of> INLINE auto by_part(const Of& of) {
  Sixteen<decltype(of(0))> made;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) made.parts[i] = of(i);
  return made;
}
#endif

#define OPERATOR(Result, op)                                                                           \
  template <class V> INLINE Sixteen<Result> operator op(const Sixteen<V>& a, const Sixteen<V>& b) {    \
    Sixteen<Result> made;                                                                              \
    for (int i = 0; i < PARTS; i++) made.parts[i] = (Result)(a.parts[i] op b.parts[i]);                \
    return made;                                                                                       \
  }                                                                                                    \
  template <class V, class Scalar> INLINE Sixteen<Result> operator op(const Sixteen<V>& a, Scalar b) { \
    Sixteen<Result> made;                                                                              \
    for (int i = 0; i < PARTS; i++) made.parts[i] = (Result)(a.parts[i] op b);                         \
    return made;                                                                                       \
  }
OPERATOR(V, +) OPERATOR(V, -) OPERATOR(V, *) OPERATOR(V, /) OPERATOR(V, &) OPERATOR(V, |) OPERATOR(V, ^)
OPERATOR(V, <<) OPERATOR(V, >>)
OPERATOR(WideInts, <) OPERATOR(WideInts, >) OPERATOR(WideInts, >=) OPERATOR(WideInts, !=)
#undef OPERATOR
template <class V> INLINE auto operator-(const Sixteen<V>& a) { return by_part([&](int i) { return -a.parts[i]; }); }
template <class V> INLINE auto operator~(const Sixteen<V>& a) { return by_part([&](int i) { return ~a.parts[i]; }); }
template <class V, class Other> INLINE Sixteen<V>& operator+=(Sixteen<V>& a, const Other& b) { return a = a + b; }
template <class V, class Other> INLINE Sixteen<V>& operator*=(Sixteen<V>& a, const Other& b) { return a = a * b; }
template <class V, class Other> INLINE Sixteen<V>& operator|=(Sixteen<V>& a, const Other& b) { return a = a | b; }

INLINE Floats choose(const Ints& mask, const Floats& yes, const Floats& no) {
  return by_part([&](int i) { return part(mask, i) ? part(yes, i) : part(no, i); });
}
INLINE Floats convert(const Ints& v) {
  return by_part([&](int i) { return __builtin_convertvector(part(v, i), WideFloats); });
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t x) { return reinterpret<float>(uint32_t(x) << 16); }

// Loads a part of sixteen values as float32, or all of them.
INLINE WideFloats widen_part(const float* from) { return load<WideFloats>(from); }
INLINE WideFloats widen_part(const uint16_t* from) {
#if HAS_AVX512
  return (WideFloats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#elif HAS_AVX2
  return (WideFloats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#elif HAS_NEON
  return (WideFloats)vshll_n_u16(vld1_u16(from), 16);
#else
  return reinterpret<WideFloats>(__builtin_convertvector(load<WideHalves>(from), WideWords) << 16);
#endif
}
template <class T> INLINE Floats widen(const T* from) {
  return by_part([&](int i) { return widen_part(from + WIDE * i); });
}

// Stores sixteen values; bfloat16 is rounded to nearest, ties to even.
INLINE void narrow(float* to, const Floats& v) { store(to, v); }
#if HAS_BF16
INLINE void narrow(uint16_t* to, const Floats& v) { store(to, _mm512_cvtneps_pbh((__m512)v)); }
#else
INLINE WideHalves narrowed(const WideFloats& v) {
  const WideWords bits = reinterpret<WideWords>(v), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const WideWords quiet = (bits >> 16) | 64;  // a NaN must not be rounded to infinity
  return __builtin_convertvector(v != v ? quiet : rounded, WideHalves);
}
INLINE void narrow(uint16_t* to, const Floats& v) {
  for (int i = 0; i < PARTS; i++) store(to + WIDE * i, narrowed(part(v, i)));
}
#endif

// a * b - c * d, of which only c * d is rounded. ARM has no such instruction for vectors, so GCC would round a * b there.
INLINE WideFloats subtract_products(const WideFloats& a, const WideFloats& b, const WideFloats& c, const WideFloats& d) {
#if HAS_NEON
  return (WideFloats)vfmaq_f32(-(float32x4_t)(c * d), (float32x4_t)a, (float32x4_t)b);
#else
  return a * b - c * d;
#endif
}

// Alternating lanes of two vectors, from their lower or their upper halves.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, WideInts{__VA_ARGS__})
#endif
#if HAS_AVX512
#define LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif HAS_AVX2
#define LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define UPPER 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOWER 0, 4, 1, 5
#define UPPER 2, 6, 3, 7
#endif
INLINE WideWords lower_lanes(const WideWords& a, const WideWords& b) { return SHUFFLE(a, b, LOWER); }
INLINE WideWords upper_lanes(const WideWords& a, const WideWords& b) { return SHUFFLE(a, b, UPPER); }
template <class V> INLINE Sixteen<V> mixed_lanes(const Sixteen<V>& a, const Sixteen<V>& b, int first) {
  return by_part([&](int i) {
    const V &x = a.parts[first + i / 2], &y = b.parts[first + i / 2];
    return i % 2 ? upper_lanes(x, y) : lower_lanes(x, y);
  });
}
template <class V> INLINE Sixteen<V> lower_lanes(const Sixteen<V>& a, const Sixteen<V>& b) { return mixed_lanes(a, b, 0); }
template <class V> INLINE Sixteen<V> upper_lanes(const Sixteen<V>& a, const Sixteen<V>& b) {
  return mixed_lanes(a, b, PARTS / 2);
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
INLINE WideFloats exponential(WideFloats x) {
  const WideFloats low = WideFloats{} - 87.0f, high = WideFloats{} + 88.0f;
  const WideInts vanishes = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const WideFloats shifted = x * 1.44269504f + ROUNDING, n = shifted - ROUNDING;
  const WideFloats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  WideFloats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const WideInts exponent = reinterpret<WideInts>(shifted) << 23;
  const WideFloats value = reinterpret<WideFloats>(reinterpret<WideInts>(y) + exponent);
  return reinterpret<WideFloats>(reinterpret<WideInts>(value) & ~vanishes);
}

template <class V> INLINE Sixteen<V> exponential(const Sixteen<V>& x) {
  return by_part([&](int i) { return exponential(x.parts[i]); });
}

}  // namespace
