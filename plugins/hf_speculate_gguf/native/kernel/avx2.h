// Products of packed tiles and quantised rows by AVX2, with AVX-VNNI or without. Sixteen registers hold the sums of four
// rows and two vectors.
#pragma once

#include "integers.h"

#if HAS_AVX2
namespace {

// GCC would add products in pairs later, and run out of registers.
#define PIN(v) __asm__("" : "+x"(v))

// The form in which a type's codes are multiplied, with MANY rows or few. VNNI adds products of unsigned bytes in 32 bits.
// Without it products are added in 16 bits, modulo 2^16. The sum may wrap on the way if it fits in the end:
//
// - A code less its bias has at most 16, and a half lane adds 16 products of it in a group (Q6_K: 32, and 8 of them). So
//   sums begin with what the bias takes off.
// - Five bits without a bias fit for half a group.
// - 8-bit codes fit as two planes, of their low and their high nibbles. Few rows take less if these codes' signs go to
//   their bytes, and each quad is widened by itself.
template <class F, bool MANY> struct Form {
  static constexpr bool IS_WIDE = F::CODE_BITS == 8 && !HAS_VNNI, IS_SIGNED = IS_WIDE && !MANY;
  static constexpr int PLANES = IS_WIDE && MANY ? 2 : 1, VECTORS = 2 / PLANES;
  static constexpr int STEPS = F::GROUP / 4;
  static constexpr int BATCH = IS_SIGNED ? 1 : !HAS_VNNI && F::BITS == 5 && !F::BIAS ? STEPS / 2 : STEPS;
  static constexpr int BIAS = IS_SIGNED ? 0 : F::BIAS / (PLANES == 2 ? 16 : 1);

  // A quad of a cell.
  static INLINE __m256i codes(const typename F::Codes& from, int quad, int part, int plane) {
    const __m256i found = (__m256i)from.template quad<WideWords>(quad, part);
    if (IS_SIGNED) return _mm256_xor_si256(found, _mm256_set1_epi8(-128));
    if (PLANES == 1) return found;
    return _mm256_and_si256(plane ? _mm256_srli_epi16(found, 4) : found, _mm256_set1_epi8(15));
  }

  static INLINE __m256i start(const QuantizedCell& x, int of_group, int plane) {
    if (!BIAS || plane + 1 < PLANES) return __m256i{};
    const __m256i counts = _mm256_set1_epi32(load<int32_t>(x.counts[of_group])), bias = _mm256_set1_epi16(BIAS);
    return HAS_VNNI ? _mm256_madd_epi16(counts, bias) : _mm256_mullo_epi16(counts, bias);
  }

  static INLINE __m256i add(__m256i sum, __m256i codes, __m256i x) {
#if HAS_VNNI
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    const __m256i pairs = IS_SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                                    : _mm256_maddubs_epi16(codes, x);
    return BATCH == 1 ? pairs : _mm256_add_epi16(sum, pairs);
#endif
  }

  // The sums of all planes in 32 bits.
  static INLINE __m256i widened(const __m256i* sums) {
    if (HAS_VNNI) return sums[0];
    const __m256i low = _mm256_madd_epi16(sums[0], _mm256_set1_epi16(1));
    return PLANES == 2 ? _mm256_add_epi32(low, _mm256_madd_epi16(sums[1], _mm256_set1_epi16(16))) : low;
  }
};

// The codes of a cell, decoded for each use, for few rows.
template <class F> struct Undecoded {
  using Codes = Form<F, false>;
  typename F::Codes codes;

  INLINE void go_to(const Stretch& tiles, int64_t cell) { codes.go_to(tiles.first, tiles.cells, cell); }
  INLINE __m256i operator()(int quad, int part, int plane) const { return Codes::codes(codes, quad, part, plane); }
};

// The codes of a cell, decoded into the first cache.
template <class F> struct Decoded {
  using Codes = Form<F, true>;
  alignas(64) uint8_t bytes[Codes::PLANES * CELL];

  static constexpr int at(int quad, int part, int plane) { return 32 * ((quad * PARTS + part) * Codes::PLANES + plane); }
  INLINE __m256i operator()(int quad, int part, int plane) const { return load<__m256i>(bytes + at(quad, part, plane)); }

  INLINE void go_to(const Stretch& tiles, int64_t cell) {
    typename F::Codes codes;
    codes.go_to(tiles.first, tiles.cells, cell);
#pragma GCC unroll 8
    for (int i = 0; i < QUADS; i++)
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 2
        for (int plane = 0; plane < Codes::PLANES; plane++)
          store(bytes + at(i, part, plane), Codes::codes(codes, i, part, plane));
    __asm__("" : "+m"(bytes));  // GCC would keep copies of them all
  }
};

// Computes the sums of a group's integers [row, vector] for ROWS rows, from vector number `part` of a tile on.
template <int ROWS, class C, class Quads>
INLINE void multiply_group(const Quads& codes, const QuantizedCell* in, int g, int of_group, int part,
                           __m256i integers[ROWS][C::VECTORS]) {
#pragma GCC unroll 8
  for (int first = g * C::STEPS; first < (g + 1) * C::STEPS; first += C::BATCH) {
    __m256i sums[ROWS][2];  // [row, vector and plane]
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int s = 0; s < 2; s++) sums[r][s] = C::start(in[r], of_group, s % C::PLANES);
#pragma GCC unroll 8
    for (int i = first; i < first + C::BATCH; i++) {
      __m256i quads[2];
#pragma GCC unroll 2
      for (int s = 0; s < 2; s++) {
        quads[s] = codes(i, part + s / C::PLANES, s % C::PLANES);
        PIN(quads[s]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const __m256i x = _mm256_set1_epi32(load<int32_t>(in[r].values + 4 * i));
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
          sums[r][s] = C::add(sums[r][s], quads[s], x);
          PIN(sums[r][s]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < C::VECTORS; v++) {
        const __m256i widened = C::widened(sums[r] + v * C::PLANES);
        integers[r][v] = first == g * C::STEPS ? widened : _mm256_add_epi32(integers[r][v], widened);
      }
  }
}

// Adds a cell's products with ROWS rows to `totals` [row, lane].
template <int ROWS, class F, class Quads>
INLINE void multiply_cell(const Quads& codes, const typename F::Factors& factors, const QuantizedCell* in, float* totals) {
  using C = typename Quads::Codes;
#pragma GCC unroll 2
  for (int g = 0; g < F::GROUPS; g++) {
    const int of_group = sum_of_group(F::GROUPS, g);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part += C::VECTORS) {
      __m256i integers[ROWS][C::VECTORS];
      multiply_group<ROWS, C>(codes, in, g, of_group, part, integers);
      __asm__("" : "+r"(in));  // GCC would keep what is loaded again here, and spill sums for it
#pragma GCC unroll 2
      for (int v = 0; v < C::VECTORS; v++) {
        const int lane = (part + v) * WIDE;
        const WideFloats scales = load<WideFloats>((const float*)&factors.scales[g] + lane);
        const WideFloats offsets = load<WideFloats>((const float*)&factors.offsets[g] + lane);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          float* to = totals + r * LANES + lane;
          const auto products = (WideFloats)_mm256_cvtepi32_ps(integers[r][v]);
          store(to, add<F>(load<WideFloats>(to), products, scales, offsets, in[r].scale, in[r].sums[of_group]));
        }
      }
    }
  }
}

// Multiplies a tile with at most four rows, which take each code from its register.
template <int ROWS, class F> void multiply_few(const Stretch& tiles, const QuantizedRows& x, float* products) {
  typename F::Factors factors;
  Undecoded<F> codes;
  alignas(64) float totals[ROWS * LANES] = {};
  Ahead<F, 1> ahead(tiles);
  for (int64_t cell = 0; cell < tiles.cells; cell++) {
    ahead.prefetch();
    codes.go_to(tiles, cell);
    factors.read(tiles.first, tiles.cells, cell);
    multiply_cell<ROWS, F>(codes, factors, &x.at(cell, 0), totals);
  }
  memcpy(products, totals, sizeof totals);
}

template <int ROWS, class F>
INLINE void multiply_rest(const Decoded<F>& codes, const typename F::Factors& factors, const QuantizedCell* in,
                          int64_t rows, float* totals) {
  for (; rows >= ROWS; rows -= ROWS, in += ROWS, totals += ROWS * LANES)
    multiply_cell<ROWS, F>(codes, factors, in, totals);
  if constexpr (ROWS > 1)
    if (rows) multiply_rest<ROWS / 2, F>(codes, factors, in, rows, totals);
}

// Multiplies a tile with all rows. Each cell is decoded once, into the first cache, and the next ones come from memory
// while all rows are computed.
template <class F> void multiply_many(const Stretch& tiles, const QuantizedRows& x, float* products) {
  typename F::Factors factors;
  Decoded<F> codes;
  memset(products, 0, x.rows * LANES * sizeof(float));
  Ahead<F, 1> ahead(tiles);
  for (int64_t cell = 0; cell < tiles.cells; cell++) {
    ahead.prefetch();
    codes.go_to(tiles, cell);
    factors.read(tiles.first, tiles.cells, cell);
    multiply_rest<4, F>(codes, factors, &x.at(cell, 0), x.rows, products);
  }
}

// Multiplies a tile with all rows: one, two and four of them without decoding it first.
template <class F> void multiply_quantized(const Stretch& tiles, const QuantizedRows& x, float* products) {
  if (x.rows == 1) multiply_few<1, F>(tiles, x, products);
  else if (x.rows == 2) multiply_few<2, F>(tiles, x, products);
  else if (x.rows == 4) multiply_few<4, F>(tiles, x, products);
  else multiply_many<F>(tiles, x, products);
}

}  // namespace
#endif
