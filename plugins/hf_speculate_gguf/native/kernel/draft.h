// A whole draft of an EAGLE head: reads the entries that a round committed, then drafts a tree level by level.
//
// The plain reference is `PlainSteps` of the plug-ins.
#pragma once

#include "growth.h"
#include "layer.h"

namespace {

// `_DraftStructure` of draft.py.
struct Draft {
  Call layers;        // call for every forward, with layers, batch, cache and threads; num_keys: entries that were read before
  Ranking ranking;    // call for every level; log_noise is that of the next one
  Growth* growth;     // without any proposals yet
  Matrix embeddings;  // blocks as in the file, or dense
  const void *cos, *sin;     // [position, head_dim]
  const int64_t* positions;  // position of the next entry of each batch row
  // Committed entries that the head has not read yet, [batch row, entry], with their states. All entries before it are
  // visible to each.
  int64_t num_pending;
  const int64_t* pending_tokens;
  // or `features`: the target's states [batch row, entry], which a matrix in 8 bits projects together
  const void* pending_states;
  int64_t num_features;
  const void* features[8];
  Matrix fusing;
  // EAGLE-1: projects an embedding and a state together to the input of the first layer. Without tiles, the first layer
  // joins them.
  Matrix joining;
  void* root;  // states of the last committed entry [batch row, hidden]; computed if entries are pending
  const int32_t *offsets, *ranges;  // visible ranges of each batch row, pending entries included
  int64_t num_positions;          // that have angles
  bool (*should_continue)(int64_t level);  // asks whether to draft another level; sets its noise
};

template <class T> class DraftRun {
 public:
  explicit DraftRun(Draft& draft)
      : d(draft), growth(*d.growth), batch_size(growth.batch_size), width(growth.width), hidden(d.embeddings.in_features),
        head_dim((*d.layers.layers)->head_dim) {}

  // Returns 1: done; 0: the modules must do it; -1: out of memory.
  int work() {
    const int64_t num_new = d.num_pending + growth.depth - 1;
    for (int64_t b = 0; b < batch_size; b++)
      if (d.positions[b] < 0 || d.positions[b] + num_new > d.num_positions) return 0;
    if (!take()) return -1;
    const int64_t num_before = d.layers.num_keys + d.num_pending;
    if (d.num_pending) {
      if (!look_up(d.embeddings, d.pending_tokens, batch_size * d.num_pending, row, second)) return 0;
      if (d.num_features && !project(d.fusing, d.features, d.num_features, batch_size * d.num_pending)) return -1;
      if (!forward(d.num_pending, d.num_features ? projected : d.pending_states, 0, 1, num_before, nullptr, nullptr)) return -1;
      for (int64_t b = 0; b < batch_size; b++)
        memcpy((T*)d.root + b * hidden, last() + ((b + 1) * d.num_pending - 1) * hidden, hidden * sizeof(T));
    }
    int done = rank_level(d.root, 1);
    for (int64_t level = 1; done > 0; level++) {
      grow(growth, log_probs, columns);
      if (level == growth.depth || !d.should_continue(level)) break;
      if (!look_up(d.embeddings, growth.tokens, batch_size * width, row, second)) return 0;
      for (int64_t i = 0; i < batch_size * width; i++) {
        const int64_t parent = i / width * fed_width + growth.previous[i];
        memcpy(states + i * hidden, fed_back + parent * hidden, hidden * sizeof(T));
      }
      put_visible_ranges(growth, d.offsets, d.ranges, num_before, offsets, ranges);
      const int64_t num_keys = num_before + growth.num_run();
      if (!forward(width, states, d.num_pending + level - 1, 0, num_keys, offsets, ranges)) return -1;
      done = rank_level(last(), width);
    }
    return done;
  }

 private:
  // Memory of this call only: `should_continue` may start another draft on the same thread.
  bool take() {
    const int64_t nodes = batch_size * width, rows = larger(nodes, batch_size * d.num_pending);
    const int64_t num_states = rows * hidden, num_angles = rows * head_dim;
    const int64_t num_ranges = d.offsets[batch_size] * width + nodes * growth.depth, num_log_probs = nodes * width;
    const int64_t num_joined = rows * larger(d.fusing.in_features, d.joining.in_features);
    const int64_t values[] = {num_states, num_states, num_states, num_angles, num_angles, num_states * d.layers.num_layers,
                              num_joined, num_joined ? num_states : 0};
    int64_t bytes = Scratch::rounded(hidden * sizeof(float)) + Scratch::rounded((nodes + 1) * sizeof(int32_t)) +
                    Scratch::rounded(2 * num_ranges * sizeof(int32_t)) + Scratch::rounded(num_log_probs * sizeof(float)) +
                    Scratch::rounded(num_log_probs * sizeof(int64_t));
    for (int64_t each : values) bytes += Scratch::rounded(each * sizeof(T));
    if (!memory.reserve(bytes)) return false;
    T** places[] = {&states, &second, &normed, &cos, &sin, &y, &joined, &projected};
    for (int i = 0; i < 8; i++) *places[i] = memory.take<T>(values[i]);
    row = memory.take<float>(hidden);
    offsets = memory.take<int32_t>(nodes + 1), ranges = memory.take<int32_t>(2 * num_ranges);
    log_probs = memory.take<float>(num_log_probs), columns = memory.take<int64_t>(num_log_probs);
    return true;
  }

  // Multiplies a matrix with rows that are put together from equal parts; writes `projected`.
  bool project(const Matrix& matrix, const void* const* parts, int64_t num_parts, int64_t count) {
    const int64_t columns = matrix.in_features, part = columns / num_parts;
    for (int64_t i = 0; i < count; i++)
      for (int64_t n = 0; n < num_parts; n++)
        memcpy(joined + i * columns + n * part, (const T*)parts[n] + i * part, part * sizeof(T));
    return multiply(matrix, joined, count, projected, true, d.layers.threads);
  }

  // Runs `num_rows` entries of each batch row. The first is `first` positions after the next entry; `step` is the
  // distance between positions.
  bool forward(int64_t num_rows, const void* x, int64_t first, int64_t step, int64_t num_keys, const int32_t* offsets,
               const int32_t* ranges) {
    for (int64_t i = 0; i < batch_size * num_rows; i++) {
      const int64_t position = d.positions[i / num_rows] + first + i % num_rows * step;
      memcpy(cos + i * head_dim, (const T*)d.cos + position * head_dim, head_dim * sizeof(T));
      memcpy(sin + i * head_dim, (const T*)d.sin + position * head_dim, head_dim * sizeof(T));
    }
    if (const void* parts[] = {second, x}; d.joining.tiles) {
      if (!project(d.joining, parts, 2, batch_size * num_rows)) return false;
      x = projected;
    }
    Call& call = d.layers;
    call.x = x, call.second = second, call.y = y;
    call.batch_size = batch_size, call.num_queries = num_rows, call.num_keys = num_keys;
    call.cos[0] = cos, call.sin[0] = sin, call.rotary_stride = num_rows * head_dim;
    call.offsets[0] = offsets, call.ranges[0] = ranges;
    num_outputs = batch_size * num_rows * hidden;
    return run_layers<T>(call);
  }

  int rank_level(const void* x, int64_t num_nodes) {
    Ranking& call = d.ranking;
    call.x = x, call.batch_size = batch_size, call.num_nodes = num_nodes;
    call.most = width, call.log_probs = log_probs, call.columns = columns;
    fed_back = call.normed ? normed : (const T*)x, fed_width = num_nodes;
    if (call.normed) call.normed = normed;
    return rank<T>(call);
  }

  const T* last() const { return y + (d.layers.num_layers - 1) * num_outputs; }

  Draft& d;
  Growth& growth;
  const int64_t batch_size, width, hidden, head_dim;
  Scratch memory;
  T *states, *second, *normed, *cos, *sin, *y, *joined, *projected;
  float *row, *log_probs;
  int32_t *offsets, *ranges;
  int64_t* columns;
  const T* fed_back;
  int64_t fed_width, num_outputs;
};

}  // namespace
