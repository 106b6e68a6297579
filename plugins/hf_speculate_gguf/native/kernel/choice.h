// The column of the largest score, as torch's argmax finds it, and the most probable columns.
#pragma once

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

// Maps the bits of a float to an integer with the same order; NaN lies beyond the infinities.
template <class I> INLINE I rank_of(I bits) {
  constexpr I MAGNITUDE = std::is_same<I, int16_t>::value ? 0x7fff : 0x7fffffff;
  const I size = bits & MAGNITUDE;
  return bits < 0 ? -size : size;
}

// Scores as integers of the same order.
template <class T> struct Ranks {
  using I = typename std::conditional<sizeof(T) == 2, int16_t, int32_t>::type;
  static constexpr I INFINITE = sizeof(T) == 2 ? 0x7f80 : 0x7f800000;
  const I* bits;

  explicit Ranks(const T* scores) : bits((const I*)scores) {}
  I operator[](int64_t i) const { return rank_of(bits[i]); }
  bool is_nan(int64_t i) const { return (*this)[i] > INFINITE || (*this)[i] < -INFINITE; }

  // The largest rank of some scores; sets `any_nan`.
  I largest(int64_t begin, int64_t end, bool& any_nan) const {
    I largest = -INFINITE, least = INFINITE;
    for (int64_t i = begin; i < end; i++) {
      const I rank = (*this)[i];
      largest = rank > largest ? rank : largest, least = rank < least ? rank : least;
    }
    any_nan = largest > INFINITE || least < -INFINITE;
    return largest;
  }
};

// The index of the first NaN, or else of the first largest score. Only the block with it is read twice.
template <class T> int64_t argmax(const T* scores, int64_t count) {
  constexpr int64_t BLOCK = 512;
  const Ranks<T> ranks(scores);
  auto best = (typename Ranks<T>::I)-Ranks<T>::INFINITE;
  int64_t begin = 0;
  bool any_nan = false;
  for (int64_t block = 0; block < count && !any_nan; block += BLOCK) {
    const auto largest = ranks.largest(block, block + BLOCK < count ? block + BLOCK : count, any_nan);
    if (largest > best || any_nan) best = largest, begin = block;
  }
  for (int64_t i = begin; i < count; i++)
    if (any_nan ? ranks.is_nan(i) : ranks[i] == best) return i;
  return 0;
}

// The largest of the offered values, largest first; the first of equal ones.
struct Best {
  float* values;
  int64_t* indices;
  const int64_t most;
  int64_t count = 0;

  void offer(float value, int64_t index) {
    if (count == most && !(value > values[most - 1])) return;
    int64_t at = count < most ? count++ : most - 1;
    for (; at && value > values[at - 1]; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
    values[at] = value, indices[at] = index;
  }
};

// Finds the columns of the `most` largest scores among `count` (at least `most`), and their probabilities among these,
// largest first. All probabilities are 0 if a score that counts is not finite.
template <class T> void most_probable(const T* scores, int64_t count, int64_t most, float* probs, int64_t* columns) {
  constexpr int64_t BLOCK = 64;
  const Ranks<T> ranks(scores);
  Best best{probs, columns, most};
  auto bound = (typename Ranks<T>::I)-Ranks<T>::INFINITE;  // rank of the smallest of the best, once there are `most`
  bool any_nan = false;
  for (int64_t block = 0; block < count && !any_nan; block += BLOCK) {
    const int64_t end = block + BLOCK < count ? block + BLOCK : count;
    const auto largest = ranks.largest(block, end, any_nan);
    if (any_nan || (best.count == most && largest <= bound)) continue;
    for (int64_t i = block; i < end; i++) best.offer(to_float(scores[i]), i);
    if (best.count == most) bound = ranks[columns[most - 1]];
  }
  const float first = any_nan ? INFINITY : probs[0];
  float sum = 0;
  for (int64_t i = 0; i < most; i++) {
    if (any_nan) columns[i] = i;
    probs[i] = std::isfinite(first) ? std::exp(probs[i] - first) : 0.0f;
    sum += probs[i];
  }
  for (int64_t i = 0; i < most && sum > 0; i++) probs[i] /= sum;
}

}  // namespace
