// Rotations of the channels of a token, exactly as kvpass/ops/basis.py does.
#pragma once
#include "numbers.h"

namespace {

// sums[u] is the sum over i < size of x[i] * rows[i * size + u], for COUNT vectors of them.
template <int COUNT> inline void add_rows(const float* x, const float* rows, int size, float* sums) {
  Floats out[COUNT]{};
  for (int i = 0; i < size; i++, rows += size)
    each<0, COUNT>([&](auto u) { out[u] += x[i] * load<Floats, LANES>(rows + u * LANES); });
  each<0, COUNT>([&](auto u) { store<LANES>(sums + u * LANES, out[u]); });
}

// Each block of basis.size channels is multiplied by its matrix, in float32, and rounded once.
template <int DIM, class Scalar, class Basis>
void rotate_channels(const Scalar* x, const Basis& basis, int64_t head, Scalar* rotated) {
  // As many sums as keep the processor busy.
  constexpr int COUNT = 8;
  const int size = basis.size;
  const float* matrix = basis.data + head * basis.head_stride;
  alignas(64) float wide[round_up(DIM, LANES)], sums[round_up(DIM, LANES)];
  each_vector<DIM>([&](auto at, auto width) {
    store<LANES>(wide + at, load_numbers<width>(x + at));
  });
  for (int block = 0; block < DIM; block += size, matrix += size * size) {
    int j = 0;
    for (; j + COUNT * LANES <= size; j += COUNT * LANES)
      add_rows<COUNT>(wide + block, matrix + j, size, sums + block + j);
    for (; j + LANES <= size; j += LANES)
      add_rows<1>(wide + block, matrix + j, size, sums + block + j);
    for (; j < size; j++) {
      float sum = 0;
      for (int i = 0; i < size; i++) sum += wide[block + i] * matrix[i * size + j];
      sums[block + j] = sum;
    }
  }
  each_vector<DIM>([&](auto at, auto width) {
    store_numbers<width>(rotated + at, load<Floats, LANES>(sums + at));
  });
}

}  // namespace
