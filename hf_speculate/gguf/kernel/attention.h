// Attention of a few queries, in a tree or a row, over the entries of a cache.
//
// Every query takes the keys that it sees in their order, as if there were no others: its sums do not depend on where in
// the cache its ancestors lie, on what else is there, nor on how many queries there are. A node of a draft tree gets the
// very bits that it would get in a chain.
#pragma once

#include "products.h"

namespace {

constexpr int ATTENTION_ROWS = 32;  // queries times heads that share keys, at a time
constexpr int MOST_GROUPS = 128;

template <class T> struct Attention {
  const T* queries;  // [row, head, column], rotated
  const T *keys, *values;  // of the cache [batch row, KV head, entry, column]
  int64_t batch_stride, head_stride, batch_size, num_queries, num_keys, heads, kv_heads, head_dim;
  float scale;
  // Of each query, where its runs [first entry, end) begin; null: every query sees what lies before it, and itself.
  const int32_t *offsets, *runs;
  Inputs<T> out;

  int64_t groups() const { return heads / kv_heads; }
  int64_t block() const { return groups() < ATTENTION_ROWS ? ATTENTION_ROWS / groups() : 1; }
  int64_t blocks() const { return (num_queries + block() - 1) / block(); }
  int64_t items() const { return batch_size * kv_heads * blocks(); }
  int64_t stride() const { return (num_keys + LANES - 1) / LANES * LANES; }
  int64_t scratch_floats() const { return head_dim * LANES + (block() * groups() + 1) * stride(); }
};

struct Run {
  int64_t first, end;
};

// What a query sees.
template <class T> struct Sight {
  const Attention<T>* a;
  int64_t query, row;  // of a batch row; of all

  int64_t count() const { return a->offsets ? a->offsets[row + 1] - a->offsets[row] : 1; }
  Run run(int64_t i) const {
    if (!a->offsets) return {0, a->num_keys - a->num_queries + query + 1};
    const int32_t* at = a->runs + 2 * (a->offsets[row] + i);
    return {at[0], at[1]};
  }
};

// Sixteen keys as [step, key]; those behind the last are 0.
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

template <int ROWS, class T>
void score(const float* turned, const T* const* queries, int64_t steps, float* const* scores, int64_t at) {
  Floats sum[ROWS] = {};
  for (int64_t i = 0; i < steps; i++) {
    const Floats key = load<Floats>(turned + i * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r] = multiply_add(sum[r], key, queries[r] + i * STEP<T>);
  }
  for (int r = 0; r < ROWS; r++) store(scores[r] + at, sum[r]);
}

// Scores of what a query sees become weights, moved together to the front; their sum.
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

// Adds neighbouring entries, 16 * WIDTH columns of each, with the weights of ROWS rows.
template <int ROWS, int WIDTH, class T>
INLINE void add_values(const T* values, int64_t head_dim, int64_t count, const float* const* weights, int64_t at,
                       Floats sums[][WIDTH]) {
  Floats total[ROWS][WIDTH];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) total[r][w] = sums[r][w];
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) {
      const Floats value = widen(values + i * head_dim + w * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) total[r][w] += value * weights[r][at + i];
    }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; w++) sums[r][w] = total[r][w];
}

// One of the heads of a query that share keys.
template <class T> struct Row {
  Sight<T> sight;
  int64_t head, seen;
  float sum;
};

// 16 * WIDTH columns of the outputs of ROWS rows: what begins alike is read once for all of them.
template <int ROWS, int WIDTH, class T>
void mix(const Attention<T>& a, const T* values, const Row<T>* rows, float* const* weights, int64_t column) {
  Floats sums[ROWS][WIDTH] = {};
  int64_t first = 0, common = rows[0].seen ? INT64_MAX : 0;
  for (int r = 0; r < ROWS && common; r++) {
    const Run run = rows[r].seen ? rows[r].sight.run(0) : Run{0, 0};
    if (!r) first = run.first;
    if (run.first != first) common = 0;
    else if (run.end - first < common) common = run.end - first;
  }
  add_values<ROWS, WIDTH>(values + first * a.head_dim + column, a.head_dim, common, weights, 0, sums);
  for (int r = 0; r < ROWS; r++) {
    int64_t at = 0;
    for (int64_t i = 0; i < rows[r].sight.count(); i++) {
      const Run run = rows[r].sight.run(i);
      const int64_t done = i ? 0 : common, count = run.end - run.first - done;
      add_values<1, WIDTH>(values + (run.first + done) * a.head_dim + column, a.head_dim, count, weights + r, at + done,
                           sums + r);
      at += run.end - run.first;
    }
    for (int w = 0; w < WIDTH; w++) {
      const int64_t n = rows[r].head * a.head_dim + column + w * LANES;
      narrow(a.out.at(n / COLUMNS, rows[r].sight.row) + n % COLUMNS, sums[r][w] / rows[r].sum);
    }
  }
}

template <int WIDTH, class T>
void mix_columns(const Attention<T>& a, const T* values, const Row<T>* rows, float* const* weights, int64_t num_rows,
                 int64_t column) {
  for (; column + WIDTH * LANES <= a.head_dim; column += WIDTH * LANES) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) mix<4, WIDTH>(a, values, rows + r, weights + r, column);
    for (; r < num_rows; r++) mix<1, WIDTH>(a, values, rows + r, weights + r, column);
  }
  if constexpr (WIDTH > 1)
    if (column < a.head_dim) mix_columns<WIDTH / 2>(a, values, rows, weights, num_rows, column);
}

// A block of queries with the heads that share keys; `scratch` has `scratch_floats`.
template <class T> void attend(const Attention<T>& a, int64_t item, float* scratch) {
  const int64_t block = item % a.blocks(), kv_head = item / a.blocks() % a.kv_heads, b = item / a.blocks() / a.kv_heads;
  const int64_t first = block * a.block(), groups = a.groups(), stride = a.stride();
  const int64_t queries = a.num_queries - first < a.block() ? a.num_queries - first : a.block();
  const int64_t at = b * a.batch_stride + kv_head * a.head_stride, num_rows = queries * groups;
  Row<T> rows[MOST_GROUPS];
  const T* vectors[MOST_GROUPS];
  float* scores[MOST_GROUPS];
  int64_t begin = a.num_keys, end = 0;
  for (int64_t r = 0; r < num_rows; r++) {
    const int64_t query = first + r % queries, row = b * a.num_queries + query, head = kv_head * groups + r / queries;
    rows[r] = {{&a, query, row}, head, 0, 1};
    vectors[r] = a.queries + (row * a.heads + head) * a.head_dim;
    scores[r] = scratch + a.head_dim * LANES + r * stride;
    for (int64_t i = 0; i < rows[r].sight.count(); i++) {
      const Run run = rows[r].sight.run(i);
      begin = run.first < begin ? run.first : begin, end = run.end > end ? run.end : end;
    }
  }
  for (int64_t key = begin / LANES * LANES; key < end; key += LANES) {
    turn_keys(a.keys + at + key * a.head_dim, end - key < LANES ? end - key : LANES, a.head_dim, scratch);
    const int64_t steps = a.head_dim / STEP<T>;
    int64_t r = 0;
    for (; r + 8 <= num_rows; r += 8) score<8>(scratch, vectors + r, steps, scores + r, key);
    for (; r + 4 <= num_rows; r += 4) score<4>(scratch, vectors + r, steps, scores + r, key);
    for (; r + 2 <= num_rows; r += 2) score<2>(scratch, vectors + r, steps, scores + r, key);
    for (; r < num_rows; r++) score<1>(scratch, vectors + r, steps, scores + r, key);
  }
  for (int64_t r = 0; r < num_rows; r++) rows[r].sum = weigh(rows[r].sight, scores[r], &rows[r].seen);
  mix_columns<4>(a, a.values + at, rows, scores, num_rows, 0);
}

}  // namespace
