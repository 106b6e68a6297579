// Products of a tile and all rows of an input: the choice of instructions by the number of rows.
#pragma once

#include "integers.h"
#include "products.h"

namespace {

#if HAS_AMX
// The operating system must permit a process to use tiles; oneDNN may have asked already.
inline bool has_amx() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return may;
}
#else
constexpr bool has_amx() { return false; }
#endif

// Number of rows of type T to multiply for `count`, rounded to bytes or not. AMX multiplies more than sixteen in blocks of
// sixteen. Elsewhere an odd number of bytes or bfloat16 is filled: one row more takes less than another pass.
template <class T> int64_t filled_rows(int64_t count, bool rounds) {
  const int size = rounds ? 1 : sizeof(Factor<T>);
  if (size == 2 && has_amx()) return count > LANES ? (count + LANES - 1) / LANES * LANES : count;
  return size < 4 && count % 8 > (size == 1 ? 2 : 4) ? count + count % 2 : count;
}

#if HAS_AMX
// Registers 0, 1: sums [row, lane]; 2, 3: inputs [row, a group]; 4, 5: weights [pair of columns, lane, 2].
inline void configure(int rows, int group_bytes) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 6; i++) {
    config.row_bytes[i] = i / 2 == 1 ? group_bytes : 64;
    config.rows[i] = i < 4 ? rows : group_bytes / 4;
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 believes that only 8 bytes are read, and would drop the others
  _tile_loadconfig(&config);
}

// Computes the sums over the groups of a cell [group, row, lane], `block` rows at a time.
template <class F> void cell_sums(const uint16_t* weights, Inputs<uint16_t> x, int64_t cell, int block, float* sums) {
  _tile_loadd(4, weights, 64);
  if (F::GROUPS == 2) _tile_loadd(5, weights + F::GROUP * LANES, 64);
  for (int64_t m = 0; m < x.rows; m += block) {
    _tile_zero(0);
    _tile_loadd(2, x.at(cell, m), 64);
    _tile_dpbf16ps(0, 2, 4);
    _tile_stored(0, sums + m * LANES, 64);
    if (F::GROUPS == 1) continue;
    _tile_zero(1);
    _tile_loadd(3, x.at(cell, m) + F::GROUP, 64);
    _tile_dpbf16ps(1, 3, 5);
    _tile_stored(1, sums + (x.rows + m) * LANES, 64);
  }
}

template <class F> INLINE void decode(const typename F::Codes& codes, uint16_t* to) {
#pragma GCC unroll 32
  for (int i = 0; i < COLUMNS / 2; i++) store(to + i * 2 * LANES, codes.at(i, uint16_t()));
}

// Multiplies a tile with all rows. Three cells are in progress at a time, so that nothing is loaded right after it was
// stored.
template <class F>
void multiply_amx(const Stretch& tiles, Inputs<uint16_t> x, int block, float* products) {
  const uint8_t* tile = tiles.first;
  const int64_t cells = tiles.cells;
  typename F::Codes codes;
  alignas(64) uint16_t weights[2][CELL];
  alignas(64) float sums[2][F::GROUPS * CHUNK * LANES];
  typename F::Factors factors;
  Ahead<F, 1> ahead(tiles);
  memset(products, 0, x.rows * LANES * sizeof(float));
  for (int64_t cell = 0; cell < cells + 2; cell++) {
    if (cell < cells) {
      ahead.prefetch();
      codes.go_to(tile, cells, cell);
      decode<F>(codes, weights[cell % 2]);
    }
    if (cell >= 1 && cell <= cells) cell_sums<F>(weights[(cell - 1) % 2], x, cell - 1, block, sums[(cell - 1) % 2]);
    if (cell < 2) continue;
    factors.read(tile, cells, cell - 2);
    for (int g = 0; g < F::GROUPS; g++)
      for (int64_t m = 0; m < x.rows; m++) {
        float* to = products + m * LANES;
        const Floats sum = load<Floats>(sums[cell % 2] + (g * x.rows + m) * LANES);
        store(to, add<F>(factors, g, sum, x, cell - 2, m, load<Floats>(to)));
      }
  }
}
#endif

// Number of rows whose sums are in registers together.
template <class X> constexpr int ROWS_AT_ONCE = HAS_AVX512 ? 8 : 4;
template <> constexpr int ROWS_AT_ONCE<Inputs<uint16_t>> = 16;
template <> constexpr int ROWS_AT_ONCE<Rounded> = HAS_AVX2 || (HAS_AVX512 && !ADDS_WHOLE) ? 4 : 8;

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
// Rounded rows do not use AMX: what it saves is little compared with scaling the sums of every group.
template <class F, class X> class Multiplier {
  typedef typename X::Value Value;

 public:
  Multiplier(const X& x) : x(x), amx(has_amx() && sizeof(Value) == 2) {
#if HAS_AMX
    block = x.rows < LANES ? x.rows : LANES;
    if (amx) configure(block, 2 * F::GROUP);
#endif
  }
#if HAS_AMX
  ~Multiplier() {
    if (amx) _tile_release();
  }
#endif

  void operator()(const Stretch& tiles, float* products) const {
#if HAS_AMX
    if constexpr (sizeof(Value) == 2)
      if (amx) return multiply_amx<F>(tiles, x, block, products);
#endif
    multiply_rest<ROWS_AT_ONCE<X>, F>(tiles, x, 0, products);
  }

 private:
  const X& x;
  const bool amx;
#if HAS_AMX
  int block;
#endif
};

}  // namespace
