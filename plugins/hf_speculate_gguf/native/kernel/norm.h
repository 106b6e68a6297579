// RMSNorm of rows, written in the form for matrices.
#pragma once

#include <cmath>

#include "matrices.h"

namespace {

template <class From> float rms_factor(const From* from, int64_t size, float eps) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += LANES) squares += widen(from + i) * widen(from + i);
  return 1 / sqrtf(sum_of(squares) / size + eps);
}

// Writes a normed row from a column on; without weights it is not normed. `shift` is added to the weights.
template <class T, class From>
void normalize(const From* from, const void* weights, float shift, int64_t size, float eps, const Arranged<T>& to,
               int64_t column, int64_t m, float* also_to = nullptr) {
  const float factor = weights ? rms_factor(from, size, eps) : 1;
  for (int64_t i = 0; i < size; i += LANES) {
    Floats value = widen(from + i) * factor;
    if (weights) value *= widen((const T*)weights + i) + shift;
    if (also_to) store(also_to + i, value);
    const int64_t at = column + i;
    narrow(to.at(at / COLUMNS, m) + at % COLUMNS, value);
  }
}

}  // namespace
