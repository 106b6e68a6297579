// Products with packed GGUF matrices on CPUs; compiled at first use and called by `native.py`.
//
//     y[m, n] = sum over the groups of row n of  scale * sum((code - bias) * x[m]) + offset * sum(x[m])
//
// A tile is 16 rows of a matrix, one a lane; a cell is 32 of its columns. A cell is decoded once, into the first-level
// cache, and multiplied with all rows of the input: as bfloat16, which holds the integers exactly, by AMX or vdpbf16ps,
// or as float32. Sums are float32. Neither the number of rows nor that of threads changes the bits of a row.
//
// A tile in memory: the low bits of the codes of all cells, their high bits, then scales and offsets. Codes lie in 32-bit
// lanes, those of even columns in the lower half of a lane and those of odd ones in the upper, ascending from bit 0.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(HFS_PORTABLE)
#include <immintrin.h>
#define HAS_BF16 1
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(HFS_NO_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#endif
#endif

// Of the OpenMP library that torch uses: its threads are ours.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

constexpr int LANES = 16, COLUMNS = 32, SUPER_CELLS = 8;
constexpr int CHUNK = 128;           // rows of the input at a time
constexpr int AHEAD = 12288;         // bytes of weights; the hardware itself does not look beyond a page
constexpr int CELL = COLUMNS * LANES;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <class V> V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V> void store(void* to, const V& v) { memcpy(to, &v, sizeof v); }
template <class V, class U> V reinterpret(const U& u) { return load<V>(&u); }

// Finite float16. Subnormals without arithmetic on them, which may be switched off.
Floats widen_halves(const uint8_t* from) {
  const Words halves = __builtin_convertvector(load<Halves>(from), Words), bits = (halves & 0x7fff) << 13;
  const Floats normal = reinterpret<Floats>(bits + (112u << 23));
  const Floats subnormal = reinterpret<Floats>(bits + (113u << 23)) - 0x1p-14f;
  const Floats value = (bits >> 23) == 0 ? subnormal : normal;
  return reinterpret<Floats>(reinterpret<Words>(value) | (halves & 0x8000) << 16);
}

// In two steps: GCC makes sixteen scalar ones of a single conversion.
Floats widen_bytes(const uint8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
}

// How a type lies in a tile. Codes of LOW + HIGH bits, the integer is code - BIAS; GROUP columns share scale and offset:
// float16 ones, or (SUPER) 8-bit ones times float16 ones of 256 columns.
template <int LOW_, int HIGH_, int GROUP_, bool SUPER_, bool OFFSET_, int BIAS_> struct Layout {
  static constexpr int LOW = LOW_, HIGH = HIGH_, GROUP = GROUP_, BIAS = BIAS_, BITS = LOW + HIGH;
  static constexpr bool SUPER = SUPER_, OFFSET = OFFSET_;
  static constexpr int GROUPS = COLUMNS / GROUP, KINDS = OFFSET ? 2 : 1, PER_HALF = 16 / LOW;
  static constexpr int64_t LOW_BYTES = 64 * LOW, HIGH_BYTES = 64 * HIGH;
  static constexpr int64_t CELL_FACTORS = KINDS * LANES * (SUPER ? GROUPS : 2);
  static constexpr int64_t SUPER_FACTORS = SUPER ? KINDS * LANES * 2 : 0;

  static int64_t high_at(int64_t cells) { return cells * LOW_BYTES; }
  static int64_t factors_at(int64_t cells) { return cells * (LOW_BYTES + HIGH_BYTES); }
  static int64_t super_at(int64_t cells) { return factors_at(cells) + cells * CELL_FACTORS; }
  static int64_t tile_bytes(int64_t cells) {
    return (super_at(cells) + cells / SUPER_CELLS * SUPER_FACTORS + 63) / 64 * 64;
  }

  // Scales and offsets of one cell after the other.
  struct Factors {
    Floats scales[GROUPS], offsets[GROUPS], super_scale = {}, super_offset = {};

    void read(const uint8_t* tile, int64_t cells, int64_t cell) {
      const uint8_t* at = tile + factors_at(cells) + cell * CELL_FACTORS;
      if constexpr (!SUPER) {
        scales[0] = widen_halves(at);
        if (OFFSET) offsets[0] = widen_halves(at + 2 * LANES);
        return;
      }
      if (cell % SUPER_CELLS == 0) {
        const uint8_t* super = tile + super_at(cells) + cell / SUPER_CELLS * SUPER_FACTORS;
        super_scale = widen_halves(super);
        if (OFFSET) super_offset = -widen_halves(super + 2 * LANES);
      }
      for (int g = 0; g < GROUPS; g++, at += KINDS * LANES) {
        scales[g] = super_scale * widen_bytes(at);
        if (OFFSET) offsets[g] = super_offset * widen_bytes(at + LANES);
      }
    }
  };

  // The integers of a cell as float32 [column, lane].
  static void decode(const uint8_t* tile, int64_t cells, int64_t cell, float* to) {
    const uint8_t *low = tile + cell * LOW_BYTES, *high = tile + high_at(cells) + cell * HIGH_BYTES;
#pragma GCC unroll 32
    for (int i = 0; i < COLUMNS; i++) {
      const int pair = i / 2, half = 16 * (i % 2);
      Words v = load<Words>(low + 64 * (pair / PER_HALF)) >> (half + LOW * (pair % PER_HALF)) & ((1u << LOW) - 1);
      if (HIGH) {
        const Words h = load<Words>(high + 64 * (pair * HIGH / 16)) >> (half + pair * HIGH % 16);
        v |= (h & ((1u << HIGH) - 1)) << LOW;
      }
      store(to + i * LANES, __builtin_convertvector(reinterpret<Ints>(v) - BIAS, Floats));
    }
  }

#if HAS_BF16
  // The same as bfloat16 [pair of columns, lane, 2].
  static void decode(const uint8_t* tile, int64_t cells, int64_t cell, uint16_t* to) {
    const uint8_t *low = tile + cell * LOW_BYTES, *high = tile + high_at(cells) + cell * HIGH_BYTES;
    alignas(64) uint16_t table[64];
    for (int i = 0; i < 64; i++) table[i] = reinterpret<uint32_t>(float((i & ((1 << BITS) - 1)) - BIAS)) >> 16;
    const __m512i first = load<__m512i>(table), second = load<__m512i>(table + 32);
#pragma GCC unroll 16
    for (int p = 0; p < COLUMNS / 2; p++) {
      if constexpr (LOW == 8) {  // eight bits on top of 24 zeros become a float whose lower half is zero
        const Words v = (load<Words>(low + 64 * (p / 2)) ^ 0x80808080u) << (p % 2 ? 0 : 8);
        const Floats even = __builtin_convertvector(reinterpret<Ints>(v << 16 & 0xff000000u), Floats) * 0x1p-24f;
        const Floats odd = __builtin_convertvector(reinterpret<Ints>(v & 0xff000000u), Floats) * 0x1p-24f;
        store(to + 32 * p, reinterpret<Words>(odd) | reinterpret<Words>(even) >> 16);
      } else {
        Shorts v = load<Shorts>(low + 64 * (p / PER_HALF)) >> uint16_t(LOW * (p % PER_HALF));
        if constexpr (HIGH > 0) {
          const int at = p * HIGH % 16;
          const Shorts h = load<Shorts>(high + 64 * (p * HIGH / 16));
          const Shorts moved = at > LOW ? h >> uint16_t(at > LOW ? at - LOW : 0) : h << uint16_t(at > LOW ? 0 : LOW - at);
          v = (v & uint16_t((1 << LOW) - 1)) | (moved & uint16_t(~((1 << LOW) - 1)));
        }
        // A lookup looks at 5 or 6 bits; the table repeats itself for those above a code.
        store(to + 32 * p, BITS > 5 ? _mm512_permutex2var_epi16(first, (__m512i)v, second)
                                    : _mm512_permutexvar_epi16((__m512i)v, first));
      }
    }
  }
#endif
};

// ---- types: what their blocks hold ----

int nibble(const uint8_t* q, int i, int n) { return q[i % n] >> 4 * (i / n) & 15; }
int two_bits(const uint8_t* q, int i) { return q[i % 32 + i / 128 * 32] >> 2 * (i / 32 % 4) & 3; }
int bit(const uint8_t* q, int i) { return q[i % 32] >> i / 32 & 1; }
int bit_in_order(const uint8_t* q, int i) { return q[i / 8] >> i % 8 & 1; }

// Scales and offsets of Q4_K and Q5_K.
int six_bits(const uint8_t* s, int g, bool offset) {
  if (g < 4) return s[g + 4 * offset] & 63;
  return (offset ? s[g + 4] >> 4 : s[g + 4] & 15) | (s[offset ? g : g - 4] >> 2 & 48);
}

// A block has SIZE weights in BYTES bytes, its float16 scale at D and offset at M; code(block, weight);
// factor(block, group, whether of the offset).
struct Q4_0 : Layout<4, 0, 32, false, false, 8> {
  static constexpr int SIZE = 32, BYTES = 18, D = 0, M = 0;
  static int code(const uint8_t* b, int i) { return nibble(b + 2, i, 16); }
};
struct Q4_1 : Layout<4, 0, 32, false, true, 0> {
  static constexpr int SIZE = 32, BYTES = 20, D = 0, M = 2;
  static int code(const uint8_t* b, int i) { return nibble(b + 4, i, 16); }
};
struct Q5_0 : Layout<4, 1, 32, false, false, 16> {
  static constexpr int SIZE = 32, BYTES = 22, D = 0, M = 0;
  static int code(const uint8_t* b, int i) { return nibble(b + 6, i, 16) | bit_in_order(b + 2, i) << 4; }
};
struct Q5_1 : Layout<4, 1, 32, false, true, 0> {
  static constexpr int SIZE = 32, BYTES = 24, D = 0, M = 2;
  static int code(const uint8_t* b, int i) { return nibble(b + 8, i, 16) | bit_in_order(b + 4, i) << 4; }
};
struct Q8_0 : Layout<8, 0, 32, false, false, 128> {
  static constexpr int SIZE = 32, BYTES = 34, D = 0, M = 0;
  static int code(const uint8_t* b, int i) { return b[2 + i] ^ 128; }
};
struct Q2_K : Layout<2, 0, 16, true, true, 0> {
  static constexpr int SIZE = 256, BYTES = 84, D = 80, M = 82;
  static int code(const uint8_t* b, int i) { return two_bits(b + 16, i); }
  static int factor(const uint8_t* b, int g, bool offset) { return offset ? b[g] >> 4 : b[g] & 15; }
};
struct Q3_K : Layout<2, 1, 16, true, false, 4> {
  static constexpr int SIZE = 256, BYTES = 110, D = 108, M = 0;
  static int code(const uint8_t* b, int i) { return two_bits(b + 32, i) | bit(b, i) << 2; }
  static int factor(const uint8_t* b, int g, bool) {
    return (nibble(b + 96, g, 8) | (b[104 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32;
  }
};
struct Q4_K : Layout<4, 0, 32, true, true, 0> {
  static constexpr int SIZE = 256, BYTES = 144, D = 0, M = 2;
  static int code(const uint8_t* b, int i) { return nibble(b + 16 + i / 64 * 32, i % 64, 32); }
  static int factor(const uint8_t* b, int g, bool offset) { return six_bits(b + 4, g, offset); }
};
struct Q5_K : Layout<4, 1, 32, true, true, 0> {
  static constexpr int SIZE = 256, BYTES = 176, D = 0, M = 2;
  static int code(const uint8_t* b, int i) { return nibble(b + 48 + i / 64 * 32, i % 64, 32) | bit(b + 16, i) << 4; }
  static int factor(const uint8_t* b, int g, bool offset) { return six_bits(b + 4, g, offset); }
};
struct Q6_K : Layout<4, 2, 16, true, false, 32> {
  static constexpr int SIZE = 256, BYTES = 210, D = 208, M = 0;
  static int code(const uint8_t* b, int i) { return nibble(b + i / 128 * 64, i % 128, 64) | two_bits(b + 128, i) << 4; }
  static int factor(const uint8_t* b, int g, bool) { return int8_t(b[192 + g]); }
};

void put(uint8_t* plane, int width, int column, int64_t lane, uint32_t value) {
  const int bits = column / 2 * width;
  uint8_t* at = plane + 64 * (bits / 16) + 4 * lane;
  store(at, load<uint32_t>(at) | value << (16 * (column % 2) + bits % 16));
}

// Up to 16 rows into a tile of zeros; false where a float16 is not finite.
template <class F> bool pack(const uint8_t* block, int64_t rows, int64_t cells, uint8_t* tile) {
  constexpr int CELLS = F::SIZE / COLUMNS;
  bool finite = true;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t first = 0; first < cells; first += CELLS, block += F::BYTES) {
      for (int i = 0; i < F::SIZE; i++) {
        const int64_t cell = first + i / COLUMNS;
        const int code = F::code(block, i);
        put(tile + cell * F::LOW_BYTES, F::LOW, i % COLUMNS, r, code & ((1 << F::LOW) - 1));
        if (F::HIGH) put(tile + F::high_at(cells) + cell * F::HIGH_BYTES, F::HIGH, i % COLUMNS, r, code >> F::LOW);
      }
      uint8_t* factors = tile + F::factors_at(cells) + first * F::CELL_FACTORS;
      uint8_t* halves = F::SUPER ? tile + F::super_at(cells) + first / SUPER_CELLS * F::SUPER_FACTORS : factors;
      for (int k = 0; k < F::KINDS; k++) {
        const uint16_t half = load<uint16_t>(block + (k ? F::M : F::D));
        finite &= (half & 0x7c00) != 0x7c00;
        store(halves + 2 * (k * LANES + r), half);
        if constexpr (F::SUPER)
          for (int g = 0; g < F::SIZE / F::GROUP; g++) factors[(g * F::KINDS + k) * LANES + r] = F::factor(block, g, k);
      }
    }
  return finite;
}

// ---- products ----

struct Product {
  const uint8_t* tiles;
  int64_t in_features, out_features;
  const void* x;
  int64_t count;
  void* y;
  bool amx;
  int threads;
};

// Rows of the input [cell, row, 32], and their sums over groups [cell, group, row].
template <class T> struct Inputs {
  T* values;
  float* sums;
  int64_t rows;

  T* at(int64_t cell, int64_t row) const { return values + (cell * rows + row) * COLUMNS; }
};

float to_float(float x) { return x; }
float to_float(uint16_t x) { return reinterpret<float>(uint32_t(x) << 16); }

template <class F, class T> void arrange(const T* x, int64_t stride, int64_t count, int64_t cell, Inputs<T> to) {
  for (int64_t m = 0; m < to.rows; m++) {
    T* row = to.at(cell, m);
    if (m < count) memcpy(row, x + m * stride + cell * COLUMNS, COLUMNS * sizeof(T));
    else memset(row, 0, COLUMNS * sizeof(T));
    for (int g = 0; F::OFFSET && g < F::GROUPS; g++) {
      float parts[8] = {}, sum = 0;
      for (int i = 0; i < F::GROUP; i++) parts[i % 8] += to_float(row[g * F::GROUP + i]);
      for (int i = 0; i < 8; i++) sum += parts[i];
      to.sums[(cell * F::GROUPS + g) * to.rows + m] = sum;
    }
  }
}

// To the products acc [lane] of a row: a group's share.
template <class F, class T>
void add(const typename F::Factors& factors, int g, const Floats& sum, Inputs<T> x, int64_t cell, int64_t m, float* acc) {
  Floats total = load<Floats>(acc + m * LANES) + factors.scales[g] * sum;
  if (F::OFFSET) total += factors.offsets[g] * x.sums[(cell * F::GROUPS + g) * x.rows + m];
  store(acc + m * LANES, total);
}

// A cell times ROWS rows from row m on, each its own chain of sums.
template <int ROWS, class F, class T>
void add_rows(const T* weights, const typename F::Factors& factors, Inputs<T> x, int64_t cell, int64_t m, float* acc) {
  constexpr int STEP = 4 / sizeof(T), STEPS = COLUMNS / STEP, GROUP_STEPS = F::GROUP / STEP;  // a step is 32 bits wide
  for (int g = 0; g < F::GROUPS; g++) {
    Floats sum[ROWS] = {};
#pragma GCC unroll 4
    for (int i = g * GROUP_STEPS; i < (g + 1) * GROUP_STEPS; i++) {
      const Floats w = load<Floats>(weights + i * STEP * LANES);
      for (int r = 0; r < ROWS; r++) {
        const T* in = x.at(cell, m) + (r * STEPS + i) * STEP;
#if HAS_BF16
        if constexpr (STEP == 2)
          sum[r] = (Floats)_mm512_dpbf16_ps((__m512)sum[r], (__m512bh)w, (__m512bh)_mm512_set1_epi32(load<int>(in)));
        else
#endif
          sum[r] += w * to_float(*in);
      }
    }
    for (int r = 0; r < ROWS; r++) add<F>(factors, g, sum[r], x, cell, m + r, acc);
  }
}

// A tile times all rows.
template <class F, class T> void multiply_tile(const uint8_t* tile, int64_t cells, Inputs<T> x, float* acc) {
  alignas(64) T weights[CELL];
  typename F::Factors factors;
  const int64_t tile_bytes = F::tile_bytes(cells);
  for (int64_t cell = 0; cell < cells; cell++) {
    for (int64_t b = cell * tile_bytes / cells / 64; b < (cell + 1) * tile_bytes / cells / 64; b++)
      __builtin_prefetch(tile + b * 64 + AHEAD, 0, 2);
    F::decode(tile, cells, cell, weights);
    factors.read(tile, cells, cell);
    int64_t m = 0;
    for (; m + 8 <= x.rows; m += 8) add_rows<8, F>(weights, factors, x, cell, m, acc);
    for (; m + 4 <= x.rows; m += 4) add_rows<4, F>(weights, factors, x, cell, m, acc);
    for (; m + 2 <= x.rows; m += 2) add_rows<2, F>(weights, factors, x, cell, m, acc);
    for (; m < x.rows; m++) add_rows<1, F>(weights, factors, x, cell, m, acc);
  }
}

#if HAS_AMX
// The kernel gives a process leave to use tiles; oneDNN may have asked already.
bool may_use_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Registers 0, 1: sums [row, lane]; 2, 3: inputs [row, a group]; 4, 5: weights [pair of columns, lane, 2].
void configure(int rows, int group) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 6; i++) {
    config.row_bytes[i] = i / 2 == 1 ? 2 * group : 64;
    config.rows[i] = i < 4 ? rows : group / 2;
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 sees that 8 bytes of it are read, and drops the others
  _tile_loadconfig(&config);
}

// Sums over the groups of a cell [group, row, lane], `block` rows at a time.
template <class F> void cell_sums(const uint16_t* weights, Inputs<uint16_t> x, int64_t cell, int block, float* sums) {
  _tile_loadd(4, weights, 64);
  if (F::GROUPS == 2) _tile_loadd(5, weights + F::GROUP * LANES, 64);
  for (int64_t m = 0; m < x.rows; m += block) {
    _tile_zero(0);
    _tile_loadd(2, x.at(cell, m), 64);
    _tile_dpbf16ps(0, 2, 4);
    _tile_stored(0, sums + m * LANES, 64);
    if (F::GROUPS == 1) continue;
    _tile_zero(1);
    _tile_loadd(3, x.at(cell, m) + F::GROUP, 64);
    _tile_dpbf16ps(1, 3, 5);
    _tile_stored(1, sums + (x.rows + m) * LANES, 64);
  }
}

// As `multiply_tile`. Three cells are under way at a time, so that nothing is loaded right after it was stored.
template <class F> void multiply_tile_amx(const uint8_t* tile, int64_t cells, Inputs<uint16_t> x, int block, float* acc) {
  alignas(64) uint16_t weights[2][CELL];
  alignas(64) float sums[2][F::GROUPS * CHUNK * LANES];
  typename F::Factors factors;
  const int64_t tile_bytes = F::tile_bytes(cells);
  for (int64_t cell = 0; cell < cells + 2; cell++) {
    if (cell < cells) {
      for (int64_t b = cell * tile_bytes / cells / 64; b < (cell + 1) * tile_bytes / cells / 64; b++)
        __builtin_prefetch(tile + b * 64 + AHEAD, 0, 2);
      F::decode(tile, cells, cell, weights[cell % 2]);
    }
    if (cell >= 1 && cell <= cells) cell_sums<F>(weights[(cell - 1) % 2], x, cell - 1, block, sums[(cell - 1) % 2]);
    if (cell < 2) continue;
    factors.read(tile, cells, cell - 2);
    for (int g = 0; g < F::GROUPS; g++)
      for (int64_t m = 0; m < x.rows; m++)
        add<F>(factors, g, load<Floats>(sums[cell % 2] + (g * x.rows + m) * LANES), x, cell - 2, m, acc);
  }
}
#endif

// body(begin, end) over 0 .. count, some at a time, by torch's threads.
template <class Body> void parallel(int threads, int64_t count, const Body& body) {
  struct Job {
    const Body& body;
    const int64_t count, step;
    std::atomic<int64_t> next;
  } job{body, count, count / (8 * threads) + 1, {0}};
  auto work = [](void* data) {
    Job& job = *(Job*)data;
    for (int64_t i; (i = job.next.fetch_add(job.step)) < job.count;)
      job.body(i, i + job.step < job.count ? i + job.step : job.count);
  };
  if (threads > 1 && count > 1 && GOMP_parallel) GOMP_parallel(work, &job, threads, 0);
  else work(&job);
}

void write(float* to, const Floats& v, int64_t lanes) { memcpy(to, &v, lanes * sizeof(float)); }
#if HAS_BF16
void write(uint16_t* to, const Floats& v, int64_t lanes) {
  const auto rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(to, &rounded, lanes * sizeof(uint16_t));
}
#endif

template <class F, class T> void multiply_rows(const Product& p, Inputs<T> in, int64_t count, T* y) {
  const int64_t cells = p.in_features / COLUMNS, tile_bytes = F::tile_bytes(cells);
  parallel(p.threads, (p.out_features + LANES - 1) / LANES, [&](int64_t i, int64_t end) {
    alignas(64) float acc[CHUNK * LANES];
#if HAS_AMX
    const int block = in.rows < LANES ? in.rows : LANES;
    if (p.amx) configure(block, F::GROUP);
#endif
    for (; i < end; i++) {
      memset(acc, 0, in.rows * LANES * sizeof(float));
#if HAS_AMX
      if constexpr (sizeof(T) == 2)
        if (p.amx) multiply_tile_amx<F>(p.tiles + i * tile_bytes, cells, in, block, acc);
#endif
      if (!p.amx) multiply_tile<F>(p.tiles + i * tile_bytes, cells, in, acc);
      const int64_t n = i * LANES, lanes = p.out_features - n < LANES ? p.out_features - n : LANES;
      for (int64_t m = 0; m < count; m++) write(y + m * p.out_features + n, load<Floats>(acc + m * LANES), lanes);
    }
#if HAS_AMX
    if (p.amx) _tile_release();
#endif
  });
}

template <class F, class T> bool multiply(const Product& p) {
  if (!p.count) return true;
  const int64_t cells = p.in_features / COLUMNS, most = p.count < CHUNK ? (p.count + LANES - 1) / LANES * LANES : CHUNK;
  const int64_t value_bytes = most * p.in_features * sizeof(T), sum_bytes = cells * F::GROUPS * most * sizeof(float);
  uint8_t* memory = (uint8_t*)aligned_alloc(64, value_bytes + sum_bytes);
  if (!memory) return false;
  for (int64_t m = 0; m < p.count; m += CHUNK) {
    const int64_t count = p.count - m < CHUNK ? p.count - m : CHUNK;
    const int64_t rows = p.amx && count > LANES ? (count + LANES - 1) / LANES * LANES : count;
    const Inputs<T> in{(T*)memory, (float*)(memory + value_bytes), rows};
    const T* x = (const T*)p.x + m * p.in_features;
    parallel(count > 4 ? p.threads : 1, cells, [&](int64_t i, int64_t end) {
      for (; i < end; i++) arrange<F>(x, p.in_features, count, i, in);
    });
    multiply_rows<F, T>(p, in, count, (T*)p.y + m * p.out_features);
  }
  free(memory);
  return true;
}

struct Kind {
  const char* name;
  int64_t block_size, block_bytes;
  int64_t (*tile_bytes)(int64_t cells);
  bool (*pack)(const uint8_t* blocks, int64_t rows, int64_t cells, uint8_t* tile);
  bool (*multiply)(const Product&);
  bool (*multiply_bf16)(const Product&);
};

template <class F> constexpr Kind kind(const char* name) {
#if HAS_BF16
  return {name, F::SIZE, F::BYTES, F::tile_bytes, pack<F>, multiply<F, float>, multiply<F, uint16_t>};
#else
  return {name, F::SIZE, F::BYTES, F::tile_bytes, pack<F>, multiply<F, float>, nullptr};
#endif
}

const Kind KINDS[] = {kind<Q4_0>("Q4_0"), kind<Q4_1>("Q4_1"), kind<Q5_0>("Q5_0"), kind<Q5_1>("Q5_1"),
                      kind<Q8_0>("Q8_0"), kind<Q2_K>("Q2_K"), kind<Q3_K>("Q3_K"), kind<Q4_K>("Q4_K"),
                      kind<Q5_K>("Q5_K"), kind<Q6_K>("Q6_K")};

}  // namespace

extern "C" {

// The number of a type; -1: unknown.
int hfs_kind(const char* name) {
  for (unsigned i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
    if (!strcmp(KINDS[i].name, name)) return i;
  return -1;
}

bool hfs_has_threads() { return GOMP_parallel; }

// What multiplies bfloat16: 0 nothing (convert to float32), 1 vdpbf16ps, 2 AMX.
int hfs_bf16() {
#if HAS_AMX
  if (may_use_amx()) return 2;
#endif
#if HAS_BF16
  return 1;
#else
  return 0;
#endif
}

int64_t hfs_tile_bytes(int number, int64_t in_features) { return KINDS[number].tile_bytes(in_features / COLUMNS); }

// Rows of blocks into tiles that are zero; false where a scale or an offset is not finite.
bool hfs_pack(int number, const uint8_t* blocks, int64_t rows, int64_t in_features, uint8_t* tiles, int threads) {
  const Kind& kind = KINDS[number];
  const int64_t row_bytes = in_features / kind.block_size * kind.block_bytes, cells = in_features / COLUMNS;
  std::atomic<bool> finite{true};
  parallel(threads, (rows + LANES - 1) / LANES, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t row = i * LANES, count = rows - row < LANES ? rows - row : LANES;
      if (!kind.pack(blocks + row * row_bytes, count, cells, tiles + i * kind.tile_bytes(cells))) finite = false;
    }
  });
  return finite;
}

// y [count, out_features] = x [count, in_features] times the matrix; both are float32, or bfloat16 where `bf16` is
// what hfs_bf16 said. False: out of memory.
bool hfs_multiply(int number, const uint8_t* tiles, int64_t in_features, int64_t out_features, const void* x,
                  int64_t count, void* y, int bf16, int threads) {
  const Product product{tiles, in_features, out_features, x, count, y, bf16 == 2, threads};
  return (bf16 ? KINDS[number].multiply_bf16 : KINDS[number].multiply)(product);
}
}
