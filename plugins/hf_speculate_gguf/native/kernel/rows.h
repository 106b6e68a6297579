// Rows of packed matrices as in files, decoded to float32: embeddings.
#pragma once

#include "formats.h"

namespace {

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

}  // namespace
