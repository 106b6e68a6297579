// Products of packed tiles and activations quantised to 8-bit integers. Sums of integers are exact, so all instructions
// give the same bits.
#pragma once

#include "formats.h"

namespace {

// A cell of a row in 8-bit integers [quad, 4], in a cache line of its own: threads write neighbouring rows at the same
// time. Sums are over the first 16 columns, the other 16, and all: `sums` of the quantised values, `counts` of the
// integers, negative: of the even columns and of the odd ones.
struct alignas(64) QuantizedCell {
  int8_t values[COLUMNS];
  float scale, sums[3];
  int16_t counts[3][2];
};

// Cells [cell, row].
struct QuantizedRows {
  typedef int8_t Value;
  QuantizedCell* cells;
  int64_t rows;

  INLINE QuantizedCell& at(int64_t cell, int64_t row) const { return cells[cell * rows + row]; }
};

// The place of a group among a cell's sums, for a type that has so many groups in a cell.
constexpr int sum_of_group(int groups, int g) { return groups == 2 ? g : 2; }

// The largest of some floats' bits without signs: these ascend with the values, and NaN is at the top.
INLINE uint32_t highest_bits(const Floats halves[2]) {
#if HAS_AVX512
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512((__m512i)halves[0], mask), _mm512_and_si512((__m512i)halves[1], mask)));
#else
  WideInts most = {};
  for (int h = 0; h < 2; h++)
    for (int i = 0; i < PARTS; i++) {
      const WideInts bits = reinterpret<WideInts>(halves[h].parts[i]) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
  int32_t highest = 0;
  for (int i = 0; i < WIDE; i++) highest = most[i] > highest ? most[i] : highest;
  return highest;
#endif
}

// Writes 32 integers as bytes in the order of quads. Returns the sums of each half's even and odd columns through `sums`.
INLINE void put_bytes(const Ints integers[2], int8_t* to, int16_t sums[2][2]) {
#if HAS_AVX512
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (int h = 0; h < 2; h++) {
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)integers[h]), order);
    store(to + h * LANES, bytes);
    __m128i twos = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
    twos = _mm_add_epi16(twos, _mm_shuffle_epi32(twos, 0x4e));
    store(sums[h], _mm_cvtsi128_si32(_mm_add_epi16(twos, _mm_shuffle_epi32(twos, 0xb1))));
  }
#elif HAS_AVX2
  __m256i eights[4], pairs[2];
  for (int i = 0; i < 4; i++) eights[i] = load<__m256i>((const int32_t*)integers + 8 * i);
  for (int h = 0; h < 2; h++) {
    pairs[h] = _mm256_packs_epi32(eights[2 * h], eights[2 * h + 1]);
    __m128i some = _mm_add_epi16(_mm256_castsi256_si128(pairs[h]), _mm256_extracti128_si256(pairs[h], 1));
    some = _mm_add_epi16(some, _mm_shuffle_epi32(some, 0x4e));
    store(sums[h], _mm_cvtsi128_si32(_mm_add_epi16(some, _mm_shuffle_epi32(some, 0xb1))));
  }
  // first four of every eight columns in the lower half, the others in the upper
  const __m256i all = _mm256_packs_epi16(pairs[0], pairs[1]);
  const __m128i first = _mm256_castsi256_si128(all), last = _mm256_extracti128_si256(all, 1);
  store(to, _mm_unpacklo_epi8(first, last));
  store(to + LANES, _mm_unpackhi_epi8(first, last));
#elif HAS_NEON
  alignas(16) constexpr uint8_t ORDER[LANES] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  for (int h = 0; h < 2; h++) {
    int16x4_t fours[PARTS];
    for (int i = 0; i < PARTS; i++) fours[i] = vmovn_s32((int32x4_t)integers[h].parts[i]);
    const int8x8_t first = vmovn_s16(vcombine_s16(fours[0], fours[1])), last = vmovn_s16(vcombine_s16(fours[2], fours[3]));
    const int8x16_t bytes = vqtbl1q_s8(vcombine_s8(first, last), vld1q_u8(ORDER));
    vst1q_s8(to + h * LANES, bytes);
    const int16x8_t twos = vpaddlq_s8(bytes);
    const int16x4_t some = vadd_s16(vget_low_s16(twos), vget_high_s16(twos));
    store(sums[h], vget_lane_s32((int32x2_t)vadd_s16(some, vext_s16(some, some, 2)), 0));
  }
#else
  for (int h = 0; h < 2; h++) {
    sums[h][0] = sums[h][1] = 0;
    for (int i = 0; i < LANES; i++) {
      const int column = h * LANES + i;
      to[4 * quad_of(column) + byte_of(column)] = integers[h][i], sums[h][i % 2] += integers[h][i];
    }
  }
#endif
}

// Quantises 32 columns to 127ths of the largest.
template <class T> void quantize_cell(const T* from, QuantizedCell& to) {
  const Floats halves[2] = {widen(from), widen(from + LANES)};
  const uint32_t highest = highest_bits(halves);
  const float largest = reinterpret<float>(highest), scale = largest / 127;
  const bool is_finite = highest < 0x7f800000, is_zero = largest < 1e-30f;  // 127 / largest would not be finite
  const float factor = is_finite && !is_zero ? 127 / largest : 0;
  Ints integers[2];
  for (int h = 0; h < 2; h++)
    integers[h] = reinterpret<Ints>((is_finite ? halves[h] : Floats{}) * factor + ROUNDING) - reinterpret<int32_t>(ROUNDING);
  int16_t sums[3][2];
  put_bytes(integers, to.values, sums);
  for (int p = 0; p < 2; p++) sums[2][p] = sums[0][p] + sums[1][p];
  to.scale = is_zero ? 0 : is_finite ? scale : __builtin_nanf("");
  for (int i = 0; i < 3; i++) {
    to.sums[i] = to.scale * (sums[i][0] + sums[i][1]);
    for (int p = 0; p < 2; p++) to.counts[i][p] = -sums[i][p];
  }
}

#if (HAS_AVX512 && defined(__AVX512VNNI__)) || (HAS_AVX2 && defined(__AVXVNNI__))
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
constexpr bool TAKES_UNSIGNED = HAS_VNNI, ADDS_WHOLE = HAS_VNNI;

// Adds a group's part to the products of a row. Every path uses this, so that the bits are equal.
template <class F, class V>
INLINE V add(const V& products, const V& integers, const V& scales, const V& offsets, float scale, float sum) {
  const V total = products + integers * (scales * scale);
  return F::OFFSET ? total + offsets * sum : total;
}

// Tiles that are multiplied together: a row's bytes are broadcast once for all of these.
template <> constexpr int TILES<QuantizedRows> = HAS_AVX512 ? 2 : 1;

#if !HAS_AVX2 && !HAS_NEON  // avx2.h and arm.h multiply in ways of their own

// Adds the products of four codes of each lane and four bytes of a row. Sums are 32-bit with ADDS_WHOLE; else they may be
// pairs of 16-bit sums, which `widened` adds. Codes have at most seven bits, or eight with TAKES_UNSIGNED; otherwise they
// are signed 8-bit integers.
template <bool IS_SIGNED> INLINE WideInts add_products(const WideInts& sum, const WideWords& codes, int32_t x) {
#if HAS_AVX512 && HAS_VNNI
  return (WideInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif HAS_AVX512
  const __m512i bytes = _mm512_set1_epi32(x), v = (__m512i)codes;
  const __m512i turned = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(v), __m512i{}, bytes);
  return (WideInts)_mm512_add_epi16((__m512i)sum, IS_SIGNED ? _mm512_maddubs_epi16(_mm512_abs_epi8(v), turned)
                                                            : _mm512_maddubs_epi16(v, bytes));
#else
  WideInts total = sum;
  for (int b = 0; b < 4; b++) total += ((WideInts)(codes << (24 - 8 * b)) >> 24) * int32_t(int8_t(x >> 8 * b));
  return total;
#endif
}

INLINE WideInts widened(const WideInts& sums) {
#if HAS_AVX512 && !HAS_VNNI
  return (WideInts)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
  return sums;
#endif
}

// The form in which a type's codes are multiplied.
template <class F> struct Bytewise {
  static constexpr bool IS_SIGNED = F::CODE_BITS == 8 && !TAKES_UNSIGNED;
  // Number of pair products that fit into 16 bits.
  static constexpr int MOST = TAKES_UNSIGNED || F::CODE_BITS <= 4 ? 8 : F::CODE_BITS == 8 ? 1 : F::CODE_BITS == 6 ? 2 : 4;
  static constexpr bool HAS_BIAS = F::BIAS && !IS_SIGNED;

  static INLINE WideWords quad(const typename F::Codes& codes, int i, int part) {
    const WideWords found = codes.template quad<WideWords>(i, part);
    return IS_SIGNED ? found ^ 0x80808080 : found;
  }

  // What a row's sums over a group begin with: -BIAS * sum of the row's integers.
  static INLINE WideInts start(const QuantizedCell& x, int g) {
    const int16_t* counts = x.counts[sum_of_group(F::GROUPS, g)];
    if (!HAS_BIAS) return WideInts{};
#if HAS_AVX512
    return (WideInts)_mm512_madd_epi16(_mm512_set1_epi32(load<int32_t>(counts)), _mm512_set1_epi16(F::BIAS));
#else
    return WideInts{} + (counts[0] + counts[1]) * F::BIAS;
#endif
  }
};

// Vectors of these tiles whose sums are in registers together.
constexpr int VECTORS = HAS_AVX512 ? 2 : 1;

// Multiplies TILES tiles with ROWS rows from row m on.
template <int ROWS, class F>
void multiply_few(const Stretch& tiles, const QuantizedRows& x, int64_t m, float* products) {
  constexpr int STEPS = F::GROUP / 4, BATCH = Bytewise<F>::MOST < STEPS ? Bytewise<F>::MOST : STEPS;
  constexpr int COUNT = TILES<QuantizedRows>, V = VECTORS;
  typename F::Factors factors[COUNT];
  typename F::Codes codes[COUNT];
  WideFloats totals[ROWS][COUNT * PARTS] = {};
  Ahead<F, COUNT> ahead(tiles);
  for (int64_t cell = 0; cell < tiles.cells; cell++) {
    if (!m) ahead.prefetch();
#pragma GCC unroll 2
    for (int t = 0; t < COUNT; t++) {
      codes[t].go_to(tiles.at(t), tiles.cells, cell);
      factors[t].read(tiles.at(t), tiles.cells, cell);
    }
    const QuantizedCell* in = &x.at(cell, m);
#pragma GCC unroll 2
    for (int g = 0; g < F::GROUPS; g++) {
#pragma GCC unroll 4
      for (int first = 0; first < COUNT * PARTS; first += V) {
        WideInts sums[ROWS][V];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) sums[r][v] = Bytewise<F>::start(in[r], g);
#pragma GCC unroll 8
        for (int i = g * STEPS; i < (g + 1) * STEPS; i += BATCH) {
          WideInts some[ROWS][V];
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) some[r][v] = ADDS_WHOLE ? sums[r][v] : WideInts{};
#pragma GCC unroll 8
          for (int j = i; j < i + BATCH; j++) {
            WideWords quads[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) quads[v] = Bytewise<F>::quad(codes[(first + v) / PARTS], j, (first + v) % PARTS);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
              for (int v = 0; v < V; v++)
                some[r][v] = add_products<Bytewise<F>::IS_SIGNED>(some[r][v], quads[v], load<int32_t>(in[r].values + 4 * j));
          }
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sums[r][v] = ADDS_WHOLE ? some[r][v] : sums[r][v] + widened(some[r][v]);
        }
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          const int tile = (first + v) / PARTS, lane = (first + v) % PARTS * WIDE;
          const WideFloats scales = load<WideFloats>((const float*)&factors[tile].scales[g] + lane);
          const WideFloats offsets = load<WideFloats>((const float*)&factors[tile].offsets[g] + lane);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++)
            totals[r][first + v] = add<F>(totals[r][first + v], __builtin_convertvector(sums[r][v], WideFloats), scales,
                                          offsets, in[r].scale, in[r].sums[sum_of_group(F::GROUPS, g)]);
        }
      }
    }
  }
  for (int t = 0; t < COUNT; t++)
    for (int r = 0; r < ROWS; r++) memcpy(products + (t * x.rows + m + r) * LANES, totals[r] + t * PARTS, 4 * LANES);
}
#endif

}  // namespace
