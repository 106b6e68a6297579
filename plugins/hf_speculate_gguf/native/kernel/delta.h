// Gated delta nets (arXiv:2412.06464) between their projections: a convolution of each channel over the last tokens, and
// for each head a state [key column, value column] to which every token writes.
//
// Tokens are computed one after the other, so the bits of a token do not depend on how many there are in a call.
#pragma once

#include <cmath>

#include "matrices.h"
#include "threads.h"

namespace {

// `_DeltaStructure` of hybrid.py. Sizes of heads are multiples of sixteen.
struct Delta {
  const void *mixed, *strengths, *steps;  // [batch row, token, columns]: queries, keys and values; b and a of each value head
  int64_t mixed_stride, head_stride;  // distances between tokens
  int64_t row_tokens;  // tokens of a batch row in memory; the first `num_tokens` of them are computed
  const void *kernel, *log_rates, *time_steps;  // [channel, width]; A_log and dt_bias of each value head
  void* inputs;  // [batch row, channel, width], the last inputs of each channel
  float* states;  // [batch row, value head, key column, value column]
  void* y;  // [batch row, token, value head, value column]; null if only states are wanted
  int64_t batch_size, num_tokens, key_heads, value_heads, key_size, value_size, width, is_bf16, threads;
};

constexpr int64_t DELTA_TOKENS = 64;  // most tokens whose convolutions are in memory
constexpr int WIDEST = 8;

template <class T> INLINE float rounded_to(float x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  uint16_t lanes[LANES];
  narrow(lanes, Floats{} + x);
  return to_float(lanes[0]);
}

template <class T> class DeltaRun {
 public:
  explicit DeltaRun(const Delta& d)
      : d(d), keys(d.key_heads * d.key_size), channels(2 * keys + d.value_heads * d.value_size),
        most(d.num_tokens < DELTA_TOKENS ? d.num_tokens : DELTA_TOKENS) {}

  bool work() {
    const int64_t tokens = d.batch_size * most;
    if (!scratch.reserve(sizeof(float) * (tokens * (channels + 2 * d.value_heads)) + 128)) return false;
    mixed = scratch.take<float>(tokens * channels);
    factors = scratch.take<float>(tokens * 2 * d.value_heads);
    ThreadPool::run(d.threads, [&](ThreadPool& pool, int) {
      for (int64_t first = 0; first < d.num_tokens; first += most) {
        const int64_t count = d.num_tokens - first < most ? d.num_tokens - first : most;
        const int64_t groups = channels / LANES, parts = d.value_size / LANES;
        pool.each(d.batch_size * groups, [&](int64_t i) { convolve(i / groups, i % groups * LANES, first, count); });
        pool.each(d.batch_size * count, [&](int64_t i) { prepare(i / count, first, i % count); });
        pool.each(d.batch_size * d.value_heads * parts, [&](int64_t i) {
          const int64_t head = i / parts % d.value_heads, b = i / parts / d.value_heads;
          update(b, head, i % parts * LANES, first, count);
        });
      }
    });
    return true;
  }

 private:
  float* row(int64_t b, int64_t token) const { return mixed + (b * most + token) * channels; }
  float* factor(int64_t b, int64_t token) const { return factors + (b * most + token) * 2 * d.value_heads; }

  // Sixteen channels: sums over the last inputs, and SiLU.
  void convolve(int64_t b, int64_t channel, int64_t first, int64_t count) const {
    alignas(64) float weights[WIDEST][LANES], window[WIDEST][LANES];
    T* const kept = (T*)d.inputs + (b * channels + channel) * d.width;
    for (int64_t j = 0; j < d.width; j++)
      for (int i = 0; i < LANES; i++) {
        weights[j][i] = to_float(((const T*)d.kernel)[(channel + i) * d.width + j]);
        window[j][i] = to_float(kept[i * d.width + j]);
      }
    for (int64_t t = 0; t < count; t++) {
      for (int64_t j = 1; j < d.width; j++) store(window[j - 1], load<Floats>(window[j]));
      store(window[d.width - 1], widen((const T*)d.mixed + (b * d.row_tokens + first + t) * d.mixed_stride + channel));
      Floats sum = {};
      for (int64_t j = 0; j < d.width; j++) sum += load<Floats>(window[j]) * load<Floats>(weights[j]);
      sum = round(sum);
      store(row(b, t) + channel, round(sum / (exponential(-sum) + 1.0f)));
    }
    for (int64_t j = 0; j < d.width; j++)
      for (int i = 0; i < LANES; i++) {
        T lanes[LANES];
        narrow(lanes, load<Floats>(window[j]));
        kept[i * d.width + j] = lanes[i];
      }
  }

  // Queries and keys of a token of length 1, and for each value head what remains of its state and what is written.
  void prepare(int64_t b, int64_t first, int64_t t) const {
    const float scale = 1 / std::sqrt((float)d.key_size);
    for (int64_t head = 0; head < 2 * d.key_heads; head++) {
      float* x = row(b, t) + head * d.key_size;
      Floats squares = {};
      for (int64_t i = 0; i < d.key_size; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
      const float length = 1 / std::sqrt(sum_of(squares) + 1e-6f) * (head < d.key_heads ? scale : 1);
      for (int64_t i = 0; i < d.key_size; i += LANES) store(x + i, load<Floats>(x + i) * length);
    }
    const int64_t at = (b * d.row_tokens + first + t) * d.head_stride;
    float* to = factor(b, t);
    for (int64_t head = 0; head < d.value_heads; head++) {
      const float step = to_float(((const T*)d.steps)[at + head]) + to_float(((const T*)d.time_steps)[head]);
      const float softplus = step > 20 ? step : std::log1p(std::exp(step));
      to[2 * head] = std::exp(-std::exp(to_float(((const T*)d.log_rates)[head])) * softplus);
      to[2 * head + 1] = rounded_to<T>(1 / (1 + std::exp(-to_float(((const T*)d.strengths)[at + head]))));
    }
  }

  // Sixteen value columns of one head, over all tokens: S = decay * S + key (value - key S) * strength, y = query S.
  void update(int64_t b, int64_t head, int64_t column, int64_t first, int64_t count) const {
    float* const state = d.states + (b * d.value_heads + head) * d.key_size * d.value_size + column;
    const int64_t shared = head / (d.value_heads / d.key_heads) * d.key_size, values = 2 * keys + head * d.value_size + column;
    for (int64_t t = 0; t < count; t++) {
      const float *query = row(b, t) + shared, *key = query + keys, *factors = factor(b, t) + 2 * head;
      Floats found[4] = {}, out[4] = {};
      for (int64_t k = 0; k < d.key_size; k += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Floats kept = load<Floats>(state + (k + i) * d.value_size) * factors[0];
          store(state + (k + i) * d.value_size, kept);
          found[i] += kept * key[k + i];
        }
      const Floats known = (found[0] + found[1]) + (found[2] + found[3]);
      const Floats written = (load<Floats>(row(b, t) + values) - known) * factors[1];
      for (int64_t k = 0; k < d.key_size; k += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Floats now = load<Floats>(state + (k + i) * d.value_size) + written * key[k + i];
          store(state + (k + i) * d.value_size, now);
          out[i] += now * query[k + i];
        }
      if (!d.y) continue;
      T* to = (T*)d.y + ((b * d.num_tokens + first + t) * d.value_heads + head) * d.value_size + column;
      narrow(to, (out[0] + out[1]) + (out[2] + out[3]));
    }
  }

  static Floats round(const Floats& x) {
    T lanes[LANES];
    narrow(lanes, x);
    return widen(lanes);
  }

  const Delta& d;
  const int64_t keys, channels, most;
  float *mixed = nullptr, *factors = nullptr;
};

}  // namespace
