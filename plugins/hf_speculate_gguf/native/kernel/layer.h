// Decoder layers of Llama, Qwen2, Qwen3 and Gemma 3, one or several in one call.
#pragma once

#include <initializer_list>

#include "attention.h"
#include "matrices.h"
#include "threads.h"

namespace {

// The parts of a layer that do not change between calls; `_LayerStructure` of layers.py. Matrices with the same input
// are stored together; their outputs lie side by side.
struct Layer {
  int64_t hidden, heads, kv_heads, head_dim, inner;
  int64_t q_at, k_at, v_at, gate_at, up_at;  // first columns of the outputs
  double eps, scale;
  // all but `mlp_norm` may be null; `q_norm` and `k_norm` apply to each head, the last two to what a part adds
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;
  const void *second_norm, *attention_post_norm, *mlp_post_norm;
  double norm_shift;  // added to the weights of norms
  int64_t gelu;       // the activation is GELU's approximation by tanh, else SiLU
  int64_t type;       // 0 or 1: which angles and visible ranges of the call hold for the layer
  // Options of EAGLE-3's layers. joins: a second input comes before the states, normed or not. norms_residual: the
  // residual is normed.
  int64_t joins, norms_residual;
  Matrix qkv[3], output[1], gate_up[2], down[1];  // a matrix without tiles does not exist
};

// `CallStructure` of layers.py.
struct Call {
  const void *x, *second;  // [batch row, query, hidden]; `second` is an input that layers with `joins` put before the states
  void* y;  // outputs of each layer, in the shape of x
  int64_t num_layers;
  const Layer* const* layers;  // all of the same sizes
  int64_t batch_size, num_queries, num_keys;  // the queries' own keys are the last entries
  const void *cos[2], *sin[2];  // [batch row or 1, query, head_dim], for each type of layer
  int64_t rotary_stride;  // distance between batch rows
  // Each layer's cache, [batch row, KV head, entry, head_dim]. Entries count from the beginning of the text, so these
  // addresses may lie before memory whose first entries were dropped.
  void *const *keys, *const *values;
  const int64_t *batch_strides, *head_strides;
  const int32_t *offsets[2], *ranges[2];  // for each type of layer
  int64_t windows[2];  // see `Attention`
  int64_t is_bf16, quantize;  // quantize: whether activations, the inputs of packed products, are quantised to bytes
  int64_t threads;
};

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory that the threads of a call share, layer after layer.
template <class T> struct Memory {
  Arranged<T> in, activated;  // `activated` is the input of the last matrix, written while `in` is read
  float *products, *residual;
  T* queries;
};

// One layer of a call, in one of its threads.
template <class T> class LayerRun {
 public:
  LayerRun(const Call& call, int64_t number, const Memory<T>& memory, int64_t rows)
      : layer(*call.layers[number]), call(call), count(call.batch_size * call.num_queries), rows(rows),
        q_size(layer.heads * layer.head_dim), kv_size(layer.kv_heads * layer.head_dim), in(memory.in),
        activated(memory.activated), products(memory.products), residual(memory.residual), queries(memory.queries),
        keys((T*)call.keys[number]), values((T*)call.values[number]), batch_stride(call.batch_strides[number]), head_stride(call.head_strides[number]),
        y((T*)call.y + number * count * layer.hidden),
        x(number ? y - count * layer.hidden : (const T*)call.x) {}

  Attention<T> attention() const {
    return {queries, keys, values, batch_stride, head_stride, call.batch_size, call.num_queries, call.num_keys,
            layer.heads, layer.kv_heads, layer.head_dim, (float)layer.scale, call.offsets[layer.type],
            call.ranges[layer.type], call.windows[layer.type], call.threads, in.places()};
  }

  void work(ThreadPool& pool, float* own) {
    pool.each(rows, [&](int64_t m) { begin(m); });
    pool.each(layer.heads + 2 * layer.kv_heads, [&](int64_t slot) {
      multiply(layer.qkv, 3, columns_of(slot), layer.head_dim, sink<&LayerRun::put_qkv>());
      for (int64_t m = 0; m < count; m++) place(m, slot);
    });
    const Attention<T> a = attention();
    pool.each(a.items(), [&](int64_t i) { attend(a, i, own); });
    pool.each(rows, [&](int64_t m) { finish(q_size, layer.output, 1, m); });
    pool.share(layer.hidden / LANES, [&](int64_t i, int64_t end) {
      in.multiply(layer.output[0], i, end, sink<&LayerRun::add_attention>());
    }, TILES<QuantizedRows>);
    pool.each(rows, [&](int64_t m) {
      if (layer.attention_post_norm && m < count)
        add_normed(layer.attention_post_norm, m, x + m * layer.hidden, residual + m * layer.hidden);
      norm(residual + m * layer.hidden, layer.mlp_norm, 0, m);
      finish(layer.hidden, layer.gate_up, 2, m);
    });
    pool.share(layer.inner / COLUMNS, [&](int64_t cell, int64_t end) {
      for (int64_t at : {layer.gate_at, layer.up_at})
        multiply(layer.gate_up, 2, at + cell * COLUMNS, (end - cell) * COLUMNS, sink<&LayerRun::put_gate_up>());
      for (int64_t m = 0; m < rows; m++) activate(m, cell, end);
    });
    pool.share(layer.hidden / LANES, [&](int64_t i, int64_t end) {
      activated.multiply(layer.down[0], i, end, sink<&LayerRun::add_mlp>());
    }, TILES<QuantizedRows>);
    if (layer.mlp_post_norm)
      pool.each(count, [&](int64_t m) {
        add_normed(layer.mlp_post_norm, m, residual + m * layer.hidden, y + m * layer.hidden);
      });
  }

 private:
  template <void (LayerRun::*PUT)(int64_t column, const float* found)> Sink sink() {
    return {this, [](void* to, int64_t column, int64_t, const float* found) { (((LayerRun*)to)->*PUT)(column, found); }};
  }

  // Computes columns of a stage's outputs, whole tiles, as if its matrices were one.
  void multiply(const Matrix* matrices, int most, int64_t column, int64_t columns, Sink sink) {
    const int64_t begin = column / LANES, end = begin + columns / LANES;
    int64_t first = 0;
    for (int i = 0; i < most && matrices[i].tiles; i++) {
      const Matrix& matrix = matrices[i];
      const int64_t own = matrix.out_features / LANES;
      const int64_t from = begin > first ? begin - first : 0, to = end - first < own ? end - first : own;
      if (from < to) in.multiply(matrix, from, to, {sink.to, sink.put, first * LANES});
      first += own;
    }
  }

  template <class From> void norm(const From* from, const void* weights, int64_t column, int64_t m, float* also_to = nullptr) {
    if (m < count) normalize(from, weights, layer.norm_shift, layer.hidden, layer.eps, in, column, m, also_to);
  }

  // Adds what a part of the layer found for a row, normed. It is in `products`.
  template <class From, class To> void add_normed(const void* weights, int64_t m, const From* before, To* to) {
    const float* found = products + m * layer.hidden;
    const float factor = rms_factor(found, layer.hidden, layer.eps), shift = layer.norm_shift;
    for (int64_t i = 0; i < layer.hidden; i += LANES)
      narrow(to + i, widen(before + i) + load<Floats>(found + i) * factor * (widen((const T*)weights + i) + shift));
  }

  // Makes the input of queries, keys and values.
  void begin(int64_t m) {
    const int64_t own = layer.joins * layer.hidden;
    if (layer.joins) norm((const T*)call.second + m * layer.hidden, layer.second_norm, 0, m);
    norm(x + m * layer.hidden, layer.attention_norm, own, m,
         layer.norms_residual ? residual + m * layer.hidden : nullptr);
    finish(own + layer.hidden, layer.qkv, 3, m);
  }

  // Writes act(gate) * up of some cells, arranged for products. GELU's tanh of z is a sigmoid of 2 z.
  void activate(int64_t m, int64_t cell, int64_t end) {
    const float *gate = products + m * 2 * layer.inner + layer.gate_at, *up = gate - layer.gate_at + layer.up_at;
    for (int64_t i = cell * COLUMNS; m < count && i < end * COLUMNS; i += LANES) {
      const Floats g = load<Floats>(gate + i);
      const Floats z = layer.gelu ? (g * g * g * 0.044715f + g) * 1.5957691216f : g;
      narrow(activated.at(i / COLUMNS, m) + i % COLUMNS, g / (exponential(-z) + 1.0f) * load<Floats>(up + i));
    }
    activated.finish(cell, end, m, m >= count, layer.down, 1);
  }

  void finish(int64_t columns, const Matrix* matrices, int most, int64_t m) {
    in.finish(0, columns / COLUMNS, m, m >= count, matrices, most);
  }

  // Slots are the heads of queries, then of keys, then of values.
  bool is_query(int64_t slot) const { return slot < layer.heads; }
  bool is_key(int64_t slot) const { return !is_query(slot) && slot < layer.heads + layer.kv_heads; }
  int64_t head_of(int64_t slot) const { return is_query(slot) ? slot : (slot - layer.heads) % layer.kv_heads; }
  int64_t columns_of(int64_t slot) const {
    return (is_query(slot) ? layer.q_at : is_key(slot) ? layer.k_at : layer.v_at) + head_of(slot) * layer.head_dim;
  }

  // Writes a head of a row where attention reads it; queries and keys are rotated by their positions.
  void place(int64_t m, int64_t slot) {
    const int64_t b = m / call.num_queries, query = m % call.num_queries, size = layer.head_dim, half = size / 2;
    const int64_t head = head_of(slot);
    const float* x = products + m * (q_size + 2 * kv_size) + columns_of(slot);
    const int64_t entry = call.num_keys - call.num_queries + query;
    const int64_t in_cache = b * batch_stride + head * head_stride + entry * size;
    T* to = is_query(slot) ? queries + m * q_size + head * size : (is_key(slot) ? keys : values) + in_cache;
    alignas(64) float normed[MOST_HEAD_DIM], turned[MOST_HEAD_DIM];
    if (const T* weights = (const T*)(is_query(slot) ? layer.q_norm : is_key(slot) ? layer.k_norm : nullptr)) {
      const float factor = rms_factor(x, size, layer.eps), shift = layer.norm_shift;
      for (int64_t d = 0; d < size; d += LANES) store(normed + d, load<Floats>(x + d) * factor * (widen(weights + d) + shift));
      x = normed;
    }
    if (is_query(slot) || is_key(slot)) {
      const T* cos = (const T*)call.cos[layer.type] + b * call.rotary_stride + query * size;
      const T* sin = (const T*)call.sin[layer.type] + b * call.rotary_stride + query * size;
      for (int64_t d = 0; d < half; d += WIDE) {
        const WideFloats a = load<WideFloats>(x + d), b = load<WideFloats>(x + d + half);
        store(turned + d, subtract_products(a, widen_part(cos + d), b, widen_part(sin + d)));
        store(turned + d + half, b * widen_part(cos + d + half) + a * widen_part(sin + d + half));
      }
      x = turned;
    }
    for (int64_t d = 0; d < size; d += LANES) narrow(to + d, load<Floats>(x + d));
  }

  void put_qkv(int64_t column, const float* found) { put(column, found, q_size + 2 * kv_size); }
  void put_gate_up(int64_t column, const float* found) { put(column, found, 2 * layer.inner); }

  void put(int64_t column, const float* found, int64_t width) {
    for (int64_t m = 0; m < count; m++) memcpy(products + m * width + column, found + m * LANES, LANES * sizeof(float));
  }

  void add_attention(int64_t column, const float* found) {
    if (layer.attention_post_norm) return put(column, found, layer.hidden);
    for (int64_t m = 0; m < count; m++) {
      const Floats before = layer.norms_residual ? load<Floats>(residual + m * layer.hidden + column)
                                                 : widen(x + m * layer.hidden + column);
      store(residual + m * layer.hidden + column, before + load<Floats>(found + m * LANES));
    }
  }

  void add_mlp(int64_t column, const float* found) {
    if (layer.mlp_post_norm) return put(column, found, layer.hidden);
    for (int64_t m = 0; m < count; m++) {
      const Floats before = load<Floats>(residual + m * layer.hidden + column);
      narrow(y + m * layer.hidden + column, before + load<Floats>(found + m * LANES));
    }
  }

  static constexpr int MOST_HEAD_DIM = 512;

  const Layer& layer;
  const Call& call;
  const int64_t count, rows, q_size, kv_size;
  const Arranged<T> in, activated;
  float *const products, *const residual;
  T *const queries, *const keys, *const values;
  const int64_t batch_stride, head_stride;
  T* const y;
  const T* const x;
};

// Attention alone, for modules that compute the rest; `_AttentionStructure` of hybrid.py. See `Attention`.
struct AttentionCall {
  const void *queries, *keys, *values;
  void* y;  // [cell, row, column], see `Inputs`
  const int32_t *offsets, *ranges;
  int64_t batch_stride, head_stride, batch_size, num_queries, num_keys, heads, kv_heads, head_dim, is_bf16, threads;
  double scale;
};

// Returns false if out of memory.
template <class T> bool attend_all(const AttentionCall& c) {
  const Attention<T> a{(const T*)c.queries, (const T*)c.keys, (const T*)c.values, c.batch_stride, c.head_stride,
                       c.batch_size, c.num_queries, c.num_keys, c.heads, c.kv_heads, c.head_dim, (float)c.scale,
                       c.offsets, c.ranges, 0, c.threads, {(T*)c.y, nullptr, c.batch_size * c.num_queries}};
  const int64_t per_thread = Scratch::rounded(sizeof(float) * a.scratch_floats());
  if (!scratch.reserve(per_thread * c.threads)) return false;
  uint8_t* const own = scratch.take<uint8_t>(per_thread * c.threads);
  ThreadPool::run(a.items() > 1 ? c.threads : 1, [&](ThreadPool& pool, int thread) {
    pool.each(a.items(), [&](int64_t i) { attend(a, i, (float*)(own + thread * per_thread)); });
  });
  return true;
}

// All layers of a call, and their memory.
template <class T> class Layers {
 public:
  explicit Layers(const Call& call)
      : call(call), layer(*call.layers[0]),
        rows(filled_rows<T>(call.batch_size * call.num_queries, call.quantize)),
        q_size(layer.heads * layer.head_dim), widest(larger(layer.hidden * (1 + layer.joins), q_size)),
        num_products(rows * larger(larger(q_size + 2 * layer.kv_heads * layer.head_dim, 2 * layer.inner), layer.hidden)),
        per_thread(Scratch::rounded(sizeof(float) * LayerRun<T>(call, 0, {}, rows).attention().scratch_floats())) {}

  int64_t bytes() const {
    return Arranged<T>::bytes(rows, widest, call.quantize) + Arranged<T>::bytes(rows, layer.inner, call.quantize) +
           Scratch::rounded(sizeof(float) * num_products) + Scratch::rounded(sizeof(float) * rows * layer.hidden) +
           Scratch::rounded(rows * q_size * sizeof(T)) + per_thread * call.threads;
  }

  // Takes memory of the calling thread, which must have enough left.
  void take() {
    memory.in = Arranged<T>::take(rows, widest, call.quantize);
    memory.activated = Arranged<T>::take(rows, layer.inner, call.quantize);
    memory.products = scratch.take<float>(num_products);
    memory.residual = scratch.take<float>(rows * layer.hidden);
    memory.queries = scratch.take<T>(rows * q_size);
    own = scratch.take<uint8_t>(per_thread * call.threads);
  }

  void work(ThreadPool& pool, int thread) const {
    for (int64_t i = 0; i < call.num_layers; i++)
      LayerRun<T>(call, i, memory, rows).work(pool, (float*)(own + thread * per_thread));
  }

  // Free before and after a call: rows with at least as many columns as states.
  const Arranged<T>& inputs() const { return memory.in; }

 private:
  const Call& call;
  const Layer& layer;
  const int64_t rows, q_size, widest, num_products, per_thread;
  Memory<T> memory;
  uint8_t* own = nullptr;
};

// Returns false if out of memory.
template <class T> bool run_layers(const Call& call) {
  Layers<T> layers(call);
  if (!scratch.reserve(layers.bytes())) return false;
  layers.take();
  ThreadPool::run(call.threads, [&](ThreadPool& pool, int thread) { layers.work(pool, thread); });
  return true;
}

}  // namespace
