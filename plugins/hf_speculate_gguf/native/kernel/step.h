// A forward of a causal LM in one call: from token ids to logits.
//
// The plain reference is transformers' modules, called one after the other.
#pragma once

#include "layer.h"

namespace {

// `_StepStructure` of step.py.
struct Step {
  Call layers;  // x: memory for embeddings; cosines and sines are computed here
  Matrix embeddings;  // blocks as in the file, or dense
  double embedding_scale;  // factor of all embeddings, a number of their type
  const int64_t *tokens, *positions;  // [batch row, query]
  const void *cos[2], *sin[2];  // [position, head_dim], for each type of layer; null if no layer is of that type
  int64_t num_positions;
  const void* norm;
  double eps, norm_shift;
  void* normed;  // [batch row, query, hidden]
  Matrix output;
  int64_t num_scored;  // number of each batch row's last queries whose logits are wanted
  void* logits;  // [batch row, scored query, vocabulary]
};

template <class T> class StepRun {
 public:
  explicit StepRun(Step& step)
      : s(step), layers(s.layers), layer(*s.layers.layers[0]), count(s.layers.batch_size * s.layers.num_queries),
        scored(s.layers.batch_size * s.num_scored), hidden(layer.hidden) {}

  // Returns 1: done; 0: a token or a position is out of range, and nothing was written; -1: out of memory.
  int work() {
    const int64_t num_angles = count * layer.head_dim;
    if (!scratch.reserve(layers.bytes() + 4 * Scratch::rounded(num_angles * sizeof(T)) + Scratch::rounded(hidden * sizeof(float))))
      return -1;
    layers.take();
    for (int type = 0; type < 2; type++) {
      T *cos = scratch.take<T>(num_angles), *sin = scratch.take<T>(num_angles);
      if (s.cos[type] && !turn_to(type, cos, sin)) return 0;
      s.layers.cos[type] = cos, s.layers.sin[type] = sin;
    }
    if (!look_up(s.embeddings, s.tokens, count, scratch.take<float>(hidden), (T*)s.layers.x)) return 0;
    if (s.embedding_scale != 1) scale_embeddings();
    s.layers.rotary_stride = s.layers.num_queries * layer.head_dim;
    ThreadPool::run(s.layers.threads, [&](ThreadPool& pool, int thread) {
      layers.work(pool, thread);
      pool.each(count, [&](int64_t m) { norm_row(m); });
      if (scored) score(pool);
    });
    return 1;
  }

 private:
  void scale_embeddings() const {
    T* x = (T*)s.layers.x;
    const float factor = s.embedding_scale;
    for (int64_t i = 0; i < count * hidden; i += LANES) narrow(x + i, widen(x + i) * factor);
  }

  bool turn_to(int type, T* cos, T* sin) const {
    const int64_t size = layer.head_dim;
    for (int64_t m = 0; m < count; m++) {
      const int64_t position = s.positions[m];
      if (position < 0 || position >= s.num_positions) return false;
      memcpy(cos + m * size, (const T*)s.cos[type] + position * size, size * sizeof(T));
      memcpy(sin + m * size, (const T*)s.sin[type] + position * size, size * sizeof(T));
    }
    return true;
  }

  void norm_row(int64_t m) const {
    const T *from = (const T*)s.layers.y + ((s.layers.num_layers - 1) * count + m) * hidden, *weights = (const T*)s.norm;
    T* to = normed(m);
    const float factor = rms_factor(from, hidden, s.eps), shift = s.norm_shift;
    for (int64_t i = 0; i < hidden; i += LANES) narrow(to + i, widen(from + i) * factor * (widen(weights + i) + shift));
  }

  void score(ThreadPool& pool) const {
    Arranged<T> in = layers.inputs();
    in.set_rows(filled_rows<T>(scored, s.layers.quantize));
    const int64_t queries = s.layers.num_queries, first = queries - s.num_scored;
    multiply(pool, s.output, in, [&](int64_t i) { return normed(i / s.num_scored * queries + first + i % s.num_scored); },
             Output<T>{(T*)s.logits, scored, s.output.out_features});
  }

  T* normed(int64_t m) const { return (T*)s.normed + m * hidden; }

  Step& s;
  Layers<T> layers;
  const Layer& layer;
  const int64_t count, scored, hidden;
};

}  // namespace
