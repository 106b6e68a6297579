// The column of the largest score, as torch's argmax finds it.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// An integer that is as large among others as a float, of these bits, among floats; NaN lies beyond the infinities.
template <class I> INLINE I rank_of(I bits) {
  constexpr I MAGNITUDE = std::is_same<I, int16_t>::value ? 0x7fff : 0x7fffffff;
  const I size = bits & MAGNITUDE;
  return bits < 0 ? -size : size;
}

// The first NaN, if there is one; else the first of the largest. Only the block that has it is looked at twice.
template <class T> int64_t argmax(const T* scores, int64_t count) {
  using I = typename std::conditional<sizeof(T) == 2, int16_t, int32_t>::type;
  constexpr I INFINITE = sizeof(T) == 2 ? 0x7f80 : 0x7f800000;
  constexpr int64_t BLOCK = 512;
  const I* bits = (const I*)scores;
  I best = -INFINITE;
  int64_t begin = 0;
  bool any_nan = false;
  for (int64_t block = 0; block < count && !any_nan; block += BLOCK) {
    const int64_t end = block + BLOCK < count ? block + BLOCK : count;
    I largest = -INFINITE, least = INFINITE;
    for (int64_t i = block; i < end; i++) {
      const I rank = rank_of(bits[i]);
      largest = rank > largest ? rank : largest, least = rank < least ? rank : least;
    }
    any_nan = largest > INFINITE || least < -INFINITE;
    if (largest > best || any_nan) best = largest, begin = block;
  }
  for (int64_t i = begin; i < count; i++) {
    const I rank = rank_of(bits[i]);
    if (any_nan ? rank > INFINITE || rank < -INFINITE : rank == best) return i;
  }
  return 0;
}

}  // namespace
