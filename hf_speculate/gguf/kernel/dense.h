// Dense bfloat16 matrices times few rows: as fast as memory gives the matrix.
#pragma once

#include "threads.h"
#include "vectors.h"

#if HAS_BF16
namespace {

struct Dense {
  const uint16_t *weights, *x, *bias;  // [out, in], [row, in], [out] or null
  uint16_t* y;                         // [row, out]
  int64_t in_features, out_features;
};

// OUT rows of the matrix from row n on times ROWS rows of the input from row m on.
template <int OUT, int ROWS> void multiply_dense(const Dense& d, int64_t n, int64_t m) {
  __m512 sums[OUT][ROWS] = {};
  for (int64_t k = 0; k < d.in_features; k += COLUMNS) {
    __m512i x[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) x[r] = load<__m512i>(d.x + (m + r) * d.in_features + k);
#pragma GCC unroll 8
    for (int o = 0; o < OUT; o++) {
      const __m512i weights = load<__m512i>(d.weights + (n + o) * d.in_features + k);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[o][r] = _mm512_dpbf16_ps(sums[o][r], (__m512bh)weights, (__m512bh)x[r]);
    }
  }
  for (int o = 0; o < OUT; o++)
    for (int r = 0; r < ROWS; r++) {
      const float bias = d.bias ? to_float(d.bias[n + o]) : 0;
      alignas(64) uint16_t rounded[LANES];
      narrow(rounded, Floats{} + (_mm512_reduce_add_ps(sums[o][r]) + bias));
      d.y[(m + r) * d.out_features + n + o] = rounded[0];
    }
}

template <int OUT> void multiply_dense(const Dense& d, int64_t n, int64_t rows) {
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) multiply_dense<OUT, 4>(d, n, m);
  if (m + 2 <= rows) multiply_dense<OUT, 2>(d, n, m), m += 2;
  if (m < rows) multiply_dense<OUT, 1>(d, n, m);
}

void multiply_dense(const Dense& d, int64_t rows, int threads) {
  constexpr int OUT = 4;
  const int64_t blocks = d.out_features / OUT;
  parallel(d.in_features * d.out_features > 1 << 16 ? threads : 1, blocks,
           [&](int64_t i) { multiply_dense<OUT>(d, i * OUT, rows); });
  for (int64_t n = blocks * OUT; n < d.out_features; n++) multiply_dense<1>(d, n, rows);
}

}  // namespace
#endif
