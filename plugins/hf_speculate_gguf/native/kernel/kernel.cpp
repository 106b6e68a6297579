// Packed GGUF matrices on CPUs: products, whole decoder layers, and drafts of heads. Compiled at first use (`compiler.py`) and
// called by `binding.py`.
//
//     y[m, n] = sum over the groups of row n of  scale * sum((code - bias) * x[m]) + offset * sum(x[m])
//
// A tile is 16 rows of a matrix, one in each lane; a cell is 32 of its columns. A cell is decoded and multiplied with
// several rows of the input at a time. Weights are multiplied as bfloat16, which holds the integers exactly (AMX or
// vdpbf16ps), as float32, or as bytes with activations that are quantised to bytes. Sums of groups are float32. Neither
// the number of rows nor that of threads changes the bits of a row.
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "delta.h"
#include "draft.h"
#include "noise.h"
#include "step.h"

namespace {

int shows(float value) { return value == 0 ? 1 : value <= -3.3e38f ? 0 : -1; }

}  // namespace

extern "C" {

// The number of bytes of a structure that Python mirrors (`mirrors` of binding.py); -1 if unknown.
int64_t hfs_sizeof(const char* name) {
  const struct {
    const char* name;
    int64_t bytes;
  } structures[] = {{"Matrix", sizeof(Matrix)}, {"Layer", sizeof(Layer)}, {"Call", sizeof(Call)},
                    {"AttentionCall", sizeof(AttentionCall)}, {"Delta", sizeof(Delta)}, {"Step", sizeof(Step)},
                    {"Ranking", sizeof(Ranking)}, {"Growth", sizeof(Growth)}, {"Draft", sizeof(Draft)}, {"OpenMP", sizeof(OpenMP)}};
  for (const auto& structure : structures)
    if (!strcmp(structure.name, name)) return structure.bytes;
  return -1;
}

// The number of a block type; -1 if unknown.
int hfs_kind(const char* name) {
  for (int i = 0; i < KINDS.size(); i++)
    if (!strcmp(KINDS[i].name, name)) return i;
  return -1;
}

// Takes over functions of OpenMP; returns whether these suffice for more than one thread.
bool hfs_use_openmp(const OpenMP* functions) {
  openmp = *functions;
  return openmp.has_threads();
}

int hfs_thread_pool_size(int most) { return thread_pool_size.of(most); }

// Sets the number of torch's threads in this thread, which is lowered from `given`.
void hfs_set_threads(int count, int given) {
  if (openmp.set_num_threads) openmp.set_num_threads(count), lowered = given - count;
}

// Whether the CPU has instructions that multiply bytes.
bool hfs_bytes() {
#if HAS_AVX512 || HAS_AVX2 || HAS_NEON
  return true;
#else
  return false;
#endif
}

int64_t hfs_tile_bytes(int number, int64_t in_features) { return KINDS[number].tile_bytes(in_features / COLUMNS); }

// Asks for large pages for memory that was not written to yet: reading them is up to 7 % faster.
void hfs_large_pages(uint8_t* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t PAGE = 4096;  // at most the system's page size
  const int64_t skipped = -(int64_t)(uintptr_t)memory & (PAGE - 1);
  if (bytes - skipped >= 1 << 21) madvise(memory + skipped, (bytes - skipped) / PAGE * PAGE, MADV_HUGEPAGE);
#endif
}

// Packs rows of blocks into tiles of zeros; returns false if a scale or an offset is not finite.
bool hfs_pack(int number, const uint8_t* blocks, int64_t rows, int64_t in_features, uint8_t* tiles, int threads) {
  const Kind& kind = KINDS[number];
  const int64_t row_bytes = in_features / kind.block_size * kind.block_bytes, cells = in_features / COLUMNS;
  std::atomic<bool> finite{true};
  parallel(threads, (rows + LANES - 1) / LANES, [&](int64_t i) {
    const int64_t row = i * LANES, count = rows - row < LANES ? rows - row : LANES;
    if (!kind.pack(blocks + row * row_bytes, count, cells, tiles + i * kind.tile_bytes(cells))) finite = false;
  });
  return finite;
}

// Computes y [count, out_features] = x [count, in_features] times the matrix; both are bfloat16 or float32. With
// `quantize` x is quantised to 8-bit integers times scales of 32 columns. Returns false if out of memory.
bool hfs_multiply(int number, const uint8_t* tiles, int64_t in_features, int64_t out_features, const void* x,
                  int64_t count, void* y, bool is_bf16, bool quantize, int threads) {
  const Matrix w{number, in_features, out_features, tiles, nullptr};
  if (is_bf16) return multiply(w, (const uint16_t*)x, count, (uint16_t*)y, quantize, threads);
  return multiply(w, (const float*)x, count, (float*)y, quantize, threads);
}

// Writes the visible ranges of each query by a mask. A mask with fewer columns shows the first entries, or with
// `hides_first` hides them.
// Kinds: 0 bool, 1 float32, 2 bfloat16; in floats 0 shows an entry, and the lowest value or less hides it.
// Strides are in values. Returns the number of ranges; -1 for other values, -2 for more than `most` ranges.
int64_t hfs_ranges_of_mask(const void* mask, int kind, int64_t batch_stride, int64_t row_stride, int64_t batch_size,
                           int64_t num_queries, int64_t columns, int64_t num_keys, bool hides_first, int32_t* offsets,
                           int32_t* ranges, int64_t most) {
  int64_t count = 0;
  for (int64_t row = 0; row < batch_size * num_queries; row++) {
    const int64_t at = row / num_queries * batch_stride + row % num_queries * row_stride;
    const int64_t shift = num_keys - columns;
    bool is_visible = shift > 0 && !hides_first;
    offsets[row] = count;
    int32_t first = 0;
    for (int64_t i = 0; i <= columns; i++) {
      int shown = 0;  // 1: shown, 0: hidden, -1: neither
      if (i == columns) shown = 0;
      else if (kind == 0) shown = ((const uint8_t*)mask)[at + i] != 0;
      else if (kind == 1) shown = shows(((const float*)mask)[at + i]);
      else shown = shows(to_float(((const uint16_t*)mask)[at + i]));
      if (shown < 0) return -1;
      if (shown && !is_visible) first = i + shift;
      if (!shown && is_visible) {
        if (count == most) return -2;
        ranges[2 * count] = first, ranges[2 * count + 1] = i + shift;
        count++;
      }
      is_visible = shown;
    }
  }
  offsets[batch_size * num_queries] = count;
  return count;
}

// Runs decoder layers one after the other, on at most 128 rows. Returns false if out of memory.
bool hfs_layers(const Call* call) {
  return call->is_bf16 ? run_layers<uint16_t>(*call) : run_layers<float>(*call);
}

// Moves entries of all layers' caches, in every batch row and head: in ascending order, and only to the left.
void hfs_move(const Call* call, int64_t batch_size, const int64_t* sources, const int64_t* destinations, int64_t count) {
  const Layer& layer = *call->layers[0];
  const int64_t size = call->is_bf16 ? sizeof(uint16_t) : sizeof(float), bytes = layer.head_dim * size;
  for (int64_t number = 0; number < call->num_layers; number++)
    for (int64_t head = 0; head < batch_size * layer.kv_heads; head++) {
      const int64_t at = head / layer.kv_heads * call->batch_strides[number] + head % layer.kv_heads * call->head_strides[number];
      for (void* entries : {call->keys[number], call->values[number]})
        for (int64_t i = 0; i < count; i++)
          memmove((char*)entries + at * size + destinations[i] * bytes, (char*)entries + at * size + sources[i] * bytes, bytes);
    }
}

// Draws noise with a generator in this state, which advances.
void hfs_exponential(Twister* state, float* values, int64_t count) { draw_exponential(*state, values, count); }

// The column of the largest score.
int64_t hfs_argmax(const void* scores, int64_t count, bool is_bf16) {
  return is_bf16 ? argmax((const uint16_t*)scores, count) : argmax((const float*)scores, count);
}

// `most_probable` of every row; rows are `stride` scores apart.
void hfs_most_probable(const void* scores, int64_t rows, int64_t stride, int64_t count, bool is_bf16, int64_t most,
                       float* probs, int64_t* columns, int threads) {
  parallel(threads, rows, [&](int64_t row) {
    float* to = probs + row * most;
    int64_t* places = columns + row * most;
    if (is_bf16) most_probable((const uint16_t*)scores + row * stride, count, most, to, places);
    else most_probable((const float*)scores + row * stride, count, most, to, places);
  });
}

// A whole forward; see `StepRun::work`.
int hfs_step(Step* step) { return step->layers.is_bf16 ? StepRun<uint16_t>(*step).work() : StepRun<float>(*step).work(); }

// A delta net between its projections, see `Delta`. Returns false if out of memory.
bool hfs_delta(const Delta* delta) { return delta->is_bf16 ? DeltaRun<uint16_t>(*delta).work() : DeltaRun<float>(*delta).work(); }

// Attention by itself, see `AttentionCall`. Returns false if out of memory.
bool hfs_attend(const AttentionCall* call) { return call->is_bf16 ? attend_all<uint16_t>(*call) : attend_all<float>(*call); }

// A whole draft; see `DraftRun::work`.
int hfs_draft(Draft* draft) { return draft->layers.is_bf16 ? DraftRun<uint16_t>(*draft).work() : DraftRun<float>(*draft).work(); }

bool hfs_cut(const Growth* growth, int64_t most, int64_t* tokens, int64_t* parents, float* values) {
  return cut(*growth, most, tokens, parents, values);
}
}
