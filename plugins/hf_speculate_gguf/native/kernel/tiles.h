// Products of a tile and all rows of an input: the choice of instructions by the number of rows.
#pragma once

#include "amx.h"
#include "arm.h"
#include "avx2.h"

namespace {

// Number of rows of type T to multiply for `count`, quantised to bytes or not. AMX multiplies blocks of sixteen: more than
// sixteen rows in bfloat16 are filled, and bytes that nearly fill a block. Elsewhere an odd number of bytes or bfloat16
// is filled: one row more takes less than another pass.
template <class T> int64_t filled_rows(int64_t count, bool quantize) {
  const int size = quantize ? 1 : sizeof(Factor<T>);
  if (const int64_t whole = (count + LANES - 1) / LANES * LANES; has_amx() && size < 4) {
    if (size == 2) return count > LANES ? whole : count;
    if (whole >= FEWEST_BYTES && whole - count < 4) return whole;
  }
  return size < 4 && count % 8 > (size == 1 ? 2 : 4) ? count + count % 2 : count;
}

// Number of rows whose sums are in registers together.
template <class X> constexpr int ROWS_AT_ONCE = HAS_AVX512 ? 8 : 4;
template <> constexpr int ROWS_AT_ONCE<Inputs<uint16_t>> = 16;
template <> constexpr int ROWS_AT_ONCE<QuantizedRows> = HAS_NEON || (HAS_AVX512 && ADDS_WHOLE) ? 8 : 4;

// Multiplies tiles with all rows from row m on, ROWS at a time and then fewer. Each block of rows decodes the tiles
// again, at the cost of two rows. Keeping decoded cells for up to 64 rows was not faster.
template <int ROWS, class F, class X>
void multiply_rest(const Stretch& tiles, const X& x, int64_t m, float* products) {
  for (; m + ROWS <= x.rows; m += ROWS) multiply_few<ROWS, F>(tiles, x, m, products);
  // Every row count that is compiled takes seconds of compile time. See `filled_rows`.
  constexpr int SIZE = sizeof(typename X::Value);
  constexpr bool HALVES = ROWS > 8 || (SIZE == 4 && ROWS > 4), SKIPS = ROWS > 4 || (SIZE == 1 && ROWS > 2);
  constexpr int FEWER = HALVES ? ROWS / 2 : SKIPS ? ROWS - 2 : ROWS - 1;
  if constexpr (FEWER > 0)
    if (m < x.rows) multiply_rest<FEWER, F>(tiles, x, m, products);
}

// Computes the products [tile, row, lane] of one stretch of tiles after another with the same rows, in one thread.
template <class F, class X> class Multiplier {
  static constexpr int SIZE = sizeof(typename X::Value);

 public:
  Multiplier(const X& x) : x(x), amx(has_amx() && (SIZE == 2 || (SIZE == 1 && x.rows >= FEWEST_BYTES))) {
#if HAS_AMX
    if (amx) configure(x.rows < LANES ? x.rows : LANES, F::GROUP * SIZE);
#endif
  }
#if HAS_AMX
  ~Multiplier() {
    if (amx) _tile_release();
  }
#endif

  void operator()(const Stretch& tiles, float* products) const {
    int64_t done = 0;
#if HAS_AMX
    if constexpr (SIZE < 4)
      if (amx) done = multiply_amx<F>(tiles, x, products);
#endif
#if HAS_AVX2
    if constexpr (SIZE == 1) multiply_quantized<F>(tiles, x, products);
    else
#endif
      multiply_rest<ROWS_AT_ONCE<X>, F>(tiles, x, done, products);
  }

 private:
  const X& x;
  const bool amx;
};

}  // namespace
