// Products by Intel's tile instructions (AMX), for activations in bfloat16 or quantised to bytes.
#pragma once

#include "integers.h"
#include "products.h"

namespace {

// Rows of bytes from which on AMX is faster. It stores the sums of every group before they are scaled.
constexpr int FEWEST_BYTES = 2 * LANES;

#if HAS_AMX
// The operating system must permit a process to use tiles; oneDNN may have asked already.
inline bool has_amx() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return may;
}

// Registers 0, 1: sums [row, lane]; 2, 3: inputs [row, a group]; 4, 5: weights [step of columns, lane, values of 32 bits].
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

// Multiplies a tile with all rows, and returns their number. Three cells are in progress at a time, so that nothing is
// loaded right after it was stored.
template <class F> int64_t multiply_amx(const Stretch& tiles, const Inputs<uint16_t>& x, float* products) {
  const int block = x.rows < LANES ? x.rows : LANES;
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
  return x.rows;
}

// Groups of columns whose sums are stored before they are scaled. Neither two nor eight were faster.
constexpr int SUMMED = 4;

template <class F> INLINE void decode(const typename F::Codes& codes, int8_t* to) {
#pragma GCC unroll 8
  for (int i = 0; i < QUADS; i++)
    store(to + i * 4 * LANES, _mm512_sub_epi8((__m512i)codes.template quad<Words>(i, 0), _mm512_set1_epi8(int8_t(F::BIAS))));
}

// Some cells of the tiles that are multiplied together, for blocks of sixteen rows of bytes.
template <class F> class ByteCells {
  static constexpr int TOGETHER = TILES<QuantizedRows>;
  static_assert(TOGETHER == 2, "`multiply` takes two");

 public:
  static constexpr int MOST = SUMMED / F::GROUPS;

  INLINE ByteCells(const Stretch& tiles) : tiles(tiles), ahead(tiles) {}

  INLINE void read(int64_t begin, int64_t end) {
    first = begin, groups = (end - begin) * F::GROUPS;
    for (int64_t cell = begin; cell < end; cell++) {
      ahead.prefetch();
      for (int t = 0; t < TOGETHER; t++) {
        codes[t].go_to(tiles.at(t), tiles.cells, cell);
        decode<F>(codes[t], weights[t] + (cell - begin) * CELL);
        factors[t].read(tiles.at(t), tiles.cells, cell);
        for (int g = 0; g < F::GROUPS; g++) {
          scales[t][(cell - begin) * F::GROUPS + g] = factors[t].scales[g];
          if (F::OFFSET) offsets[t][(cell - begin) * F::GROUPS + g] = factors[t].offsets[g];
        }
      }
    }
  }

  // Adds the products with the rows from m on.
  INLINE void multiply(const QuantizedRows& x, int64_t m, float* products) {
    for (int g = 0; g < groups; g++) {
      _tile_loadd(2, row(x, m, g).values + g % F::GROUPS * F::GROUP, sizeof(QuantizedCell));
      _tile_zero(0);
      _tile_loadd(4, weights[0] + g * F::GROUP * LANES, 64);
      _tile_dpbssd(0, 2, 4);
      _tile_zero(1);
      _tile_loadd(5, weights[1] + g * F::GROUP * LANES, 64);
      _tile_dpbssd(1, 2, 5);
      _tile_stored(0, sums[0][g], 64);
      _tile_stored(1, sums[1][g], 64);
    }
    for (int t = 0; t < TOGETHER; t++) scale(x, m, t, products + (t * x.rows + m) * LANES);
  }

 private:
  const QuantizedCell& row(const QuantizedRows& x, int64_t m, int g) const { return x.at(first + g / F::GROUPS, m); }

  INLINE void scale(const QuantizedRows& x, int64_t m, int t, float* to) const {
    Floats totals[LANES] = {};
#pragma GCC unroll 16
    for (int r = 0; first && r < LANES; r++) totals[r] = load<Floats>(to + r * LANES);
    for (int g = 0; g < groups; g++) {
      const QuantizedCell* in = &row(x, m, g);
#pragma GCC unroll 16
      for (int r = 0; r < LANES; r++)
        totals[r] = add<F>(totals[r], __builtin_convertvector(load<Ints>(sums[t][g] + r * LANES), Floats), scales[t][g],
                           offsets[t][g], in[r].scale, in[r].sums[sum_of_group(F::GROUPS, g % F::GROUPS)]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) store(to + r * LANES, totals[r]);
  }

  const Stretch& tiles;
  Ahead<F, TOGETHER> ahead;
  int64_t first;
  int groups;
  typename F::Codes codes[TOGETHER];
  typename F::Factors factors[TOGETHER];
  Floats scales[TOGETHER][SUMMED], offsets[TOGETHER][SUMMED];
  alignas(64) int8_t weights[TOGETHER][MOST * CELL];
  alignas(64) int32_t sums[TOGETHER][SUMMED][LANES * LANES];
};

// Multiplies tiles with all whole blocks of sixteen rows of bytes; returns the number of these rows.
template <class F> int64_t multiply_amx(const Stretch& tiles, const QuantizedRows& x, float* products) {
  ByteCells<F> part(tiles);
  const int64_t rows = x.rows / LANES * LANES;
  for (int64_t cell = 0; cell < tiles.cells; cell += part.MOST) {
    part.read(cell, cell + part.MOST < tiles.cells ? cell + part.MOST : tiles.cells);
    for (int64_t m = 0; m < rows; m += LANES) part.multiply(x, m, products);
  }
  return rows;
}
#else
constexpr bool has_amx() { return false; }
#endif

}  // namespace
