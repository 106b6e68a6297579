// Packed matrices of any type, and the memory that a call works in.
#pragma once

#include <cstdlib>

#include "products.h"

namespace {

// Where products go: [row, lane] of the columns from `column` on.
struct Sink {
  void* to;
  void (*put)(void* to, int64_t column, int64_t lanes, const float* products);
  int64_t first_column = 0;  // of the matrix, among others of the same input
};

// A packed matrix; `_Matrix` of native_layers.py.
struct Matrix {
  int64_t kind, in_features, out_features;
  const uint8_t* tiles;
  const void* bias;  // in the type of the inputs, or null
};

template <class F, class T>
void multiply_tiles(const Matrix& w, Inputs<T> x, bool amx, int64_t i, int64_t end, const Sink& sink) {
  alignas(64) float products[CHUNK * LANES];
  const int64_t cells = w.in_features / COLUMNS, tile_bytes = F::tile_bytes(cells);
  const Multiplier<F, T> multiply(x, amx);
  for (; i < end; i++) {
    const int64_t column = i * LANES, left = w.out_features - column, lanes = left < LANES ? left : LANES;
    multiply(w.tiles + i * tile_bytes, cells, products);
    if (w.bias) {
      alignas(64) T bias[LANES] = {};
      memcpy(bias, (const T*)w.bias + column, lanes * sizeof(T));
      for (int64_t m = 0; m < x.rows; m++)
        store(products + m * LANES, load<Floats>(products + m * LANES) + widen(bias));
    }
    sink.put(sink.to, sink.first_column + column, lanes, products);
  }
}

template <class T> using Tiles = void (*)(const Matrix&, Inputs<T>, bool, int64_t, int64_t, const Sink&);

struct Kind {
  const char* name;
  int64_t block_size, block_bytes;
  int sum_group;  // columns whose sum is needed; 0: none
  int64_t (*tile_bytes)(int64_t cells);
  bool (*pack)(const uint8_t* blocks, int64_t rows, int64_t cells, uint8_t* tile);
  Tiles<float> tiles;
  Tiles<uint16_t> tiles_bf16;

  Tiles<float> tiles_of(float) const { return tiles; }
  Tiles<uint16_t> tiles_of(uint16_t) const { return tiles_bf16; }
};

template <class F> constexpr Kind kind(const char* name) {
  return {name, F::SIZE, F::BYTES, F::OFFSET ? F::GROUP : 0, F::tile_bytes, pack<F>, multiply_tiles<F, float>,
#if HAS_BF16
          multiply_tiles<F, uint16_t>
#else
          nullptr
#endif
  };
}

const Kind KINDS[] = {kind<Q4_0>("Q4_0"), kind<Q4_1>("Q4_1"), kind<Q5_0>("Q5_0"), kind<Q5_1>("Q5_1"),
                      kind<Q8_0>("Q8_0"), kind<Q2_K>("Q2_K"), kind<Q3_K>("Q3_K"), kind<Q4_K>("Q4_K"),
                      kind<Q5_K>("Q5_K"), kind<Q6_K>("Q6_K")};

// Memory of the calling thread that is kept from call to call.
class Scratch {
 public:
  ~Scratch() { free(memory); }

  bool reserve(int64_t bytes) {
    used = 0;
    if (bytes <= size) return true;
    free(memory);
    size = bytes * 5 / 4 / 64 * 64 + 64;
    memory = (uint8_t*)aligned_alloc(64, size);
    if (!memory) size = 0;
    return memory;
  }

  template <class T> T* take(int64_t count) {
    T* taken = (T*)(memory + used);
    used += rounded(count * sizeof(T));
    return taken;
  }

  static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  uint8_t* memory = nullptr;
  int64_t size = 0, used = 0;
};

inline thread_local Scratch scratch;

}  // namespace
