// Tiles of packed matrices times rows of an input.
#pragma once

#include "formats.h"

namespace {

constexpr int AHEAD = 12288;  // bytes of weights; the hardware of some CPUs does not look beyond a page
constexpr int SLAB = 8;       // cells that are decoded before they are multiplied with many rows

// Rows of the input [cell, row, 32], and their sums over groups [cell, group, row].
template <class T> struct Inputs {
  T* values;
  float* sums;
  int64_t rows;

  INLINE T* at(int64_t cell, int64_t row) const { return values + (cell * rows + row) * COLUMNS; }
};

// Rows that are multiplied for `count`: AMX takes more than sixteen in blocks of that many.
inline int64_t filled_rows(int64_t count, bool amx) {
  return amx && count > LANES ? (count + LANES - 1) / LANES * LANES : count;
}

// The sums over groups of GROUP columns of a cell and row.
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

// The share of a cell in the memory of a tile, some way ahead. Into all caches: what Intel's CPUs fetch past them holds back
// what the hardware fetches, at a third of its pace.
template <class F> INLINE void prefetch(const uint8_t* tile, int64_t cell) {
  constexpr int64_t BYTES = F::LOW_BYTES + F::HIGH_BYTES + F::CELL_FACTORS + (F::SUPER_FACTORS + SUPER_CELLS - 1) / SUPER_CELLS;
#pragma GCC unroll 16
  for (int64_t b = 0; b < BYTES; b += 64) __builtin_prefetch(tile + cell * BYTES + b + AHEAD, 0, 3);
}

// A step is what a lane of 32 bits holds: one float32, two bfloat16.
template <class T> constexpr int STEP = 4 / sizeof(T);

template <class T> INLINE Floats multiply_add(const Floats& sum, const Floats& weights, const T* x) {
#if HAS_BF16
  if constexpr (sizeof(T) == 2)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(load<int>(x)));
#endif
  return sum + weights * to_float(*x);
}

// A group's share of the products [lane] of a row: every path adds it so, and in the order of the columns.
template <class F, class T>
INLINE Floats add(const typename F::Factors& factors, int g, const Floats& sum, Inputs<T> x, int64_t cell, int64_t m,
                  const Floats& products) {
  Floats total = products + factors.scales[g] * sum;
  if (F::OFFSET) total += factors.offsets[g] * x.sums[(cell * F::GROUPS + g) * x.rows + m];
  return total;
}

template <class F, class T> INLINE void decode(const typename F::Codes& codes, T* to) {
#pragma GCC unroll 32
  for (int i = 0; i < COLUMNS / STEP<T>; i++) store(to + i * STEP<T> * LANES, codes.at(i, T()));
}

// A tile times ROWS rows from row m on; what is decoded stays in registers.
template <int ROWS, class F, class T>
void multiply_few(const uint8_t* tile, int64_t cells, Inputs<T> x, int64_t m, float* products) {
  constexpr int STEPS = F::GROUP / STEP<T>;
  typename F::Factors factors;
  typename F::Codes codes;
  Floats totals[ROWS] = {};
  for (int64_t cell = 0; cell < cells; cell++) {
    prefetch<F>(tile, cell);
    codes.go_to(tile, cells, cell);
    factors.read(tile, cells, cell);
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

// A tile times all rows from row m on, ROWS and then fewer at a time. It is decoded anew for each of them, which costs what
// two rows do; keeping what was decoded for up to 64 rows won nothing.
template <int ROWS, class F, class T>
void multiply_rest(const uint8_t* tile, int64_t cells, Inputs<T> x, int64_t m, float* products) {
  for (; m + ROWS <= x.rows; m += ROWS) multiply_few<ROWS, F>(tile, cells, x, m, products);
  constexpr int FEWER = ROWS > 4 ? ROWS / 2 : ROWS - 1;  // every number of rows that is compiled costs seconds
  if constexpr (FEWER > 0)
    if (m < x.rows) multiply_rest<FEWER, F>(tile, cells, x, m, products);
}

// Decoded cells times ROWS rows from row m on, added to their products.
template <int ROWS, class F, class T>
void add_rows(const T* weights, const typename F::Factors* factors, Inputs<T> x, int64_t first, int64_t count, int64_t m,
              float* products) {
  constexpr int STEPS = F::GROUP / STEP<T>;
  Floats totals[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) totals[r] = load<Floats>(products + (m + r) * LANES);
  for (int64_t c = 0; c < count; c++) {
    const T* in = x.at(first + c, m);
#pragma GCC unroll 2
    for (int g = 0; g < F::GROUPS; g++) {
      Floats sum[ROWS] = {};
#pragma GCC unroll 4
      for (int i = g * STEPS; i < (g + 1) * STEPS; i++) {
        const Floats w = load<Floats>(weights + c * CELL + i * STEP<T> * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sum[r] = multiply_add(sum[r], w, in + r * COLUMNS + i * STEP<T>);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) totals[r] = add<F>(factors[c], g, sum[r], x, first + c, m + r, totals[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) store(products + (m + r) * LANES, totals[r]);
}

// The same in float32, where there are no registers for many rows: cells are decoded once, into the first-level cache.
template <class F, class T> void multiply_many(const uint8_t* tile, int64_t cells, Inputs<T> x, float* products) {
  alignas(64) T weights[SLAB * CELL];
  typename F::Factors factors[SLAB], running;
  typename F::Codes codes;
  memset(products, 0, x.rows * LANES * sizeof(float));
  for (int64_t first = 0; first < cells; first += SLAB) {
    const int64_t count = cells - first < SLAB ? cells - first : SLAB;
    for (int64_t c = 0; c < count; c++) {
      prefetch<F>(tile, first + c);
      codes.go_to(tile, cells, first + c);
      decode<F>(codes, weights + c * CELL);
      running.read(tile, cells, first + c);
      factors[c] = running;
    }
    int64_t m = 0;
    for (; m + 8 <= x.rows; m += 8) add_rows<8, F>(weights, factors, x, first, count, m, products);
    if (m + 4 <= x.rows) add_rows<4, F>(weights, factors, x, first, count, m, products), m += 4;
    if (m + 2 <= x.rows) add_rows<2, F>(weights, factors, x, first, count, m, products), m += 2;
    if (m < x.rows) add_rows<1, F>(weights, factors, x, first, count, m, products);
  }
}

#if HAS_AMX
// The kernel gives a process leave to use tiles; oneDNN may have asked already.
bool may_use_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Registers 0, 1: sums [row, lane]; 2, 3: inputs [row, a group]; 4, 5: weights [pair of columns, lane, 2].
void configure(int rows, int group) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 6; i++) {
    config.row_bytes[i] = i / 2 == 1 ? 2 * group : 64;
    config.rows[i] = i < 4 ? rows : group / 2;
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 sees that 8 bytes of it are read, and drops the others
  _tile_loadconfig(&config);
}

// Sums over the groups of a cell [group, row, lane], `block` rows at a time.
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

// A tile times all rows, added to their products. Three cells are under way at a time, so that nothing is loaded right after it was stored.
template <class F> void multiply_tile_amx(const uint8_t* tile, int64_t cells, Inputs<uint16_t> x, int block,
                                            float* products) {
  typename F::Codes codes;
  alignas(64) uint16_t weights[2][CELL];
  alignas(64) float sums[2][F::GROUPS * CHUNK * LANES];
  typename F::Factors factors;
  for (int64_t cell = 0; cell < cells + 2; cell++) {
    if (cell < cells) {
      prefetch<F>(tile, cell);
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

// The products [row, lane] of tile after tile with the same rows, in one thread.
template <class F, class T> class Multiplier {
 public:
  Multiplier(Inputs<T> x, bool amx) : x(x), amx(amx && sizeof(T) == 2) {
#if HAS_AMX
    block = x.rows < LANES ? x.rows : LANES;
    if (this->amx) configure(block, F::GROUP);
#endif
  }
#if HAS_AMX
  ~Multiplier() {
    if (amx) _tile_release();
  }
#endif

  void operator()(const uint8_t* tile, int64_t cells, float* products) const {
#if HAS_AMX
    if constexpr (sizeof(T) == 2)
      if (amx) {
        memset(products, 0, x.rows * LANES * sizeof(float));
        return multiply_tile_amx<F>(tile, cells, x, block, products);
      }
#endif
    if constexpr (sizeof(T) == 2) return multiply_rest<16, F>(tile, cells, x, 0, products);
    else if (x.rows <= 2) return multiply_rest<2, F>(tile, cells, x, 0, products);
    else return multiply_many<F>(tile, cells, x, products);
  }

 private:
  const Inputs<T> x;
  const bool amx;
#if HAS_AMX
  int block;
#endif
};

}  // namespace
