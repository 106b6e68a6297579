// Products of dense matrices [out, in] and few rows, at the speed at which memory delivers the matrix.
#pragma once

#include "products.h"
#include "threads.h"

namespace {

INLINE float total(const WideFloats& v) {
#if HAS_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int i = 0; i < WIDE; i++) sum += v[i];
  return sum;
#endif
}

// Adds 32 columns of the products of OUT matrix rows and ROWS input rows.
template <int OUT, int ROWS, class T, class From>
INLINE void add_cell(const T* weights, int64_t in_features, const From* const* x, WideFloats sums[][ROWS]) {
#if HAS_BF16
  if constexpr (sizeof(T) == 2) {
    for (int o = 0; o < OUT; o++) {
      const __m512i w = load<__m512i>(weights + o * in_features);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
        sums[o][r] = (WideFloats)_mm512_dpbf16_ps((__m512)sums[o][r], (__m512bh)w, (__m512bh)load<__m512i>(x[r]));
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int part = 0; part < COLUMNS; part += WIDE)
#pragma GCC unroll 4
    for (int o = 0; o < OUT; o++) {
      const WideFloats w = widen_part(weights + o * in_features + part);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[o][r] += w * widen_part(x[r] + part);
    }
}

// Multiplies OUT matrix rows with ROWS input rows from row m on; writes [row, 16].
template <int OUT, int ROWS, class T, class X>
void multiply_dense(const T* weights, int64_t in_features, const X& x, int64_t m, float* to) {
  WideFloats sums[OUT][ROWS] = {};
  for (int64_t cell = 0; cell < in_features / COLUMNS; cell++) {
    decltype(x.at(0, 0)) rows[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) rows[r] = x.at(cell, m + r);
    add_cell<OUT, ROWS>(weights + cell * COLUMNS, in_features, rows, sums);
  }
  for (int o = 0; o < OUT; o++)
    for (int r = 0; r < ROWS; r++) to[r * LANES + o] = total(sums[o][r]);
}

template <int OUT, class T, class X> void multiply_dense(const T* weights, int64_t in_features, const X& x, float* to) {
  constexpr int MOST = HAS_AVX512 ? 4 : 2;
  int64_t m = 0;
  for (; m + MOST <= x.rows; m += MOST) multiply_dense<OUT, MOST>(weights, in_features, x, m, to + m * LANES);
  if (MOST > 2 && m + 2 <= x.rows) multiply_dense<OUT, 2>(weights, in_features, x, m, to + m * LANES), m += 2;
  if (m < x.rows) multiply_dense<OUT, 1>(weights, in_features, x, m, to + m * LANES);
}

// Multiplies at most sixteen matrix rows with all input rows; writes [row, 16].
template <class T, class X>
void multiply_dense_rows(const T* weights, int64_t in_features, int64_t count, const X& x, float* to) {
  constexpr int OUT = 4;
  int64_t o = 0;
  for (; o + OUT <= count; o += OUT) multiply_dense<OUT>(weights + o * in_features, in_features, x, to + o);
  for (; o < count; o++) multiply_dense<1>(weights + o * in_features, in_features, x, to + o);
}

}  // namespace
