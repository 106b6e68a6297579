// Dynamic draft trees that grow level by level: the nodes to run next, the entries visible to them, and the best nodes.
//
// Source: EAGLE-2 (arXiv:2406.16858). The plain reference is `grow_tree` of the plug-ins.
#pragma once

#include "ranking.h"

namespace {

constexpr int MOST_WIDTH = 128;  // largest width and depth

// The trees of a batch; `GrowthStructure` of growth.py. All arrays but `token_ids` are [batch row, …].
struct Growth {
  int64_t batch_size, width, depth;
  int64_t num_levels;  // number of proposed levels; the last one is the frontier
  const int64_t* token_ids;  // token id of each column; null: columns are token ids
  // The pool of all proposed nodes; a parent is an index into it, or -1 for children of the root.
  float* pool_values;
  int64_t *pool_tokens, *pool_parents;
  // The frontier, best first: the nodes that the next level runs. `previous`: index of each parent in the previous
  // frontier.
  float* values;
  int64_t *tokens, *previous, *in_pool;
  int64_t* run_parents;  // parents of all frontier nodes, level by level: indices among these nodes, or -1

  int64_t num_run() const { return num_levels * width; }
  int64_t pool_size() const { return pool_size(num_levels); }
  int64_t pool_capacity() const { return pool_size(depth); }

 private:
  int64_t pool_size(int64_t levels) const { return levels ? width + (levels - 1) * width * width : 0; }
};

// Adds the children of the frontier, or at first of the root: [batch row, node, width], best first.
inline void grow(Growth& g, const float* log_probs, const int64_t* columns) {
  const bool is_first = !g.num_levels;
  const int64_t count = is_first ? g.width : g.width * g.width, pool_size = g.pool_size();
  for (int64_t b = 0; b < g.batch_size; b++) {
    const int64_t first = b * g.width, in_pool = b * g.pool_capacity() + pool_size;
    float* values = g.pool_values + in_pool;
    int64_t* tokens = g.pool_tokens + in_pool;
    int64_t* run_parents = g.run_parents + b * g.depth * g.width + g.num_run();
    float kept[MOST_WIDTH];
    int64_t chosen[MOST_WIDTH];
    Best best{kept, chosen, g.width};
    for (int64_t i = 0; i < count; i++) {
      const int64_t column = columns[b * count + i], node = first + i / g.width;
      values[i] = (is_first ? 0 : g.values[node]) + log_probs[b * count + i];
      tokens[i] = g.token_ids ? g.token_ids[column] : column;
      g.pool_parents[in_pool + i] = is_first ? -1 : g.in_pool[node];
      best.offer(values[i], i);
    }
    for (int64_t i = 0; i < g.width; i++) {
      g.values[first + i] = kept[i];
      g.tokens[first + i] = tokens[chosen[i]];
      g.in_pool[first + i] = pool_size + chosen[i];
      g.previous[first + i] = chosen[i] / g.width;
      run_parents[i] = is_first ? -1 : g.num_run() - g.width + g.previous[first + i];
    }
  }
  g.num_levels++;
}

// Writes the visible ranges of the frontier's nodes: those of the `num_before` entries that are visible to a node's row,
// its ancestors, and itself. Returns the number of ranges. The memory holds, for each node, its row's ranges and one
// for each level.
inline int64_t put_visible_ranges(const Growth& g, const int32_t* offsets_before, const int32_t* ranges_before,
                                  int64_t num_before, int32_t* offsets, int32_t* ranges) {
  int64_t count = 0;
  for (int64_t b = 0; b < g.batch_size; b++)
    for (int64_t i = 0; i < g.width; i++) {
      const int64_t begin = count;
      offsets[b * g.width + i] = count;
      for (int64_t r = offsets_before[b]; r < offsets_before[b + 1]; r++, count++)
        ranges[2 * count] = ranges_before[2 * r], ranges[2 * count + 1] = ranges_before[2 * r + 1];
      int64_t path[MOST_WIDTH], length = 0;
      for (int64_t node = g.num_run() - g.width + i; node >= 0; node = g.run_parents[b * g.depth * g.width + node])
        path[length++] = num_before + node;
      while (length--) {
        if (count > begin && ranges[2 * count - 1] == path[length]) ranges[2 * count - 1]++;
        else ranges[2 * count] = path[length], ranges[2 * count + 1] = path[length] + 1, count++;
      }
    }
  offsets[g.batch_size * g.width] = count;
  return count;
}

// Writes the best `most` nodes of the pool after the root, whose token is already there. The pool has at least `most`.
// No node is better than its parent, which comes before it. So every prefix is a tree.
inline bool cut(const Growth& g, int64_t most, int64_t* tokens, int64_t* parents, float* values) {
  const int64_t size = g.pool_size();
  if (!scratch.reserve(2 * Scratch::rounded(size * sizeof(int64_t)))) return false;
  int64_t *places = scratch.take<int64_t>(size), *chosen = scratch.take<int64_t>(most);
  for (int64_t b = 0; b < g.batch_size; b++) {
    const int64_t first = b * (most + 1), pool = b * g.pool_capacity();
    parents[first] = -1, values[first] = 0;
    Best best{values + first + 1, chosen, most};
    for (int64_t i = 0; i < size; i++) best.offer(g.pool_values[pool + i], i);
    for (int64_t i = 0; i < most; i++) {
      const int64_t parent = g.pool_parents[pool + chosen[i]];
      places[chosen[i]] = i + 1;
      tokens[first + 1 + i] = g.pool_tokens[pool + chosen[i]];
      parents[first + 1 + i] = parent < 0 ? 0 : places[parent];
    }
  }
  return true;
}

}  // namespace
