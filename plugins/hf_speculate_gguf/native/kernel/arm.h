// Products of packed tiles and quantised rows on ARM: by smmla for pairs of rows, by sdot, or in 16 bits without either.
#pragma once

#include "integers.h"

#if HAS_NEON
namespace {

// The beginning of a row's sums over a group: -BIAS * sum of the row's integers. Types of eight bits have no bias here.
template <class F> INLINE int32x4_t start(const QuantizedCell& x, int g) {
  if (!F::BIAS || F::CODE_BITS == 8) return vdupq_n_s32(0);
  int32x4_t count = vpaddlq_s16((int16x8_t)vdupq_n_s32(load<int32_t>(x.counts[sum_of_group(F::GROUPS, g)])));
  __asm__("" : "+w"(count));  // GCC would multiply before it copies, and move lanes
  return count * F::BIAS;
}

// The codes of a quad as signed bytes.
template <class F> INLINE int8x16_t signed_quad(const typename F::Codes& codes, int i, int part) {
  const Octets found = codes.template quad<Octets>(i, part);
  return (int8x16_t)(F::CODE_BITS == 8 ? found ^ uint8_t(128) : found);
}

// Number of vectors of four lanes whose sums are in registers together.
template <int ROWS> constexpr int VECTORS_OF = ROWS > 4 ? 2 : PARTS;

// Whether so many rows are multiplied in pairs. Two rows would need more instructions than by sdot.
#if HAS_MMLA
template <int ROWS> constexpr bool IN_PAIRS = ROWS % 2 == 0 && ROWS > 2;
#else
template <int ROWS> constexpr bool IN_PAIRS = false;
#endif

// Adds the products of four codes of each lane and quad number QUAD of the four in `row`.
template <int QUAD> INLINE int32x4_t add_quad(int32x4_t sums, int8x16_t codes, int8x16_t row) {
#if HAS_DOT
  return vdotq_laneq_s32(sums, codes, row, QUAD);
#else
  const int8x16_t x = (int8x16_t)vdupq_laneq_s32((int32x4_t)row, QUAD);
  return vpadalq_s16(sums, vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(x)), vmull_high_s8(codes, x)));
#endif
}

template <int QUAD, int ROWS, class F>
INLINE void add_quads(const typename F::Codes& codes, int i, int first, const int8x16_t* rows,
                      int32x4_t (*sums)[VECTORS_OF<ROWS>]) {
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS_OF<ROWS>; v++) {
    const int8x16_t quad = signed_quad<F>(codes, i + QUAD, first + v);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[r][v] = add_quad<QUAD>(sums[r][v], quad, rows[r]);
  }
  if constexpr (QUAD < 3) add_quads<QUAD + 1, ROWS, F>(codes, i, first, rows, sums);
}

// Sums of ROWS rows over a group, for some vectors of lanes of a tile, from number `first` on.
template <int ROWS, class F>
INLINE void sum_group(const typename F::Codes& codes, const QuantizedCell* in, int g, int first,
                      const volatile int32x4_t* starts, int32x4_t (*sums)[VECTORS_OF<ROWS>]) {
  constexpr int V = VECTORS_OF<ROWS>, STEPS = F::GROUP / 4;
#if HAS_MMLA
  if constexpr (IN_PAIRS<ROWS>) {  // a register has two lanes of two rows; eight columns are multiplied at a time
    constexpr int PAIRS = ROWS / 2;
    int32x4_t lower[PAIRS][V], upper[PAIRS][V];
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        lower[p][v] = starts[p], upper[p][v] = starts[p];
#pragma GCC unroll 4
    for (int i = g * STEPS; i < (g + 1) * STEPS; i += 2) {
      int8x16_t rows[PAIRS];
#pragma GCC unroll 4
      for (int p = 0; p < PAIRS; p++)
        rows[p] = vcombine_s8(vld1_s8(in[2 * p].values + 4 * i), vld1_s8(in[2 * p + 1].values + 4 * i));
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const int32x4_t even = (int32x4_t)signed_quad<F>(codes, i, first + v);
        const int32x4_t odd = (int32x4_t)signed_quad<F>(codes, i + 1, first + v);
        const int8x16_t low = (int8x16_t)vzip1q_s32(even, odd), high = (int8x16_t)vzip2q_s32(even, odd);
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++) {
          lower[p][v] = vmmlaq_s32(lower[p][v], low, rows[p]);
          upper[p][v] = vmmlaq_s32(upper[p][v], high, rows[p]);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        sums[2 * p][v] = vuzp1q_s32(lower[p][v], upper[p][v]);
        sums[2 * p + 1][v] = vuzp2q_s32(lower[p][v], upper[p][v]);
      }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[r][v] = starts[r];
#pragma GCC unroll 2
  for (int i = g * STEPS; i < (g + 1) * STEPS; i += 4) {
    int8x16_t rows[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) rows[r] = vld1q_s8(in[r].values + 4 * i);
    add_quads<0, ROWS, F>(codes, i, first, rows, sums);
  }
}

// Multiplies a tile with ROWS rows from row m on. Totals are in memory, because sums take the registers.
template <int ROWS, class F>
void multiply_few(const Stretch& tiles, const QuantizedRows& x, int64_t m, float* products) {
  constexpr int V = VECTORS_OF<ROWS>;
  typename F::Factors factors;
  typename F::Codes codes;
  Ahead<F, 1> ahead(tiles);
  memset(products += m * LANES, 0, ROWS * LANES * sizeof(float));
  for (int64_t cell = 0; cell < tiles.cells; cell++) {
    if (!m) ahead.prefetch();
    codes.go_to(tiles.first, tiles.cells, cell);
    factors.read(tiles.first, tiles.cells, cell);
    const QuantizedCell* in = &x.at(cell, m);
#pragma GCC unroll 2
    for (int g = 0; g < F::GROUPS; g++) {
      __asm__ volatile("" : : : "memory");  // GCC would keep totals in registers, and move sums to memory for them
      volatile int32x4_t starts[ROWS];  // every sum loads one: copies between registers would compete with products
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r += 1 + IN_PAIRS<ROWS>) {
        const int32x4_t own = start<F>(in[r], g);
        starts[r / (1 + IN_PAIRS<ROWS>)] = IN_PAIRS<ROWS> ? vzip1q_s32(own, start<F>(in[r + 1], g)) : own;
      }
#pragma GCC unroll 2
      for (int first = 0; first < PARTS; first += V) {
        int32x4_t sums[ROWS][V];
        sum_group<ROWS, F>(codes, in, g, first, starts, sums);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const float scale = in[r].scale, sum = in[r].sums[sum_of_group(F::GROUPS, g)];
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) {
            float* const to = products + r * LANES + (first + v) * WIDE;
            store(to, add<F>(load<WideFloats>(to), (WideFloats)vcvtq_f32_s32(sums[r][v]), factors.scales[g].parts[first + v],
                                 factors.offsets[g].parts[first + v], scale, sum));
          }
        }
      }
    }
  }
}

}  // namespace
#endif
