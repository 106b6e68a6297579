// Attention of a few queries, in a tree or a chain, over the entries of a cache.
//
// Each query's sums run over the keys that it sees, in text order, as if there were no others. They do not depend on
// where its ancestors lie in the cache, on other entries, or on the number of queries. So a node of a draft tree gets
// the same bits as in a chain.
#pragma once

#include "dense.h"

namespace {

constexpr int ATTENTION_ROWS = 32;  // most rows of a block: queries times heads that share keys
constexpr int MOST_GROUPS = 128;

template <class T> struct Attention {
  const T* queries;  // [row, head, column], rotated
  const T *keys, *values;  // the cache, [batch row, KV head, entry, column]
  int64_t batch_stride, head_stride, batch_size, num_queries, num_keys, heads, kv_heads, head_dim;
  float scale;
  // Offset of each query's runs [first entry, end); null: a query sees the last `window` entries up to its own, or all
  // of them if `window` is 0.
  const int32_t *offsets, *runs;
  int64_t window;
  Inputs<T> out;

  int64_t groups() const { return heads / kv_heads; }
  int64_t block() const { return groups() < ATTENTION_ROWS ? ATTENTION_ROWS / groups() : 1; }
  int64_t blocks() const { return (num_queries + block() - 1) / block(); }
  int64_t items() const { return batch_size * kv_heads * blocks(); }
  // A row of scores begins at any entry, and is written by sixteen.
  int64_t stride() const { return (num_keys + 2 * LANES - 1) / LANES * LANES; }
  // Floats for transposed keys, for queries widened to float32, and for scores.
  int64_t scratch_floats() const { return head_dim * LANES + block() * groups() * (head_dim + stride()) + stride(); }
};

struct Run {
  int64_t first, end;
};

// The entries that one query sees.
template <class T> struct Sight {
  const Attention<T>* a;
  int64_t query, row;  // index in its batch row; index among all rows

  int64_t count() const { return a->offsets ? a->offsets[row + 1] - a->offsets[row] : 1; }
  Run run(int64_t i) const {
    if (!a->offsets) {
      const int64_t end = a->num_keys - a->num_queries + query + 1;
      return {a->window && end > a->window ? end - a->window : 0, end};
    }
    const int32_t* at = a->runs + 2 * (a->offsets[row] + i);
    return {at[0], at[1]};
  }
};

// Transposes sixteen keys to [step, key]; missing ones become 0.
template <class T> void turn_keys(const T* keys, int64_t count, int64_t head_dim, float* to) {
  const int64_t bytes = head_dim * sizeof(T);
  for (int64_t at = 0; at < bytes; at += 64) {
    Words v[LANES] = {};
    const uint8_t* from = (const uint8_t*)keys + at;
    if (count == LANES && bytes - at >= 64) {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) v[i] = load<Words>(from + i * bytes);
    } else {
      for (int64_t i = 0; i < count; i++) memcpy(&v[i], from + i * bytes, bytes - at < 64 ? bytes - at : 64);
    }
    transpose(v);
    memcpy(to + at / 4 * LANES, v, (bytes - at < 64 ? bytes - at : 64) * LANES);
  }
}

// A query in the form for products; `to` has room for its columns in float32.
inline const float* widened_query(const float* query, int64_t, float*) { return query; }
inline const Factor<uint16_t>* widened_query(const uint16_t* query, int64_t head_dim, float* to) {
#if HAS_BF16
  return query;
#else
  for (int64_t i = 0; i < head_dim; i += LANES) store(to + i, widen(query + i));
  return to;
#endif
}

// Adds the products of one step of columns of some keys: one column in float32, two in bfloat16.
INLINE WideFloats multiply_add(const WideFloats& sum, const WideFloats& keys, const float* query, int64_t i, float) {
  return sum + keys * query[i];
}
INLINE WideFloats multiply_add(const WideFloats& sum, const WideFloats& keys, const Factor<uint16_t>* query, int64_t i, uint16_t) {
#if HAS_BF16
  return multiply_add(sum, keys, query + 2 * i);
#else
  const WideWords pairs = reinterpret<WideWords>(keys);
  const WideFloats even = reinterpret<WideFloats>(pairs << 16), odd = reinterpret<WideFloats>(pairs & 0xffff0000);
  return sum + even * query[2 * i] + odd * query[2 * i + 1];
#endif
}

// Number of rows whose sums are in registers together, and of vectors of each. A vector has sixteen columns or more,
// because so many are written at once.
constexpr int SCORED_ROWS = HAS_AVX512 ? 8 : 4, MIXED_ROWS = 4, MIXED_VECTORS = HAS_AVX512 ? 4 : PARTS;

// Scores of sixteen keys by ROWS queries, summed in the order of the columns.
template <int ROWS, class T>
void score(const float* turned, const Factor<T>* const* queries, int64_t steps, float* const* scores, int64_t at) {
  WideFloats sums[ROWS][PARTS] = {};
  for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const WideFloats keys = load<WideFloats>(turned + i * LANES + part * WIDE);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sums[r][part] = multiply_add(sums[r][part], keys, queries[r], i, T());
    }
  for (int r = 0; r < ROWS; r++) memcpy(scores[r] + at, sums[r], sizeof sums[r]);
}

// Turns the scores of the entries that a query sees into weights and moves them to the front. Returns their sum.
template <class T> float weigh(const Sight<T>& sight, float* scores, int64_t* num_seen) {
  int64_t seen = 0;
  for (int64_t i = 0; i < sight.count(); i++) {
    const Run run = sight.run(i);
    if (run.first != seen) memmove(scores + seen, scores + run.first, (run.end - run.first) * sizeof(float));
    seen += run.end - run.first;
  }
  *num_seen = seen;
  if (!seen) return 1;
  for (int64_t i = seen; i % LANES; i++) scores[i] = -__builtin_inff();
  Floats most = load<Floats>(scores), sum = {};
  for (int64_t i = LANES; i < seen; i += LANES) {
    const Floats v = load<Floats>(scores + i);
    most = v > most ? v : most;
  }
  float highest = most[0];
  for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
  for (int64_t i = 0; i < seen; i += LANES) {
    const Floats weight = exponential((load<Floats>(scores + i) - highest) * sight.a->scale);
    store(scores + i, weight);
    sum += weight;
  }
  return sum_of(sum);
}

// Adds the values of `count` neighbouring entries, VECTORS vectors of each, with the weights of ROWS rows.
template <int ROWS, int VECTORS, class T>
INLINE void add_values(const T* values, int64_t head_dim, int64_t count, const float* const* weights, int64_t at,
                       WideFloats sums[][VECTORS]) {
  WideFloats total[ROWS][VECTORS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) total[r][v] = sums[r][v];
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const WideFloats value = widen_part(values + i * head_dim + v * WIDE);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) total[r][v] += value * weights[r][at + i];
    }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = total[r][v];
}

// One query with one of the heads that share keys.
template <class T> struct Row {
  Sight<T> sight;
  int64_t head, seen;
  float sum;
};

// Computes VECTORS vectors of columns of the outputs of ROWS rows. Their common first entries are read once for all
// rows.
template <int ROWS, int VECTORS, class T>
void mix(const Attention<T>& a, const T* values, const Row<T>* rows, float* const* weights, int64_t column) {
  constexpr int COUNT = VECTORS * WIDE;
  WideFloats sums[ROWS][VECTORS] = {};
  int64_t first = 0, common = rows[0].seen ? INT64_MAX : 0;
  for (int r = 0; r < ROWS && common; r++) {
    const Run run = rows[r].seen ? rows[r].sight.run(0) : Run{0, 0};
    if (!r) first = run.first;
    if (run.first != first) common = 0;
    else if (run.end - first < common) common = run.end - first;
  }
  add_values<ROWS, VECTORS>(values + first * a.head_dim + column, a.head_dim, common, weights, 0, sums);
  for (int r = 0; r < ROWS; r++) {
    int64_t at = 0;
    for (int64_t i = 0; i < rows[r].sight.count(); i++) {
      const Run run = rows[r].sight.run(i);
      const int64_t done = i ? 0 : common, count = run.end - run.first - done;
      add_values<1, VECTORS>(values + (run.first + done) * a.head_dim + column, a.head_dim, count, weights + r, at + done,
                             sums + r);
      at += run.end - run.first;
    }
    alignas(64) float mixed[COUNT];
    for (int v = 0; v < VECTORS; v++) store(mixed + v * WIDE, sums[r][v] / rows[r].sum);
    for (int i = 0; i < COUNT; i += LANES) {
      const int64_t n = rows[r].head * a.head_dim + column + i;
      narrow(a.out.at(n / COLUMNS, rows[r].sight.row) + n % COLUMNS, load<Floats>(mixed + i));
    }
  }
}

template <int VECTORS, class T>
void mix_columns(const Attention<T>& a, const T* values, const Row<T>* rows, float* const* weights, int64_t num_rows,
                 int64_t column) {
  for (; column + VECTORS * WIDE <= a.head_dim; column += VECTORS * WIDE) {
    int64_t r = 0;
    for (; r + MIXED_ROWS <= num_rows; r += MIXED_ROWS) mix<MIXED_ROWS, VECTORS>(a, values, rows + r, weights + r, column);
    for (; r < num_rows; r++) mix<1, VECTORS>(a, values, rows + r, weights + r, column);
  }
  if constexpr (VECTORS * WIDE > LANES)
    if (column < a.head_dim) mix_columns<VECTORS / 2>(a, values, rows, weights, num_rows, column);
}

// Computes a block of queries with the heads that share keys; `scratch` has `scratch_floats`.
template <class T> void attend(const Attention<T>& a, int64_t item, float* scratch) {
  const int64_t block = item % a.blocks(), kv_head = item / a.blocks() % a.kv_heads, b = item / a.blocks() / a.kv_heads;
  const int64_t first = block * a.block(), groups = a.groups(), stride = a.stride();
  const int64_t queries = a.num_queries - first < a.block() ? a.num_queries - first : a.block();
  const int64_t at = b * a.batch_stride + kv_head * a.head_stride, num_rows = queries * groups;
  Row<T> rows[MOST_GROUPS];
  const Factor<T>* vectors[MOST_GROUPS];
  float *scores[MOST_GROUPS], *widened = scratch + a.head_dim * LANES, *first_scores = widened + num_rows * a.head_dim;
  int64_t begin = a.num_keys, end = 0;
  for (int64_t r = 0; r < num_rows; r++) {
    const int64_t query = first + r % queries, row = b * a.num_queries + query, head = kv_head * groups + r / queries;
    rows[r] = {{&a, query, row}, head, 0, 1};
    vectors[r] = widened_query(a.queries + (row * a.heads + head) * a.head_dim, a.head_dim, widened + r * a.head_dim);
    scores[r] = first_scores + r * stride;
    for (int64_t i = 0; i < rows[r].sight.count(); i++) {
      const Run run = rows[r].sight.run(i);
      begin = run.first < begin ? run.first : begin, end = run.end > end ? run.end : end;
    }
  }
  for (int64_t key = begin; key < end; key += LANES) {  // entries before a window may not exist any more
    turn_keys(a.keys + at + key * a.head_dim, end - key < LANES ? end - key : LANES, a.head_dim, scratch);
    const int64_t steps = a.head_dim / STEP<T>;
    int64_t r = 0;
    for (; r + SCORED_ROWS <= num_rows; r += SCORED_ROWS) score<SCORED_ROWS, T>(scratch, vectors + r, steps, scores + r, key);
    for (; r + 2 <= num_rows; r += 2) score<2, T>(scratch, vectors + r, steps, scores + r, key);
    for (; r < num_rows; r++) score<1, T>(scratch, vectors + r, steps, scores + r, key);
  }
  for (int64_t r = 0; r < num_rows; r++) rows[r].sum = weigh(rows[r].sight, scores[r], &rows[r].seen);
  mix_columns<MIXED_VECTORS>(a, a.values + at, rows, scores, num_rows, 0);
}

}  // namespace
