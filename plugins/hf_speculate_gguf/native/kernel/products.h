// Products of packed tiles and rows of an input in bfloat16 or float32.
#pragma once

#include <type_traits>

#include "formats.h"

namespace {

// The type in which values of type T are multiplied.
template <class T> using Factor = typename std::conditional<HAS_BF16, T, float>::type;

// Rows of an input [cell, row, 32], and their sums over groups [cell, group, row].
template <class T> struct Inputs {
  typedef T Value;
  T* values;
  float* sums;
  int64_t rows;

  INLINE T* at(int64_t cell, int64_t row) const { return values + (cell * rows + row) * COLUMNS; }
};

// Computes the sums over groups of GROUP columns of a cell and row.
template <int GROUP, class T> void sum_groups(Inputs<T> x, int64_t cell, int64_t m) {
  constexpr int GROUPS = COLUMNS / GROUP;
  const T* row = x.at(cell, m);
  for (int g = 0; g < GROUPS; g++) {
    float parts[8] = {}, sum = 0;
    for (int i = 0; i < GROUP; i++) parts[i % 8] += to_float(row[g * GROUP + i]);
    for (int i = 0; i < 8; i++) sum += parts[i];
    x.sums[(cell * GROUPS + g) * x.rows + m] = sum;
  }
}

// Values in a lane of 32 bits (a step): one float32, or two bfloat16.
template <class T> constexpr int STEP = 4 / sizeof(T);

INLINE Floats multiply_add(const Floats& sum, const Floats& weights, const float* x) { return sum + weights * *x; }
#if HAS_BF16
INLINE Floats multiply_add(const Floats& sum, const Floats& weights, const uint16_t* x) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(load<int>(x)));
}
#endif

// Adds a group's part to the products [lane] of a row, in the order of the columns. Every path uses this, so that the
// bits are equal.
template <class F, class T>
INLINE Floats add(const typename F::Factors& factors, int g, const Floats& sum, Inputs<T> x, int64_t cell, int64_t m,
                  const Floats& products) {
  Floats total = products + factors.scales[g] * sum;
  if (F::OFFSET) total += factors.offsets[g] * x.sums[(cell * F::GROUPS + g) * x.rows + m];
  return total;
}

// Multiplies a tile with ROWS rows from row m on; decoded weights stay in registers.
template <int ROWS, class F, class T>
void multiply_few(const Stretch& tiles, Inputs<T> x, int64_t m, float* products) {
  constexpr int STEPS = F::GROUP / STEP<T>;
  typename F::Factors factors;
  typename F::Codes codes;
  Floats totals[ROWS] = {};
  Ahead<F, 1> ahead(tiles);
  for (int64_t cell = 0; cell < tiles.cells; cell++) {
    if (!m) ahead.prefetch();
    codes.go_to(tiles.first, tiles.cells, cell);
    factors.read(tiles.first, tiles.cells, cell);
    const T* in = x.at(cell, m);
#pragma GCC unroll 2
    for (int g = 0; g < F::GROUPS; g++) {
      Floats sum[ROWS] = {};
#pragma GCC unroll 32
      for (int i = g * STEPS; i < (g + 1) * STEPS; i++) {
        const Floats weights = codes.at(i, T());
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sum[r] = multiply_add(sum[r], weights, in + r * COLUMNS + i * STEP<T>);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) totals[r] = add<F>(factors, g, sum[r], x, cell, m + r, totals[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) store(products + (m + r) * LANES, totals[r]);
}

}  // namespace
