// Tiles of packed matrices times rows that are rounded to integers of 8 bits: sums of integers are exact, so that all
// instructions for them give the same bits.
#pragma once

#include "formats.h"

namespace {

// Rows [cell, row, quad, 4] of integers, to be multiplied with their scales [cell, row]; and the sums of what they stand
// for [cell, 3, row], over the first 16 columns of a cell, the others, and all.
struct Rounded {
  typedef int8_t Value;
  Value* values;
  float *scales, *sums;
  int64_t rows;

  INLINE Value* at(int64_t cell, int64_t row) const { return values + (cell * rows + row) * COLUMNS; }
  INLINE float scale(int64_t cell, int64_t row) const { return scales[cell * rows + row]; }
  INLINE float sum(int64_t cell, int groups, int g, int64_t row) const {
    return sums[(cell * 3 + (groups == 2 ? g : 2)) * rows + row];
  }
};

// The 32 columns of a cell and row, rounded to 127ths of the largest of them.
template <class T> void round_cell(const T* from, const Rounded& to, int64_t cell, int64_t m) {
  const Floats halves[2] = {widen(from), widen(from + LANES)};
  Words most = {};  // of the bits without signs, which ascend with the values, and with NaN at the top
  for (const Floats& half : halves) {
    const Words bits = reinterpret<Words>(half) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  uint32_t highest = 0;
  for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
  const float largest = reinterpret<float>(highest), scale = largest / 127;
  const bool is_finite = highest < 0x7f800000, is_zero = largest < 1e-30f;  // 127 / largest would not be finite
  const float factor = is_finite && !is_zero ? 127 / largest : 0;
  int8_t* values = to.at(cell, m);
  int sums[2] = {};
  for (int h = 0; h < 2; h++) {
    const Ints integers = reinterpret<Ints>((is_finite ? halves[h] : Floats{}) * factor + ROUNDING) - reinterpret<int32_t>(ROUNDING);
    for (int i = 0; i < LANES; i++) {
      const int column = h * LANES + i;
      values[4 * quad_of(column) + byte_of(column)] = integers[i], sums[h] += integers[i];
    }
  }
  to.scales[cell * to.rows + m] = is_zero ? 0 : is_finite ? scale : __builtin_nanf("");
  float* at = to.sums + cell * 3 * to.rows + m;
  at[0] = to.scale(cell, m) * sums[0], at[to.rows] = to.scale(cell, m) * sums[1];
  at[2 * to.rows] = to.scale(cell, m) * (sums[0] + sums[1]);
}

// Rows that only fill.
inline void clear_cell(const Rounded& to, int64_t cell, int64_t m) {
  memset(to.at(cell, m), 0, COLUMNS);
  to.scales[cell * to.rows + m] = 0;
  for (int i = 0; i < 3; i++) to.sums[(cell * 3 + i) * to.rows + m] = 0;
}

#if HAS_AVX512 && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#elif HAS_AVX2 && defined(__AVXVNNI__)
#define HAS_VNNI 1
#endif
#if HAS_VNNI
constexpr bool TAKES_UNSIGNED = true;
#else
constexpr bool TAKES_UNSIGNED = false;
#endif

// Adds the products of four codes of each lane with four bytes of a row: to sums of 32 bits, or to pairs of sums of 16 bits,
// which `widened` adds. Codes have up to seven bits; eight where TAKES_UNSIGNED, and else are integers of eight bits.
template <bool IS_SIGNED> INLINE WideInts add_products(const WideInts& sum, const WideWords& codes, int32_t x) {
#if HAS_AVX512 && HAS_VNNI
  return (WideInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif HAS_VNNI
  return (WideInts)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#elif HAS_AVX512
  const __m512i bytes = _mm512_set1_epi32(x), v = (__m512i)codes;
  const __m512i turned = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(v), __m512i{}, bytes);
  return (WideInts)_mm512_add_epi16((__m512i)sum, IS_SIGNED ? _mm512_maddubs_epi16(_mm512_abs_epi8(v), turned)
                                                            : _mm512_maddubs_epi16(v, bytes));
#elif HAS_AVX2
  const __m256i bytes = _mm256_set1_epi32(x), v = (__m256i)codes;
  return (WideInts)_mm256_add_epi16((__m256i)sum, IS_SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(bytes, v))
                                                            : _mm256_maddubs_epi16(v, bytes));
#elif HAS_DOTPROD
  return (WideInts)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  WideInts total = sum;
  for (int b = 0; b < 4; b++) total += ((WideInts)(codes << (24 - 8 * b)) >> 24) * int32_t(int8_t(x >> 8 * b));
  return total;
#endif
}

INLINE WideInts widened(const WideInts& sums) {
#if HAS_VNNI
  return sums;
#elif HAS_AVX512
  return (WideInts)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif HAS_AVX2
  return (WideInts)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return sums;
#endif
}

// What a type's codes are multiplied as, and what is to be added for that: correction * sum of the row.
template <class F> struct Bytewise {
  static constexpr bool IS_SIGNED = F::CODE_BITS == 8 && !TAKES_UNSIGNED;
  // How many products of pairs fit into 16 bits.
  static constexpr int MOST = TAKES_UNSIGNED || F::CODE_BITS <= 4 ? 8 : F::CODE_BITS == 8 ? 1 : F::CODE_BITS == 6 ? 2 : 4;
  static constexpr bool CORRECTS = F::OFFSET || (F::BIAS && !IS_SIGNED);

  static INLINE WideWords quad(const typename F::Codes& codes, int i, int part) {
    const WideWords found = codes.template quad<WideWords>(i, part);
    return IS_SIGNED ? found ^ 0x80808080 : found;
  }

  static INLINE Floats correction(const typename F::Factors& factors, int g) {
    if (F::OFFSET) return factors.offsets[g];
    return factors.scales[g] * float(-F::BIAS);
  }
};

// A group's share of the products of a row: every path adds it so.
template <class F, class V>
INLINE V add(const V& products, const V& integers, const V& scales, const V& corrections, const Rounded& x, int64_t cell,
             int g, int64_t m) {
  const V total = products + integers * (scales * x.scale(cell, m));
  return Bytewise<F>::CORRECTS ? total + corrections * x.sum(cell, F::GROUPS, g, m) : total;
}

// A tile times ROWS rows from row m on.
template <int ROWS, class F>
void multiply_few(const uint8_t* tile, int64_t cells, const Rounded& x, int64_t m, float* products) {
  constexpr int STEPS = F::GROUP / 4, BATCH = Bytewise<F>::MOST < STEPS ? Bytewise<F>::MOST : STEPS;
  typename F::Factors factors;
  typename F::Codes codes;
  WideFloats totals[ROWS][PARTS] = {};
  for (int64_t cell = 0; cell < cells; cell++) {
    prefetch<F>(tile, cell);
    codes.go_to(tile, cells, cell);
    factors.read(tile, cells, cell);
    const int8_t* in = x.at(cell, m);
#pragma GCC unroll 2
    for (int g = 0; g < F::GROUPS; g++) {
      const Floats correction = Bytewise<F>::correction(factors, g);
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) {
        WideInts sums[ROWS] = {};
#pragma GCC unroll 8
        for (int i = g * STEPS; i < (g + 1) * STEPS; i += BATCH) {
          WideInts some[ROWS] = {};
#pragma GCC unroll 8
          for (int j = i; j < i + BATCH; j++) {
            const WideWords quad = Bytewise<F>::quad(codes, j, part);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
              some[r] = add_products<Bytewise<F>::IS_SIGNED>(some[r], quad, load<int32_t>(in + r * COLUMNS + 4 * j));
          }
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) sums[r] = BATCH == STEPS ? widened(some[r]) : sums[r] + widened(some[r]);
        }
        const WideFloats scales = load<WideFloats>((const float*)&factors.scales[g] + part * WIDE);
        const WideFloats corrections = load<WideFloats>((const float*)&correction + part * WIDE);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          totals[r][part] = add<F>(totals[r][part], __builtin_convertvector(sums[r], WideFloats), scales, corrections, x,
                                   cell, g, m + r);
      }
    }
  }
  memcpy(products + m * LANES, totals, sizeof totals);
}

}  // namespace
