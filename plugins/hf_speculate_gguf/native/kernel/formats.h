// The contents of GGUF's blocks, and their layout in memory.
#pragma once

#include "vectors.h"

namespace {

// Widens finite float16. Subnormals need no arithmetic on subnormals, which may be switched off.
INLINE Floats widen_halves(const uint8_t* from) {
#if HAS_AVX512
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif HAS_AVX2
  return by_part([&](int i) { return (WideFloats)_mm256_cvtph_ps(load<__m128i>(from + 2 * WIDE * i)); });
#elif HAS_NEON
  return by_part([&](int i) { return (WideFloats)vcvt_f32_f16((float16x4_t)vld1_u16((const uint16_t*)from + WIDE * i)); });
#else
  return by_part([&](int i) {
    const WideWords halves = __builtin_convertvector(load<WideHalves>(from + 2 * WIDE * i), WideWords);
    const WideWords bits = (halves & 0x7fff) << 13;
    const WideFloats normal = reinterpret<WideFloats>(bits + (112u << 23));
    const WideFloats subnormal = reinterpret<WideFloats>(bits + (113u << 23)) - 0x1p-14f;
    const WideFloats value = (bits >> 23) == 0 ? subnormal : normal;
    return reinterpret<WideFloats>(reinterpret<WideWords>(value) | (halves & 0x8000) << 16);
  });
#endif
}

INLINE Floats widen_bytes(const uint8_t* from) {
#if HAS_AVX512
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif HAS_AVX2
  return by_part([&](int i) {
    return (WideFloats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + WIDE * i))));
  });
#elif HAS_NEON
  const int16x8_t halves[2] = {vmovl_s8(vld1_s8((const int8_t*)from)), vmovl_s8(vld1_s8((const int8_t*)from + 8))};
  return by_part([&](int i) {
    return (WideFloats)vcvtq_f32_s32(i % 2 ? vmovl_high_s16(halves[i / 2]) : vmovl_s16(vget_low_s16(halves[i / 2])));
  });
#else
  return by_part([&](int i) {
    return __builtin_convertvector(__builtin_convertvector(load<WideBytes>(from + WIDE * i), WideInts), WideFloats);
  });
#endif
}

// The order of a cell's columns: four in each lane of 32 bits, one in each byte. Even columns are in the lower half,
// odd ones in the upper half. So a shift gives a pair of columns for bfloat16 products, and a mask gives four for byte
// products.
constexpr int QUADS = COLUMNS / 4;
constexpr int quad_of(int column) { return column / 8 * 2 + column / 2 % 2; }
constexpr int byte_of(int column) { return column % 2 * 2 + column / 4 % 2; }

// The integers of IQ4_NL and IQ4_XS, plus 128.
alignas(16) constexpr uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The table entry for each byte, which must be less than 16.
template <class V> INLINE V look_up(const V& codes) {
#if HAS_AVX512
  return (V)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(TABLE)), (__m512i)codes);
#elif HAS_AVX2
  return (V)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(TABLE)), (__m256i)codes);
#elif HAS_NEON
  return (V)vqtbl1q_u8(vld1q_u8(TABLE), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof(V)];
  store(bytes, codes);
  for (uint8_t& byte : bytes) byte = TABLE[byte];
  return load<V>(bytes);
#endif
}
template <class V> INLINE Sixteen<V> look_up(const Sixteen<V>& codes) {
  return by_part([&](int i) { return look_up(codes.parts[i]); });
}

// The layout of a type in a tile of 16 matrix rows, one in each lane; a cell is 32 of its columns. Memory holds the low
// bits of all codes, then their high bits, then scales and offsets. Bits are stored quad after quad, ascending from bit
// 0 of each byte.
//
// A code has LOW + HIGH bits. The integer is code - BIAS, or an entry of TABLE. GROUP columns share scale and offset.
// These are float16, or with SUPER 8-bit factors times float16 factors of 256 columns.
template <int LOW_, int HIGH_, int GROUP_, bool SUPER_, bool OFFSET_, int BIAS_, bool LOOKS_UP_ = false> struct Layout {
  static constexpr int LOW = LOW_, HIGH = HIGH_, GROUP = GROUP_, BIAS = BIAS_, BITS = LOW + HIGH;
  static constexpr uint32_t LOW_MASK = (1 << LOW) - 1, HIGH_MASK = ((1 << HIGH) - 1) << LOW;
  static constexpr bool SUPER = SUPER_, OFFSET = OFFSET_, LOOKS_UP = LOOKS_UP_;
  static constexpr int CODE_BITS = LOOKS_UP ? 8 : BITS;  // bits after a lookup
  static constexpr int GROUPS = COLUMNS / GROUP, KINDS = OFFSET ? 2 : 1;
  static constexpr int64_t LOW_BYTES = 64 * LOW, HIGH_BYTES = 64 * HIGH;
  static constexpr int64_t CELL_FACTORS = KINDS * LANES * (SUPER ? GROUPS : 2);
  static constexpr int64_t SUPER_FACTORS = SUPER ? KINDS * LANES * 2 : 0;

  static int64_t high_at(int64_t cells) { return cells * LOW_BYTES; }
  static int64_t factors_at(int64_t cells) { return cells * (LOW_BYTES + HIGH_BYTES); }
  static int64_t super_at(int64_t cells) { return factors_at(cells) + cells * CELL_FACTORS; }
  static int64_t tile_bytes(int64_t cells) {
    return (super_at(cells) + cells / SUPER_CELLS * SUPER_FACTORS + 63) / 64 * 64;
  }

  // Scales and offsets, read cell by cell.
  struct Factors {
    Floats scales[GROUPS], offsets[GROUPS], super_scale = {}, super_offset = {};

    INLINE void read(const uint8_t* tile, int64_t cells, int64_t cell) {
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

  // The integers of a cell: one column at a time for float32 products, [lane, 2] for bfloat16. For byte products, the
  // codes of four columns.
  struct Codes {
    const uint8_t *low, *high;
#if HAS_BF16
    __m512i first, second;
#endif

    INLINE Codes() {
#if HAS_BF16
      alignas(64) uint16_t table[64];
      for (int i = 0; i < 64; i++) {
        const int code = i & ((1 << BITS) - 1);
        table[i] = reinterpret<uint32_t>(float((LOOKS_UP ? TABLE[code & 15] : code) - BIAS)) >> 16;
      }
      first = load<__m512i>(table), second = load<__m512i>(table + 32);
#endif
    }

    INLINE void go_to(const uint8_t* tile, int64_t cells, int64_t cell) {
      low = tile + cell * LOW_BYTES, high = tile + high_at(cells) + cell * HIGH_BYTES;
    }

    // The codes of a quad for the lanes of vector number `part` of type V.
    template <class V> INLINE V quad(int i, int part) const {
      const V found = joined(load<V>(word(low, LOW, i) + part * sizeof(V)), i * LOW % 8,
                             HIGH ? load<V>(word(high, HIGH, i) + part * sizeof(V)) : V{}, i * HIGH % 8, 0x01010101);
      return LOOKS_UP ? look_up(found) : found;
    }

    INLINE Floats at(int i, float) const {
      const int q = quad_of(i), shift = 8 * byte_of(i);
      const Words h = HIGH ? load<Words>(word(high, HIGH, q)) >> shift : Words{};
      Words code = joined(load<Words>(word(low, LOW, q)) >> shift, q * LOW % 8, h, q * HIGH % 8, 1);
      if (LOOKS_UP) code = look_up(code) & 255;
      return convert(reinterpret<Ints>(code) - BIAS);
    }

#if HAS_BF16
    INLINE Floats at(int p, uint16_t) const {
      const int q = quad_of(2 * p), shift = 8 * byte_of(2 * p);
      if constexpr (LOW == 8) {  // float32 of code + 2^23, minus 2^23
        const Words v = load<Words>(word(low, LOW, q));
        const Floats even = reinterpret<Floats>((v >> shift & 255) | 0x4b000000) - (8388608.0f + BIAS);
        const Floats odd = reinterpret<Floats>((v >> (shift + 16) & 255) | 0x4b000000) - (8388608.0f + BIAS);
        return reinterpret<Floats>(reinterpret<Words>(even) >> 16 | (reinterpret<Words>(odd) & 0xffff0000));  // exact
      } else {
        Shorts v = load<Shorts>(word(low, LOW, q)) >> uint16_t(shift + q * LOW % 8);
        if constexpr (HIGH > 0) {
          const int at = shift + q * HIGH % 8;
          const Shorts h = load<Shorts>(word(high, HIGH, q));
          const Shorts moved = at > LOW ? h >> uint16_t(at > LOW ? at - LOW : 0) : h << uint16_t(at > LOW ? 0 : LOW - at);
          v = (v & uint16_t(LOW_MASK)) | (moved & uint16_t(~LOW_MASK));
        }
        // A lookup uses 5 or 6 bits; the table repeats itself for the bits above a code.
        return reinterpret<Floats>(BITS > 5 ? _mm512_permutex2var_epi16(first, (__m512i)v, second)
                                            : _mm512_permutexvar_epi16((__m512i)v, first));
      }
    }
#endif

   private:
    static INLINE const uint8_t* word(const uint8_t* plane, int width, int quad) { return plane + 64 * (quad * width / 8); }

#if HAS_NEON
    static INLINE Octets joined(Octets low, int low_at, Octets high, int high_at, uint32_t) {
      low = low >> uint8_t(low_at);
      if (low_at + LOW < 8) low = low & uint8_t(LOW_MASK);
      if (!HIGH) return low;
      const uint8_t right = high_at > LOW ? high_at - LOW : 0, left = high_at > LOW ? 0 : LOW - high_at;
      high = high >> right << left;
      return (Octets)vbslq_u8(vdupq_n_u8(HIGH_MASK), (uint8x16_t)high, (uint8x16_t)low);
    }
#endif
    template <class V> static INLINE V joined(V low, int low_at, V high, int high_at, uint32_t each) {
      low = low >> low_at & LOW_MASK * each;
      if (!HIGH) return low;
      return low | ((high_at > LOW ? high >> (high_at > LOW ? high_at - LOW : 0) : high << (high_at > LOW ? 0 : LOW - high_at)) &
                    HIGH_MASK * each);
    }
  };
};

// ---- types: the contents of their blocks ----

int nibble(const uint8_t* q, int i, int n) { return q[i % n] >> 4 * (i / n) & 15; }
int two_bits(const uint8_t* q, int i) { return q[i % 32 + i / 128 * 32] >> 2 * (i / 32 % 4) & 3; }
int bit(const uint8_t* q, int i) { return q[i % 32] >> i / 32 & 1; }
int bit_in_order(const uint8_t* q, int i) { return q[i / 8] >> i % 8 & 1; }

// Scales and offsets of Q4_K and Q5_K.
int six_bits(const uint8_t* s, int g, bool offset) {
  if (g < 4) return s[g + 4 * offset] & 63;
  return (offset ? s[g + 4] >> 4 : s[g + 4] & 15) | (s[offset ? g : g - 4] >> 2 & 48);
}

// A block has SIZE weights in BYTES bytes, its float16 scale at byte D and its float16 offset at byte M. code(block,
// weight) is a weight's code; factor(block, group, offset) is a group's 8-bit scale or offset.
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
struct IQ4_NL : Layout<4, 0, 32, false, false, 128, true> {
  static constexpr int SIZE = 32, BYTES = 18, D = 0, M = 0;
  static int code(const uint8_t* b, int i) { return nibble(b + 2, i, 16); }
};
struct IQ4_XS : Layout<4, 0, 32, true, false, 128, true> {
  static constexpr int SIZE = 256, BYTES = 136, D = 0, M = 0;
  static int code(const uint8_t* b, int i) { return nibble(b + 8 + i / 32 * 16, i % 32, 16); }
  static int factor(const uint8_t* b, int g, bool) {
    return ((b[4 + g / 2] >> 4 * (g % 2) & 15) | (load<uint16_t>(b + 2) >> 2 * g & 3) << 4) - 32;
  }
};

void put(uint8_t* plane, int width, int column, int64_t lane, uint32_t value) {
  const int bits = quad_of(column) * width;
  plane[64 * (bits / 8) + 4 * lane + byte_of(column)] |= value << bits % 8;
}

// Packs at most 16 rows into a tile of zeros; returns false if a float16 is not finite.
template <class F> bool pack(const uint8_t* block, int64_t rows, int64_t cells, uint8_t* tile) {
  constexpr int CELLS = F::SIZE / COLUMNS;
  bool finite = true;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t first = 0; first < cells; first += CELLS, block += F::BYTES) {
      for (int i = 0; i < F::SIZE; i++) {
        const int64_t cell = first + i / COLUMNS;
        const int code = F::code(block, i);
        put(tile + cell * F::LOW_BYTES, F::LOW, i % COLUMNS, r, code & F::LOW_MASK);
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

// Decodes `columns` weights from a block on. Products of an integer and a scale are exact. So the bits do not depend on
// whether the compiler fuses product and sum into one instruction.
template <class F> void look_up_row(const uint8_t* block, int64_t columns, float* to) {
  for (; columns; columns -= F::SIZE, block += F::BYTES, to += F::SIZE) {
    uint8_t halves[2 * LANES] = {};
    memcpy(halves, block + F::D, 2), memcpy(halves + 2, block + F::M, 2);
    const Floats factors = widen_halves(halves);
    for (int g = 0; g < F::SIZE / F::GROUP; g++) {
      float scale = factors[0], offset = factors[1];
      if constexpr (F::SUPER) {
        scale *= F::factor(block, g, false);
        offset = -(offset * F::factor(block, g, true));
      }
      for (int i = g * F::GROUP; i < (g + 1) * F::GROUP; i++) {
        const int code = F::code(block, i);
        to[i] = scale * ((F::LOOKS_UP ? TABLE[code & 15] : code) - F::BIAS);
        if constexpr (F::OFFSET) to[i] += offset;
      }
    }
  }
}

// Neighbouring tiles that are multiplied together. A single one is multiplied as if it were several.
struct Stretch {
  const uint8_t* first;
  int64_t tile_bytes, cells, count;

  INLINE const uint8_t* at(int64_t i) const { return i < count ? first + i * tile_bytes : first; }
};

// Number of tiles that are multiplied together with rows X.
template <class X> constexpr int TILES = 1;

// Prefetches the cells that come some 12 KB after those of a stretch, each of a tile's planes by itself, into all caches.
// The hardware of some CPUs does not prefetch across a page; Intel's is held back, to a third of its speed, by software
// that prefetches past the caches.
template <class F, int COUNT> class Ahead {
  static constexpr int64_t CELLS = 12288 / COUNT / (F::LOW_BYTES + F::HIGH_BYTES + F::CELL_FACTORS);

 public:
  INLINE Ahead(const Stretch& tiles) : tile(tiles.first), tile_bytes(tiles.tile_bytes), cells(tiles.cells), cell(CELLS) {
    for (; cell >= cells; cell -= cells) tile += COUNT * tile_bytes;
  }

  INLINE void prefetch() {
#pragma GCC unroll 2
    for (int t = 0; t < COUNT; t++) {
      const uint8_t* at = tile + t * tile_bytes;
      lines<F::LOW_BYTES>(at + cell * F::LOW_BYTES);
      lines<F::HIGH_BYTES>(at + F::high_at(cells) + cell * F::HIGH_BYTES);
      lines<F::CELL_FACTORS>(at + F::factors_at(cells) + cell * F::CELL_FACTORS);
      lines<F::SUPER_FACTORS>(at + F::super_at(cells) + cell / SUPER_CELLS * F::SUPER_FACTORS);
    }
    if (++cell == cells) cell = 0, tile += COUNT * tile_bytes;
  }

 private:
  template <int64_t SIZE> static INLINE void lines(const uint8_t* at) {
#pragma GCC unroll 16
    for (int64_t b = 0; b < SIZE; b += 64) __builtin_prefetch(at + b, 0, 3);
  }

  const uint8_t* tile;
  int64_t tile_bytes, cells, cell;
};

}  // namespace
