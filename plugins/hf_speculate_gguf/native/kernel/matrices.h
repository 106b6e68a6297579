// Matrices of any type, and the memory of a call.
#pragma once

#include <pthread.h>

#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "dense.h"
#include "packed.h"
#include "threads.h"

// Write the address of an array of packed kinds, and return its length. Their files compile at the same time as this one.
extern "C" int64_t hfs_blocks(const void** kinds), hfs_super_blocks(const void** kinds);

namespace {

// Multiplies tiles `i` to `end` of a dense matrix of type T with rows.
template <class T, class X> void multiply_dense_tiles(const Matrix& w, const X& x, int64_t i, int64_t end, const Sink& sink) {
  alignas(64) float products[CHUNK * LANES];
  for (; i < end; i++) {
    const int64_t left = w.out_features - i * LANES, count = left < LANES ? left : LANES;
    multiply_dense_rows((const T*)w.tiles + i * LANES * w.in_features, w.in_features, count, x, products);
    put_tile<T>(w, i, x.rows, products, sink);
  }
}

const struct AllKinds {
  AllKinds() {
    for (auto part : {hfs_blocks, hfs_super_blocks}) {
      const void* first;
      const int64_t end = count + part(&first);
      for (auto* kind = (const Kind*)first; count < end && count < MOST;) kinds[count++] = *kind++;
    }
  }

  const Kind& operator[](int64_t number) const { return kinds[number]; }
  int size() const { return count; }

 private:
  static constexpr int MOST = 16;
  // dense matrices, in the type of the inputs
  Kind kinds[MOST] = {{"F32", 1, 4, 0, nullptr, nullptr, nullptr, multiply_dense_tiles<float, Inputs<float>>},
                      {"BF16", 1, 2, 0, nullptr, nullptr, nullptr, nullptr, multiply_dense_tiles<uint16_t, Inputs<Factor<uint16_t>>>}};
  int count = 2;
} KINDS;

// Looks up rows of embeddings, stored as in the file. Returns false if an id is out of range; the output is then
// invalid. `row` holds a packed row in float32, which is needed if T is another type.
template <class T> bool look_up(const Matrix& w, const int64_t* ids, int64_t count, float* row, T* to) {
  const Kind& kind = KINDS[w.kind];
  const int64_t size = w.in_features;
  const int64_t row_bytes = kind.is_dense() ? size * sizeof(T) : size / kind.block_size * kind.block_bytes;
  for (int64_t i = 0; i < count; i++, to += size) {
    if (ids[i] < 0 || ids[i] >= w.out_features) return false;
    const uint8_t* from = w.tiles + ids[i] * row_bytes;
    if (kind.is_dense()) {
      memcpy(to, from, row_bytes);
    } else if constexpr (std::is_same<T, float>::value) {
      kind.look_up(from, size, to);
    } else {
      kind.look_up(from, size, row);
      for (int64_t n = 0; n < size; n += LANES) narrow(to + n, load<Floats>(row + n));
    }
  }
  return true;
}

// Frees a thread's memory when the thread ends. (A destructor would need the C++ library at run time.)
const pthread_key_t freed_at_exit = [] {
  pthread_key_t key;
  return pthread_key_create(&key, free), key;
}();

// Memory of the calling thread, kept between calls.
class Scratch {
 public:
  bool reserve(int64_t bytes) {
    used = 0;
    if (bytes <= size) return true;
    free(block);
    size = bytes * 5 / 4 / 64 * 64 + 64;
    block = (uint8_t*)malloc(size + 64);  // Windows has no aligned_alloc
    pthread_setspecific(freed_at_exit, block);
    memory = block + (-(uintptr_t)block & 63);
    if (!block) size = 0;
    return block;
  }

  template <class T> T* take(int64_t count) {
    T* taken = (T*)(memory + used);
    used += rounded(count * sizeof(T));
    return taken;
  }

  static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  uint8_t *block = nullptr, *memory = nullptr;
  int64_t size = 0, used = 0;
};

inline thread_local Scratch scratch;

// Rows of an input in the form for matrices: unchanged or in float32, with the sums that these need, or quantised
// to bytes. Dense matrices take rows as they are even if packed ones take quantised rows.
template <class T> class Arranged {
  static constexpr bool WIDENS = sizeof(Factor<T>) > sizeof(T);

 public:
  static int64_t bytes(int64_t rows, int64_t columns, bool quantize) {
    const int64_t cells = columns / COLUMNS;
    const int64_t own = Scratch::rounded(rows * columns * sizeof(T)) + WIDENS * Scratch::rounded(sizeof(float) * rows * columns);
    if (quantize) return own + sizeof(QuantizedCell) * cells * rows;
    return own + Scratch::rounded(3 * sizeof(float) * cells * rows);
  }

  // Takes memory of the calling thread.
  static Arranged take(int64_t rows, int64_t columns, bool quantize) {
    const int64_t cells = columns / COLUMNS;
    Arranged taken;
    taken.quantize = quantize;
    taken.values = {scratch.take<T>(rows * columns), nullptr, rows};
    if (WIDENS) taken.factors = scratch.take<Factor<T>>(rows * columns);
    else taken.factors = (Factor<T>*)taken.values.values;
    if (quantize) {
      taken.quantized = {scratch.take<QuantizedCell>(cells * rows), rows};
      return taken;
    }
    taken.sums[0] = scratch.take<float>(3 * cells * rows), taken.sums[1] = taken.sums[0] + 2 * cells * rows;
    return taken;
  }

  T* at(int64_t cell, int64_t row) const { return values.at(cell, row); }
  int64_t rows() const { return values.rows; }
  void set_rows(int64_t rows) { values.rows = quantized.rows = rows; }
  const Inputs<T>& places() const { return values; }

  // Completes some cells of a row that were written. A row that only fills becomes 0.
  void finish(int64_t cell, int64_t end, int64_t m, bool only_fills, const Matrix* matrices, int most) const {
    bool needs[2] = {}, are_dense = false;
    for (int i = 0; i < most && matrices[i].tiles; i++) {
      const Kind& kind = KINDS[matrices[i].kind];
      are_dense |= kind.is_dense();
      if (kind.sum_group) needs[kind.sum_group == COLUMNS] = true;
    }
    for (; cell < end; cell++) {
      if (only_fills) memset(at(cell, m), 0, COLUMNS * sizeof(T));
      if (quantize) {
        if (only_fills) quantized.at(cell, m) = {};
        else quantize_cell(at(cell, m), quantized.at(cell, m));
      }
      if (WIDENS && (are_dense || !quantize))
        for (int i = 0; i < COLUMNS; i += LANES) narrow(of(0).at(cell, m) + i, widen(at(cell, m) + i));
      if (needs[0] && !quantize) sum_groups<16>(of(0), cell, m);
      if (needs[1] && !quantize) sum_groups<32>(of(1), cell, m);
    }
  }

  void multiply(const Matrix& matrix, int64_t begin, int64_t end, const Sink& sink) const {
    const Kind& kind = KINDS[matrix.kind];
    if (quantize && !kind.is_dense()) kind.quantized_tiles_of(T())(matrix, quantized, begin, end, sink);
    else kind.tiles_of(T())(matrix, of(kind.sum_group == COLUMNS), begin, end, sink);
  }

 private:
  Inputs<Factor<T>> of(int sums_of) const { return {factors, sums[sums_of], values.rows}; }

  Inputs<T> values;
  Factor<T>* factors = nullptr;
  float* sums[2] = {};  // over 16 columns, and over 32
  QuantizedRows quantized = {};
  bool quantize = false;
};

// Multiplies rows with a matrix, in a thread pool. row(i) is the address of row i; `output.count` rows are real. `in`
// has memory for all of them.
template <class T, class Row> void multiply(ThreadPool& pool, const Matrix& w, Arranged<T> in, const Row& row, Output<T> output) {
  pool.each(w.in_features / COLUMNS, [&](int64_t cell) {
    for (int64_t i = 0; i < in.rows(); i++) {
      if (i < output.count) memcpy(in.at(cell, i), row(i) + cell * COLUMNS, COLUMNS * sizeof(T));
      in.finish(cell, cell + 1, i, i >= output.count, &w, 1);
    }
  });
  pool.share((w.out_features + LANES - 1) / LANES,
             [&](int64_t i, int64_t end) { in.multiply(w, i, end, {&output, Output<T>::put}); }, TILES<QuantizedRows>);
}

// The same for any number of contiguous rows. `quantize`: see `Arranged`. Returns false if out of memory.
template <class T> bool multiply(const Matrix& w, const T* x, int64_t count, T* y, bool quantize, int threads) {
  if (!count) return true;
  const int64_t most = count < CHUNK ? (count + LANES - 1) / LANES * LANES : CHUNK;
  if (!scratch.reserve(Arranged<T>::bytes(most, w.in_features, quantize))) return false;
  Arranged<T> in = Arranged<T>::take(most, w.in_features, quantize);
  for (int64_t m = 0; m < count; m += CHUNK) {
    const int64_t now = count - m < CHUNK ? count - m : CHUNK;
    in.set_rows(filled_rows<T>(now, quantize));
    ThreadPool::run(threads, [&](ThreadPool& pool, int) {
      multiply(pool, w, in, [&](int64_t i) { return x + (m + i) * w.in_features; },
               Output<T>{y + m * w.out_features, now, w.out_features});
    });
  }
  return true;
}

// ---- RMSNorm of rows, written in the form for matrices ----

template <class From> float rms_factor(const From* from, int64_t size, float eps) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += LANES) squares += widen(from + i) * widen(from + i);
  return 1 / sqrtf(sum_of(squares) / size + eps);
}

// Writes a normed row from a column on; without weights it is not normed. `shift` is added to the weights.
template <class T, class From>
void normalize(const From* from, const void* weights, float shift, int64_t size, float eps, const Arranged<T>& to,
               int64_t column, int64_t m, float* also_to = nullptr) {
  const float factor = weights ? rms_factor(from, size, eps) : 1;
  for (int64_t i = 0; i < size; i += LANES) {
    Floats value = widen(from + i) * factor;
    if (weights) value *= widen((const T*)weights + i) + shift;
    if (also_to) store(also_to + i, value);
    const int64_t at = column + i;
    narrow(to.at(at / COLUMNS, m) + at % COLUMNS, value);
  }
}

}  // namespace
