// Attention of a few queries, in a tree or a chain, over the entries of a cache.
//
// Each query's sums run over the keys visible to it, in text order, as if there were no others. They do not depend on
// where its ancestors lie in the cache, on other entries, or on the number of queries. So a node of a draft tree gets
// the same bits as in a chain.
#pragma once

#include "dense.h"
#include "tiles.h"

namespace {

constexpr int ATTENTION_ROWS = 64;  // most rows of a block: queries times heads that share keys
constexpr int MOST_GROUPS = 128;
constexpr int KEYS = HAS_AVX512 ? 2 * LANES : LANES;  // scored together
constexpr int AHEAD = 2 * LANES;  // entries to prefetch ahead

inline int64_t whole_tiles(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

template <class T> struct Attention {
  const T* queries;  // [row, head, column], rotated
  const T *keys, *values;  // the cache, [batch row, KV head, entry, column]
  int64_t batch_stride, head_stride, batch_size, num_queries, num_keys, heads, kv_heads, head_dim;
  float scale;
  // Offset of each query's visible ranges [first entry, end); null: the last `window` entries up to its own are visible,
  // or all of them if `window` is 0.
  const int32_t *offsets, *ranges;
  int64_t window, threads;
  Inputs<T> out;

  int64_t groups() const { return heads / kv_heads; }
  // Blocks are as large as they may be, unless few of them would be shared unevenly.
  int64_t blocks() const {
    const int64_t most = groups() < ATTENTION_ROWS ? ATTENTION_ROWS / groups() : 1, each = batch_size * kv_heads;
    int64_t count = (num_queries + most - 1) / most;
    while (count < num_queries && each * count < 4 * threads && each * count % threads) count++;
    return count;
  }
  int64_t block() const { return (num_queries + blocks() - 1) / blocks(); }
  int64_t items() const { return batch_size * kv_heads * blocks(); }
  // A row of scores begins at any entry, and is written by KEYS.
  int64_t stride() const { return (num_keys + KEYS + LANES - 1) / LANES * LANES; }
  // Floats for transposed keys, and for queries and scores of whole tiles of rows.
  int64_t scratch_floats() const {
    return head_dim * KEYS + whole_tiles(block() * groups()) * (head_dim + stride()) + stride();
  }
};

struct Range {
  int64_t first, end;
};

// The entries visible to one query.
template <class T> struct VisibleRanges {
  const Attention<T>* a;
  int64_t query, row;  // index in its batch row; index among all rows

  int64_t count() const { return a->offsets ? a->offsets[row + 1] - a->offsets[row] : 1; }
  Range at(int64_t i) const {
    if (!a->offsets) {
      const int64_t end = a->num_keys - a->num_queries + query + 1;
      return {a->window && end > a->window ? end - a->window : 0, end};
    }
    const int32_t* range = a->ranges + 2 * (a->offsets[row] + i);
    return {range[0], range[1]};
  }
};

// Transposes sixteen keys to [step, key]; missing ones become 0.
template <class T> void turn_keys(const T* keys, int64_t count, int64_t head_dim, float* to) {
  const int64_t bytes = head_dim * sizeof(T);
  for (int64_t at = 0; at < bytes; at += 64) {
    Words v[LANES];
    const uint8_t* from = (const uint8_t*)keys + at;
    if (count >= LANES && bytes - at >= 64) {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        v[i] = load<Words>(from + i * bytes);
        __builtin_prefetch(from + (i + AHEAD) * bytes, 0, 3);
      }
    } else {
      for (int64_t i = 0; i < LANES; i++) {
        v[i] = Words{};
        if (i < count) memcpy(&v[i], from + i * bytes, bytes - at < 64 ? bytes - at : 64);
      }
    }
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (at + 4 * i < bytes) store(to + (at / 4 + i) * LANES, v[i]);
  }
}

// Writes a query in the form for products.
inline void put_query(const float* query, int64_t head_dim, float* to) { memcpy(to, query, head_dim * sizeof(float)); }
inline void put_query(const uint16_t* query, int64_t head_dim, Factor<uint16_t>* to) {
#if HAS_BF16
  memcpy(to, query, head_dim * sizeof(uint16_t));
#else
  for (int64_t i = 0; i < head_dim; i += LANES) store(to + i, widen(query + i));
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
constexpr int SCORED_ROWS = HAS_AVX512 ? 8 : 4, MIXED_ROWS = HAS_AVX512 ? 7 : 4, MIXED_VECTORS = HAS_AVX512 ? 4 : PARTS;

// Queries [row, column] of a block, and their scores [row, stride].
template <class T> struct Block {
  Factor<T>* queries;
  float* scores;
  int64_t rows, head_dim, stride;
};

// Scores of KEYS keys by ROWS queries from row r on, summed in the order of the columns.
template <int ROWS, class T> void score(const float* turned, const Block<T>& block, int64_t r, int64_t key) {
  const Factor<T>* const queries = block.queries + r * block.head_dim;
  const int64_t steps = block.head_dim / STEP<T>;
  WideFloats sums[ROWS][KEYS / WIDE] = {};
  for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 4
    for (int part = 0; part < KEYS / WIDE; part++) {
      const WideFloats keys = load<WideFloats>(turned + (part * WIDE / LANES * steps + i) * LANES + part * WIDE % LANES);
#pragma GCC unroll 8
      for (int q = 0; q < ROWS; q++)
        sums[q][part] = multiply_add(sums[q][part], keys, queries + q * block.head_dim, i, T());
    }
  for (int q = 0; q < ROWS; q++) memcpy(block.scores + (r + q) * block.stride + key, sums[q], sizeof sums[q]);
}

template <int ROWS, class T> void score_rest(const float* turned, const Block<T>& block, int64_t r, int64_t key) {
  for (; r + ROWS <= block.rows; r += ROWS) score<ROWS>(turned, block, r, key);
  if constexpr (ROWS > 1)
    if (r < block.rows) score_rest<ROWS / 2>(turned, block, r, key);
}

#if HAS_AMX
// The same by AMX, sixteen rows at a time, for any number of queries, as it sums in another order. Rows that fill up a
// tile get any scores.
inline void score_tiles(const float* turned, const Block<uint16_t>& block, int tile_rows, int64_t key) {
  for (int64_t r = 0; r < block.rows; r += tile_rows)
    for (int64_t k = 0; k < KEYS; k += LANES) {
      _tile_zero(0);
      for (int64_t column = 0; column < block.head_dim; column += COLUMNS) {
        _tile_loadd(2, block.queries + r * block.head_dim + column, block.head_dim * 2);
        _tile_loadd(4, turned + (k * block.head_dim + column * LANES) / 2, 64);
        _tile_dpbf16ps(0, 2, 4);
      }
      _tile_stored(0, block.scores + r * block.stride + key + k, block.stride * 4);
    }
}
#endif

// Scores of the keys from entry `key` to `end`. `turned` holds KEYS keys.
template <class T> void score_all(const T* keys, int64_t key, int64_t end, const Block<T>& block, float* turned) {
  const int64_t steps = block.head_dim / STEP<T>;
#if HAS_AMX
  const bool amx = sizeof(T) == 2 && block.head_dim % COLUMNS == 0 && has_amx();
  const int tile_rows = block.rows < LANES ? block.rows : LANES;
  if (amx) configure(tile_rows, 2 * COLUMNS);
#endif
  for (; key < end; key += KEYS) {
    for (int64_t k = 0; k < KEYS; k += LANES)
      turn_keys(keys + (key + k) * block.head_dim, end - key - k, block.head_dim, turned + k * steps);
#if HAS_AMX
    if constexpr (sizeof(T) == 2)
      if (amx) {
        score_tiles(turned, block, tile_rows, key);
        continue;
      }
#endif
    score_rest<SCORED_ROWS>(turned, block, 0, key);
  }
#if HAS_AMX
  if (amx) _tile_release();
#endif
}

// Turns the scores of the entries visible to a query into weights and moves them to the front. Returns their sum.
template <class T> float weigh(const VisibleRanges<T>& visible, float* scores, int64_t* num_visible) {
  int64_t count = 0;
  for (int64_t i = 0; i < visible.count(); i++) {
    const Range range = visible.at(i);
    if (range.first != count) memmove(scores + count, scores + range.first, (range.end - range.first) * sizeof(float));
    count += range.end - range.first;
  }
  *num_visible = count;
  if (!count) return 1;
  for (int64_t i = count; i % LANES; i++) scores[i] = -__builtin_inff();
  Floats most = load<Floats>(scores), sum = {};
  for (int64_t i = LANES; i < count; i += LANES) {
    const Floats v = load<Floats>(scores + i);
    most = choose(v > most, v, most);
  }
  float highest = most[0];
  for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats weight = exponential((load<Floats>(scores + i) - highest) * visible.a->scale);
    store(scores + i, weight);
    sum += weight;
  }
  return sum_of(sum);
}

// Adds the values of `count` neighbouring entries, VECTORS vectors of each, with the weights of ROWS rows.
template <int ROWS, int VECTORS, class T>
INLINE void add_values(const T* values, int64_t head_dim, int64_t count, const float* weights, int64_t stride,
                       WideFloats sums[][VECTORS]) {
  WideFloats total[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) total[r][v] = sums[r][v];
  for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS * WIDE; v += 64 / sizeof(T)) __builtin_prefetch(values + (i + AHEAD) * head_dim + v, 0, 3);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const WideFloats value = widen_part(values + i * head_dim + v * WIDE);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) total[r][v] += value * weights[r * stride + i];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = total[r][v];
}

// One query with one of the heads that share keys.
template <class T> struct Row {
  VisibleRanges<T> visible;
  int64_t head, num_visible;
  float sum;
};

// Computes VECTORS vectors of columns of the outputs of ROWS rows. Their common first entries are read once for all
// rows.
template <int ROWS, int VECTORS, class T>
void mix(const Attention<T>& a, const T* values, const Row<T>* rows, const float* weights, int64_t column) {
  constexpr int COUNT = VECTORS * WIDE;
  const int64_t stride = a.stride();
  WideFloats sums[ROWS][VECTORS] = {};
  int64_t first = 0, common = rows[0].num_visible ? INT64_MAX : 0;
  for (int r = 0; r < ROWS && common; r++) {
    const Range range = rows[r].num_visible ? rows[r].visible.at(0) : Range{0, 0};
    if (!r) first = range.first;
    if (range.first != first) common = 0;
    else if (range.end - first < common) common = range.end - first;
  }
  add_values<ROWS, VECTORS>(values + first * a.head_dim + column, a.head_dim, common, weights, stride, sums);
  for (int r = 0; r < ROWS; r++) {
    int64_t at = 0;
    for (int64_t i = 0; i < rows[r].visible.count(); i++) {
      const Range range = rows[r].visible.at(i);
      const int64_t done = i ? 0 : common, count = range.end - range.first - done;
      add_values<1, VECTORS>(values + (range.first + done) * a.head_dim + column, a.head_dim, count,
                             weights + r * stride + at + done, stride, sums + r);
      at += range.end - range.first;
    }
    alignas(64) float mixed[COUNT];
    for (int v = 0; v < VECTORS; v++) store(mixed + v * WIDE, sums[r][v] / rows[r].sum);
    for (int i = 0; i < COUNT; i += LANES) {
      const int64_t n = rows[r].head * a.head_dim + column + i;
      narrow(a.out.at(n / COLUMNS, rows[r].visible.row) + n % COLUMNS, load<Floats>(mixed + i));
    }
  }
}

template <int VECTORS, class T>
void mix_columns(const Attention<T>& a, const T* values, const Row<T>* rows, const Block<T>& block, int64_t column) {
  for (; column + VECTORS * WIDE <= a.head_dim; column += VECTORS * WIDE) {
    const float* weights = block.scores;
    int64_t r = 0;
    for (; r + MIXED_ROWS <= block.rows; r += MIXED_ROWS)
      mix<MIXED_ROWS, VECTORS>(a, values, rows + r, weights + r * block.stride, column);
    for (; r + 3 <= block.rows; r += 3) mix<3, VECTORS>(a, values, rows + r, weights + r * block.stride, column);
    for (; r < block.rows; r++) mix<1, VECTORS>(a, values, rows + r, weights + r * block.stride, column);
  }
  if constexpr (VECTORS * WIDE > LANES)
    if (column < a.head_dim) mix_columns<VECTORS / 2>(a, values, rows, block, column);
}

// Computes a block of queries with the heads that share keys; `scratch` has `scratch_floats`.
template <class T> void attend(const Attention<T>& a, int64_t item, float* scratch) {
  const int64_t number = item % a.blocks(), kv_head = item / a.blocks() % a.kv_heads, b = item / a.blocks() / a.kv_heads;
  const int64_t first = number * a.block(), groups = a.groups();
  const int64_t queries = a.num_queries - first < a.block() ? a.num_queries - first : a.block();
  const int64_t at = b * a.batch_stride + kv_head * a.head_stride;
  float* const memory = scratch + a.head_dim * KEYS;
  const Block<T> block = {(Factor<T>*)memory, memory + whole_tiles(queries * groups) * a.head_dim, queries * groups, a.head_dim,
                          a.stride()};
  Row<T> rows[MOST_GROUPS];
  int64_t begin = a.num_keys, end = 0;  // entries before a window may not exist any more
  for (int64_t r = 0; r < block.rows; r++) {
    const int64_t query = first + r % queries, row = b * a.num_queries + query, head = kv_head * groups + r / queries;
    rows[r] = {{&a, query, row}, head, 0, 1};
    put_query(a.queries + (row * a.heads + head) * a.head_dim, a.head_dim, block.queries + r * a.head_dim);
    for (int64_t i = 0; i < rows[r].visible.count(); i++) {
      const Range range = rows[r].visible.at(i);
      begin = range.first < begin ? range.first : begin, end = range.end > end ? range.end : end;
    }
  }
  score_all(a.keys + at, begin, end, block, scratch);
  for (int64_t r = 0; r < block.rows; r++)
    rows[r].sum = weigh(rows[r].visible, block.scores + r * block.stride, &rows[r].num_visible);
  mix_columns<MIXED_VECTORS>(a, a.values + at, rows, block, 0);
}

}  // namespace
