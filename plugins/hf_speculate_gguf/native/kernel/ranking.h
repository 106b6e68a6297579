// The ranking of tokens by a head's states: final norm, output matrix, noise of a sampled request, and the highest
// log-probabilities. Logits are not written out.
#pragma once

#include "choice.h"
#include "matrices.h"
#include "threads.h"

namespace {

INLINE bool any(const Ints& lanes) {
  int64_t pairs[LANES / 2], all = 0;
  store(pairs, lanes);
  for (int64_t pair : pairs) all |= pair;
  return all;
}

// `RankingStructure` of ranking.py.
struct Ranking {
  const void* x;  // [batch row, node, hidden]
  void* normed;   // in the shape of x; null: not wanted
  int64_t batch_size, num_nodes;
  const void* norm;  // null: no norm
  double eps;
  Matrix output;
  // Warpers of a sampled request: temperature divides the scores; the others limit the columns that are kept.
  double temperature, top_p, min_p;  // 1, 1 and 0 do nothing
  int64_t top_k;                     // 0 does nothing
  const float* log_noise;            // [batch row, column], subtracted from the scores; null: none
  int64_t num_columns, most;  // number of columns to rank, and of best ones to return
  float* log_probs;           // [batch row, node, most]: log-softmax of the best; -inf where no more are kept
  int64_t* columns;
  int64_t is_bf16, quantize, threads;
};

constexpr float LOWEST = -__builtin_inff();

inline float highest_of(const Floats& v) {
  float highest = v[0];
  for (int lane = 1; lane < LANES; lane++) highest = v[lane] > highest ? v[lane] : highest;
  return highest;
}

// The highest bound that leaves masses with a sum (or columns with a number) of at least `enough`. The bits of floats
// from 0 to 1 ascend with the values.
template <bool OF_MASSES> float highest_bound(const float* masses, int64_t width, float enough) {
  uint32_t low = 0, high = reinterpret<uint32_t>(1.0f) + 1;  // low leaves everything, high nothing
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const float bound = reinterpret<float>(middle);
    Floats left = {};
    for (int64_t i = 0; i < width; i += LANES) {
      const Floats mass = load<Floats>(masses + i), counted = OF_MASSES ? mass : Floats{} + 1.0f;
      left += reinterpret<Floats>(reinterpret<Ints>(counted) & (mass >= bound));
    }
    (sum_of(left) >= enough ? low : high) = middle;
  }
  return reinterpret<float>(low);
}

// Sets the scores that a request never samples to the lowest value, as transformers' warpers do one after the other.
inline void keep_likely(const Ranking& call, float* scores, int64_t width, float highest, float* masses) {
  Floats total = {};
  for (int64_t i = 0; i < width; i += LANES) store(masses + i, exponential(load<Floats>(scores + i) - highest));
  float bound = call.min_p;
  if (call.top_k) bound = std::fmax(bound, highest_bound<false>(masses, width, call.top_k));
  if (call.top_p < 1) {
    const float before = call.top_k ? bound : 0;
    for (int64_t i = 0; i < width; i += LANES) {
      const Floats mass = load<Floats>(masses + i), kept = choose(mass < before, Floats{}, mass);
      store(masses + i, kept);
      total += kept;
    }
    bound = std::fmax(bound, highest_bound<true>(masses, width, call.top_p * sum_of(total)));
  }
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats score = load<Floats>(scores + i), lowest = Floats{} + LOWEST;
    store(scores + i, choose(load<Floats>(masses + i) < bound, lowest, score));
  }
}

// Turns the products of a row into scores and finds the best. Returns false if some are not finite. `scores` and
// `masses` hold `width` values, whole vectors.
inline bool rank_row(const Ranking& call, int64_t row, int64_t width, float* scores, float* masses) {
  const int64_t count = call.num_columns;
  const float factor = 1 / call.temperature;
  for (int64_t i = count; i < width; i++) scores[i] = LOWEST;
  Floats most = Floats{} + LOWEST;
  Ints odd = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats value = load<Floats>(scores + i) * factor;
    odd |= value != value;
    most = choose(value > most, value, most);
    store(scores + i, value);
  }
  float highest = highest_of(most);
  if (any(odd) || !std::isfinite(highest)) return false;
  if (call.top_k || call.top_p < 1 || call.min_p > 0) keep_likely(call, scores, width, highest, masses);
  if (call.log_noise) {
    const float* noise = call.log_noise + row / call.num_nodes * count;
    most = Floats{} + LOWEST;
    for (int64_t i = 0; i < width; i += LANES) {
      Floats own = {};
      memcpy(&own, noise + i, (count - i < LANES ? count - i : LANES) * sizeof(float));
      const Floats value = load<Floats>(scores + i) - own;
      most = choose(value > most, value, most);
      store(scores + i, value);
    }
    highest = highest_of(most);
    if (!std::isfinite(highest)) return false;
  }
  Best best{call.log_probs + row * call.most, call.columns + row * call.most, call.most};
  Floats sum = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats value = load<Floats>(scores + i);
    sum += exponential(value - highest);
    if (best.count == best.most && !any(value > best.values[best.most - 1])) continue;
    for (int64_t lane = i; lane < i + LANES; lane++)
      if (scores[lane] > LOWEST) best.offer(scores[lane], lane);
  }
  const float log_sum = logf(sum_of(sum));  // the sum is at least 1, so no log-probability is above 0
  for (int64_t i = 0; i < best.count; i++) best.values[i] = best.values[i] - highest - log_sum;
  for (int64_t i = 0; best.count < best.most && i < count; i++)
    if (scores[i] == LOWEST) best.offer(LOWEST, i);
  return best.count == best.most;
}

// Returns 1: done; 0: scores are not finite, or too few; -1: out of memory.
template <class T> int rank(const Ranking& call) {
  const Matrix& w = call.output;
  const int64_t count = call.batch_size * call.num_nodes, rows = filled_rows<T>(count, call.quantize);
  const int64_t tiles = (call.num_columns + LANES - 1) / LANES, width = tiles * LANES;
  if (!scratch.reserve(Arranged<T>::bytes(rows, w.in_features, call.quantize) +
                       Scratch::rounded(sizeof(float) * count * width) +
                       Scratch::rounded(sizeof(float) * call.threads * width)))
    return -1;
  const Arranged<T> in = Arranged<T>::take(rows, w.in_features, call.quantize);
  Output<float> scores{scratch.take<float>(count * width), count, width};
  float* masses = scratch.take<float>(call.threads * width);
  std::atomic<bool> is_done{true};
  ThreadPool::run(call.threads, [&](ThreadPool& pool, int thread) {
    pool.each(rows, [&](int64_t m) {
      if (m < count) {
        normalize((const T*)call.x + m * w.in_features, call.norm, 0, w.in_features, call.eps, in, 0, m);
        for (int64_t i = 0; call.normed && i < w.in_features; i += COLUMNS)
          memcpy((T*)call.normed + m * w.in_features + i, in.at(i / COLUMNS, m), COLUMNS * sizeof(T));
      }
      in.finish(0, w.in_features / COLUMNS, m, m >= count, &w, 1);
    });
    pool.share(tiles, [&](int64_t i, int64_t end) { in.multiply(w, i, end, {&scores, Output<float>::put}); }, TILES<QuantizedRows>);
    pool.each(count, [&](int64_t m) {
      if (!rank_row(call, m, width, scores.y + m * width, masses + thread * width)) is_done = false;
    });
  });
  return is_done;
}

}  // namespace
