// Dynamic draft trees as they grow level by level: which nodes are run next, what these see, and the best of all.
//
// Source: EAGLE-2 (arXiv:2406.16858). The reference is `grow_tree` of the plug-ins.
#pragma once

#include "ranking.h"

namespace {

constexpr int MOST_WIDTH = 128;

// The trees of a batch; `_Growth` of native_growth.py. All arrays but the first are [batch row, …].
struct Growth {
  int64_t batch_size, width, pool_room, run_room;
  const int64_t* token_ids;  // of columns; null: the columns
  // The pool: every node that was proposed, the parent an index into it, -1 for children of the root.
  float* pool_values;
  int64_t *pool_tokens, *pool_parents;
  int64_t pool_size;
  // The frontier, best first: the nodes that the next level runs, and where their parents are in the frontier before.
  float* values;
  int64_t *tokens, *previous, *in_pool;
  int64_t* run_parents;  // of nodes that are run, level after level: indices among these, or -1
  int64_t num_run;       // with the frontier
};

// Takes the children of the frontier, or at first of the root: [batch row, node, width], the best first.
inline void grow(Growth& g, const float* shares, const int64_t* columns) {
  const int64_t nodes = g.pool_size ? g.width : 1, count = nodes * g.width;
  for (int64_t b = 0; b < g.batch_size; b++) {
    float* values = g.pool_values + b * g.pool_room + g.pool_size;
    int64_t* tokens = g.pool_tokens + b * g.pool_room + g.pool_size;
    const int64_t first = b * g.width;
    float kept[MOST_WIDTH];
    int64_t chosen[MOST_WIDTH];
    Best best{kept, chosen, g.width};
    for (int64_t i = 0; i < count; i++) {
      const int64_t column = columns[b * count + i], node = first + i / g.width;
      values[i] = (g.pool_size ? g.values[node] : 0) + shares[b * count + i];
      tokens[i] = g.token_ids ? g.token_ids[column] : column;
      g.pool_parents[b * g.pool_room + g.pool_size + i] = g.pool_size ? g.in_pool[node] : -1;
      best.offer(values[i], i);
    }
    for (int64_t i = 0; i < g.width; i++) {
      g.values[first + i] = kept[i];
      g.tokens[first + i] = tokens[chosen[i]];
      g.in_pool[first + i] = g.pool_size + chosen[i];
      g.previous[first + i] = chosen[i] / g.width;
      if (g.num_run + i < g.run_room)
        g.run_parents[b * g.run_room + g.num_run + i] = g.pool_size ? g.num_run - g.width + chosen[i] / g.width : -1;
    }
  }
  g.pool_size += count;
  g.num_run += g.width;
}

// What the frontier sees, as runs of entries: what its row sees of the `num_before` entries before the tree, its ancestors,
// and itself. How many runs there are; there is room for those before and one for each level, for each node.
inline int64_t see(const Growth& g, const int32_t* offsets_before, const int32_t* runs_before, int64_t num_before,
                   int32_t* offsets, int32_t* runs) {
  int64_t count = 0;
  for (int64_t b = 0; b < g.batch_size; b++)
    for (int64_t i = 0; i < g.width; i++) {
      const int64_t begin = count;
      offsets[b * g.width + i] = count;
      for (int64_t r = offsets_before[b]; r < offsets_before[b + 1]; r++, count++)
        runs[2 * count] = runs_before[2 * r], runs[2 * count + 1] = runs_before[2 * r + 1];
      int64_t path[MOST_WIDTH], length = 0;
      for (int64_t node = g.num_run - g.width + i; node >= 0 && length < MOST_WIDTH;
           node = g.run_parents[b * g.run_room + node])
        path[length++] = num_before + node;
      while (length--) {
        if (count > begin && runs[2 * count - 1] == path[length]) runs[2 * count - 1]++;
        else runs[2 * count] = path[length], runs[2 * count + 1] = path[length] + 1, count++;
      }
    }
  offsets[g.batch_size * g.width] = count;
  return count;
}

// The best `most` nodes of the pool behind the root, whose token is there; there are as many at least. No node is better
// than its parent, which comes before it: every beginning is a tree.
inline bool cut(const Growth& g, int64_t most, int64_t* tokens, int64_t* parents, float* values) {
  const int64_t bytes = Scratch::rounded(g.pool_size * sizeof(int64_t));
  if (!scratch.reserve(2 * bytes)) return false;
  int64_t *places = scratch.take<int64_t>(g.pool_size), *chosen = scratch.take<int64_t>(most);
  for (int64_t b = 0; b < g.batch_size; b++) {
    const int64_t first = b * (most + 1), pool = b * g.pool_room;
    parents[first] = -1, values[first] = 0;
    Best best{values + first + 1, chosen, most};
    for (int64_t i = 0; i < g.pool_size; i++) best.offer(g.pool_values[pool + i], i);
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
