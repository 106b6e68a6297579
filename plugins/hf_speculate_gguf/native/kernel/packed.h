// Products of packed matrices, and what is known of each type. `blocks.cpp` and `super_blocks.cpp` compile this.
#pragma once

#include "tiles.h"

namespace {

// The destination of products: [row, lane] for the columns from `column` on.
struct Sink {
  void* to;
  void (*put)(void* to, int64_t column, int64_t lanes, const float* products);
  int64_t first_column = 0;  // first column of the matrix, among others with the same input
};

// Rows of products.
template <class T> struct Output {
  T* y;
  int64_t count, stride;

  static void put(void* to, int64_t column, int64_t lanes, const float* products) {
    const Output& out = *(Output*)to;
    for (int64_t m = 0; m < out.count; m++) {
      T* y = out.y + m * out.stride + column;
      alignas(64) T values[LANES];
      narrow(lanes == LANES ? y : values, load<Floats>(products + m * LANES));
      if (lanes < LANES) memcpy(y, values, lanes * sizeof(T));
    }
  }
};

// A packed or dense matrix; `MatrixStructure` of weights.py.
struct Matrix {
  int64_t kind, in_features, out_features;
  const uint8_t* tiles;
  const void* bias;  // in the inputs' dtype; null: none
};

// Passes on the products of a tile, with a bias of type T added.
template <class T> void put_tile(const Matrix& w, int64_t tile, int64_t rows, float* products, const Sink& sink) {
  const int64_t column = tile * LANES, left = w.out_features - column, lanes = left < LANES ? left : LANES;
  if (w.bias) {
    alignas(64) T bias[LANES] = {};
    memcpy(bias, (const T*)w.bias + column, lanes * sizeof(T));
    for (int64_t m = 0; m < rows; m++) store(products + m * LANES, load<Floats>(products + m * LANES) + widen(bias));
  }
  sink.put(sink.to, sink.first_column + column, lanes, products);
}

// Multiplies tiles `i` to `end` of a matrix with rows.
template <class F, class T, class X>
void multiply_tiles(const Matrix& w, const X& x, int64_t i, int64_t end, const Sink& sink) {
  alignas(64) float products[TILES<X> * CHUNK * LANES];
  const int64_t cells = w.in_features / COLUMNS, tile_bytes = F::tile_bytes(cells);
  const Multiplier<F, X> multiply(x);
  while (i < end) {
    const int64_t first = i, count = end - i < TILES<X> ? end - i : TILES<X>;
    multiply({w.tiles + i * tile_bytes, tile_bytes, cells, count}, products);
    for (; i < first + count; i++) put_tile<T>(w, i, x.rows, products + (i - first) * x.rows * LANES, sink);
  }
}

template <class X> using Tiles = void (*)(const Matrix&, const X&, int64_t, int64_t, const Sink&);

struct Kind {
  const char* name;
  int64_t block_size, block_bytes;
  int sum_group;  // number of columns whose sums are needed; 0: none
  int64_t (*tile_bytes)(int64_t cells);
  bool (*pack)(const uint8_t* blocks, int64_t rows, int64_t cells, uint8_t* tile);
  void (*look_up)(const uint8_t* blocks, int64_t columns, float* to);
  Tiles<Inputs<float>> tiles;
  Tiles<Inputs<Factor<uint16_t>>> tiles_bf16;
  Tiles<QuantizedRows> tiles_quantized, tiles_quantized_bf16;

  bool is_dense() const { return !tile_bytes; }
  Tiles<Inputs<float>> tiles_of(float) const { return tiles; }
  Tiles<Inputs<Factor<uint16_t>>> tiles_of(uint16_t) const { return tiles_bf16; }
  Tiles<QuantizedRows> quantized_tiles_of(float) const { return tiles_quantized; }
  Tiles<QuantizedRows> quantized_tiles_of(uint16_t) const { return tiles_quantized_bf16; }
};

template <class F> constexpr Kind kind(const char* name) {
  return {name,
          F::SIZE,
          F::BYTES,
          F::OFFSET ? F::GROUP : 0,
          F::tile_bytes,
          pack<F>,
          look_up_row<F>,
          multiply_tiles<F, float, Inputs<float>>,
          multiply_tiles<F, uint16_t, Inputs<Factor<uint16_t>>>,
          multiply_tiles<F, float, QuantizedRows>,
          multiply_tiles<F, uint16_t, QuantizedRows>};
}

}  // namespace
