// Prints a line for each part of the kernel with a hash of the bits that it computes. Two machines whose kernels agree
// print the same lines. A line "rows of ... differ" says that a row's bits depend on the number of rows.
//
// It is compiled in place of kernel.cpp. There is no torch, so one thread does all work.
#include "kernel.cpp"

#include <cstdio>
#include <string>
#include <vector>

namespace {

uint32_t random_state = 1;
uint32_t draw() { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }
float draw_float() { return (int(draw() % 2001) - 1000) * 0.001f; }

uint16_t to_bf16(float value) {
  uint16_t lanes[LANES];
  narrow(lanes, Floats{} + value);
  return lanes[0];
}
void put(float& to, float value) { to = value; }
void put(uint16_t& to, float value) { to = to_bf16(value); }

// The bits of some values. All NaN count as one: their bits differ between CPUs, and nothing depends on these.
struct Hash {
  uint64_t bits = 1469598103934665603ull;

  void add(uint32_t value) { bits = (bits ^ value) * 1099511628211ull; }
  void add(float value) { add(value != value ? 0x7fc00000u : reinterpret<uint32_t>(value)); }
  void add(uint16_t value) { add(to_float(value)); }
  template <class T> void add(const std::vector<T>& values) {
    for (const T& value : values) add(value);
  }
  void print(const std::string& part) const { printf("%s %016llx\n", part.c_str(), (unsigned long long)bits); }
};

// Memory whose address is a multiple of 64.
struct Buffer {
  uint8_t* at;
  explicit Buffer(int64_t bytes) : at((uint8_t*)aligned_alloc(64, (bytes + 127) / 64 * 64)) { memset(at, 0, bytes); }
};

template <class T> std::vector<T> draw_values(int64_t count, float factor = 1, float shift = 0) {
  std::vector<T> values(count);
  for (T& value : values) put(value, draw_float() * factor + shift);
  return values;
}

// Rows among which are zeros, NaN, infinities, subnormal numbers, and very large ones.
template <class T> std::vector<T> draw_rows(int64_t rows, int64_t columns) {
  const float factors[] = {1, 100, 1e-3f, 0, 1, 1, 1, 1e-39f, 1e20f, 3e-33f, 1};
  std::vector<T> values(rows * columns);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < columns; i++) put(values[row * columns + i], draw_float() * factors[row % 11]);
    T& spoilt = values[row * columns + draw() % columns];
    if (row % 11 == 5) put(spoilt, __builtin_nanf(""));
    if (row % 11 == 6) put(spoilt, draw() % 2 ? __builtin_inff() : -__builtin_inff());
  }
  return values;
}

// Random blocks whose scales and offsets are finite float16, some of them subnormal.
std::vector<uint8_t> draw_blocks(const Kind& kind, int64_t rows, int64_t columns) {
  const std::string name = kind.name;
  std::vector<int> halves = {0};
  if (name == "Q2_K") halves = {80, 82};
  else if (name == "Q3_K") halves = {108};
  else if (name == "Q6_K") halves = {208};
  else if (name == "Q4_1" || name == "Q5_1" || name == "Q4_K" || name == "Q5_K") halves = {0, 2};
  std::vector<uint8_t> blocks(rows * columns / kind.block_size * kind.block_bytes);
  for (uint8_t& byte : blocks) byte = draw();
  for (size_t i = 0; i < blocks.size(); i += kind.block_bytes)
    for (int at : halves) {
      uint8_t& byte = blocks[i + at + 1];
      byte = (byte & 0x83) | (draw() % 50 ? 0x18 : 0);
    }
  return blocks;
}

Matrix draw_matrix(const char* type, int64_t rows, int64_t columns) {
  const int number = hfs_kind(type);
  const int64_t bytes = (rows + LANES - 1) / LANES * hfs_tile_bytes(number, columns);
  uint8_t* tiles = Buffer(bytes + 16384).at;  // with what is prefetched
  if (!hfs_pack(number, draw_blocks(KINDS[number], rows, columns).data(), rows, columns, tiles, 1)) abort();
  return {number, columns, rows, tiles, nullptr};
}

template <class T> void multiply_all(bool quantize) {
  constexpr int64_t COLUMNS_IN = 512, OUT = 40, MOST = 33;
  for (int number = 0; number < KINDS.size(); number++) {
    const Kind& kind = KINDS[number];
    if (kind.is_dense() && (quantize || !(sizeof(T) == 4 ? kind.tiles_of(float()) != nullptr : kind.tiles_of(uint16_t()) != nullptr))) continue;
    random_state = 7;
    Matrix w;
    std::vector<T> dense = draw_values<T>(OUT * COLUMNS_IN);
    if (kind.is_dense()) w = {hfs_kind(kind.name), COLUMNS_IN, OUT, (const uint8_t*)dense.data(), nullptr};
    else w = draw_matrix(kind.name, OUT, COLUMNS_IN);
    const std::vector<T> x = draw_rows<T>(MOST, COLUMNS_IN);
    std::vector<T> alone(MOST * OUT);
    for (int64_t m = 0; m < MOST; m++) multiply(w, x.data() + m * COLUMNS_IN, 1, alone.data() + m * OUT, quantize, 1);
    Hash hash;
    hash.add(alone);
    for (int64_t rows : {2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 24, 31, 32, 33}) {
      std::vector<T> y(rows * OUT);
      multiply(w, x.data(), rows, y.data(), quantize, 1);
      Hash together, single;
      together.add(y), single.add(std::vector<T>(alone.begin(), alone.begin() + rows * OUT));
      if (together.bits != single.bits) printf("%s: rows of %d differ from single ones\n", kind.name, (int)rows);
    }
    hash.print(std::string("products ") + kind.name + (sizeof(T) == 4 ? " float32" : " bfloat16") + (quantize ? " quantised" : ""));
  }
}

template <class T> void quantize_all(const char* type) {
  Hash hash;
  const std::vector<T> rows = draw_rows<T>(110, COLUMNS);
  for (int64_t m = 0; m < 110; m++) {
    QuantizedCell cell;
    quantize_cell(rows.data() + m * COLUMNS, cell);
    for (int8_t value : cell.values) hash.add(uint32_t(value));
    hash.add(cell.scale);
    for (float sum : cell.sums) hash.add(sum);
  }
  hash.print(std::string("quantised ") + type);
}

// Conversions, exp, sums, transposition.
void convert_all() {
  Hash halves, bytes, exps, narrowed, sums, turned;
  for (int i = 0; i < 65536; i += LANES) {
    if ((i & 0x7c00) == 0x7c00) continue;
    uint16_t values[LANES];
    for (int k = 0; k < LANES; k++) values[k] = i + k;
    const Floats wide = widen_halves((const uint8_t*)values);
    for (int k = 0; k < LANES; k++) halves.add(float(wide[k]));
  }
  for (int i = 0; i < 256; i += LANES) {
    uint8_t values[LANES];
    for (int k = 0; k < LANES; k++) values[k] = i + k;
    const Floats wide = widen_bytes(values);
    for (int k = 0; k < LANES; k++) bytes.add(float(wide[k]));
  }
  for (int i = 0; i < 20000; i++) {
    float values[LANES];
    for (float& value : values) value = (int(draw() % 220000) - 110000) * 0.001f;
    if (i % 100 == 0) values[i / 100 % LANES] = i % 300 ? __builtin_inff() : __builtin_nanf("");
    const Floats v = load<Floats>(values), e = exponential(v);
    for (int k = 0; k < LANES; k++) exps.add(float(e[k]));
    sums.add(sum_of(v));
    uint32_t bits[LANES];
    for (uint32_t& word : bits) word = draw() << 16 ^ draw();
    uint16_t to[LANES];
    narrow(to, load<Floats>(bits));
    for (uint16_t value : to) narrowed.add(value);
  }
  Words v[LANES];
  uint32_t numbers[LANES * LANES];
  for (int i = 0; i < LANES * LANES; i++) numbers[i] = i;
  for (int row = 0; row < LANES; row++) v[row] = load<Words>(numbers + row * LANES);
  transpose(v);
  for (const Words& row : v)
    for (int lane = 0; lane < LANES; lane++) turned.add(uint32_t(row[lane]));
  halves.print("float16"), bytes.print("bytes"), exps.print("exp"), narrowed.print("bfloat16"), sums.print("sums"), turned.print("transposed");
}

// Visible ranges of a tree: some first entries, then some of the last.
void draw_ranges(int64_t rows, int64_t keys, std::vector<int32_t>& offsets, std::vector<int32_t>& ranges) {
  offsets = {0}, ranges = {};
  for (int64_t row = 0; row < rows; row++) {
    int32_t at = 0;
    while (at < keys) {
      const int32_t first = at + (at ? 1 + draw() % 3 : 0), end = first + 1 + draw() % (at ? 3 : keys);
      if (end > keys) break;
      ranges.push_back(first), ranges.push_back(end), at = end;
    }
    if (!at) ranges.push_back(0), ranges.push_back(1);
    offsets.push_back(ranges.size() / 2);
  }
}

template <class T> void attend_everywhere(const char* type) {
  for (int64_t head_dim : {32, 64, 96, 128}) {
    Hash hash;
    for (int64_t queries = 1; queries < 8; queries++) {
      const int64_t keys = 40 + queries * 7, heads = 6, kv_heads = 2;
      const std::vector<T> q = draw_values<T>(queries * heads * head_dim), k = draw_values<T>((kv_heads * keys + 64) * head_dim),
                           v = draw_values<T>((kv_heads * keys + 64) * head_dim);
      std::vector<int32_t> offsets, ranges;
      draw_ranges(queries, keys, offsets, ranges);
      Buffer y(queries * heads * head_dim * sizeof(T));
      AttentionCall call{q.data(), k.data(), v.data(), y.at, offsets.data(), ranges.data(), kv_heads * keys * head_dim,
                         keys * head_dim, 1, queries, keys, heads, kv_heads, head_dim, sizeof(T) == 2, 1, 0.125};
      if (queries % 2) call.offsets = call.ranges = nullptr;
      hfs_attend(&call);
      for (int64_t i = 0; i < queries * heads * head_dim; i++) hash.add(((T*)y.at)[i]);
    }
    hash.print(std::string("attention ") + type + " " + std::to_string(head_dim));
  }
}

// A small model, and random requests: a prompt, then drafts in a chain or a tree.
template <class T> struct Model {
  static constexpr int64_t HIDDEN = 256, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, INNER = 512, VOCAB = 100, MOST = 96, LAYERS = 2;
  std::vector<T> norms = draw_values<T>(8 * HIDDEN, 0.2f, 1), angles = draw_values<T>(2 * MOST * HEAD_DIM);
  std::vector<uint8_t> embedded;
  Layer layers[LAYERS];
  Matrix embeddings, output;

  explicit Model(const char* const types[7]) {
    for (int64_t i = 0; i < LAYERS; i++) {
      Layer& l = layers[i];
      l = {HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER};
      l.k_at = HEADS * HEAD_DIM, l.v_at = l.k_at + KV_HEADS * HEAD_DIM, l.up_at = INNER, l.eps = 1e-6, l.scale = 0.125;
      l.attention_norm = norms.data() + i * HIDDEN, l.mlp_norm = norms.data() + (2 + i) * HIDDEN;
      if (i) l.q_norm = norms.data() + 4 * HIDDEN, l.k_norm = norms.data() + 5 * HIDDEN, l.gelu = 1;
      l.qkv[0] = draw_matrix(types[0], HEADS * HEAD_DIM, HIDDEN), l.qkv[1] = draw_matrix(types[1], KV_HEADS * HEAD_DIM, HIDDEN);
      l.qkv[2] = draw_matrix(types[2], KV_HEADS * HEAD_DIM, HIDDEN), l.output[0] = draw_matrix(types[3], HIDDEN, HEADS * HEAD_DIM);
      l.gate_up[0] = draw_matrix(types[4], 2 * INNER, HIDDEN), l.down[0] = draw_matrix(types[5], HIDDEN, INNER);
    }
    embedded = draw_blocks(KINDS[hfs_kind(types[6])], VOCAB, HIDDEN);
    embeddings = {hfs_kind(types[6]), HIDDEN, VOCAB, embedded.data(), nullptr};
    output = draw_matrix(types[6], VOCAB, HIDDEN);
  }

  void forward(Hash& hash, int64_t cached, int64_t rows, bool is_tree, bool quantize, Buffer* caches) {
    const Layer* addresses[LAYERS];
    void *keys[LAYERS], *values[LAYERS];
    int64_t strides[LAYERS], head_strides[LAYERS];
    for (int64_t i = 0; i < LAYERS; i++) {
      addresses[i] = &layers[i], keys[i] = caches[2 * i].at, values[i] = caches[2 * i + 1].at;
      strides[i] = KV_HEADS * MOST * HEAD_DIM, head_strides[i] = MOST * HEAD_DIM;
    }
    Buffer x(rows * HIDDEN * sizeof(T)), y(LAYERS * rows * HIDDEN * sizeof(T)), normed(rows * HIDDEN * sizeof(T));
    std::vector<T> logits(rows * VOCAB);
    std::vector<int64_t> tokens, positions;
    for (int64_t i = 0; i < rows; i++) tokens.push_back(draw() % VOCAB), positions.push_back(cached + i);
    std::vector<int32_t> offsets, ranges;
    draw_ranges(rows, cached + rows, offsets, ranges);
    Step step{};
    Call& call = step.layers;
    call.x = x.at, call.y = y.at, call.num_layers = LAYERS, call.layers = addresses, call.batch_size = 1;
    call.num_queries = rows, call.num_keys = cached + rows, call.keys = keys, call.values = values;
    call.batch_strides = strides, call.head_strides = head_strides, call.is_bf16 = sizeof(T) == 2, call.quantize = quantize;
    call.threads = 1;
    if (is_tree) call.offsets[0] = offsets.data(), call.ranges[0] = ranges.data();
    step.embeddings = embeddings, step.embedding_scale = 1, step.tokens = tokens.data(), step.positions = positions.data();
    step.cos[0] = angles.data(), step.sin[0] = angles.data() + MOST * HEAD_DIM, step.num_positions = MOST;
    step.norm = norms.data() + 6 * HIDDEN, step.eps = 1e-6, step.normed = normed.at, step.output = output;
    step.num_scored = rows, step.logits = logits.data();
    if (hfs_step(&step) != 1) abort();
    hash.add(logits);
  }
};

template <class T> void generate(const char* name, const char* const types[7], bool quantize) {
  random_state = 11;
  Model<T> model(types);
  Hash hash;
  for (int request = 0; request < 10; request++) {
    std::vector<Buffer> caches;
    for (int i = 0; i < 2 * model.LAYERS; i++) caches.emplace_back(2 * model.KV_HEADS * model.MOST * model.HEAD_DIM * sizeof(T));
    int64_t cached = 1 + draw() % 30;
    model.forward(hash, 0, cached, false, quantize, caches.data());
    for (int round = 0; round < 4; round++) {
      const int64_t rows = 1 + draw() % 12;
      model.forward(hash, cached, rows, round % 2, quantize, caches.data());
      cached += rows;
    }
  }
  hash.print(std::string("requests ") + name + (sizeof(T) == 4 ? " float32" : " bfloat16") + (quantize ? " quantised" : ""));
}

void choose_all() {
  Hash hash;
  const std::vector<float> scores = draw_values<float>(4 * 1000, 10);
  std::vector<float> probs(4 * 20);
  std::vector<int64_t> columns(4 * 20);
  hfs_most_probable(scores.data(), 4, 1000, 1000, false, 20, probs.data(), columns.data(), 1);
  hash.add(probs);
  for (int64_t column : columns) hash.add(uint32_t(column));
  hash.add(uint32_t(hfs_argmax(scores.data(), 4000, false)));
  hash.print("choice");
}

}  // namespace

int main() {
  const char *const small[7] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q5_0"};
  const char *const large[7] = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q6_K"};
  for (bool quantize : {true, false}) {
    multiply_all<float>(quantize), multiply_all<uint16_t>(quantize);
    for (auto types : {small, large}) {
      const char* name = types == small ? "small blocks" : "super blocks";
      generate<float>(name, types, quantize), generate<uint16_t>(name, types, quantize);
    }
  }
  quantize_all<float>("float32"), quantize_all<uint16_t>("bfloat16");
  convert_all();
  attend_everywhere<float>("float32"), attend_everywhere<uint16_t>("bfloat16");
  choose_all();
}
