// What a few query rows have summed, and their scores for a block of tokens.
#pragma once
#include "block.h"
#include "lanes.h"

namespace {

// An array that only some kernels need has one element in the others.
constexpr int size_if(bool needed, int size) { return needed ? size : 1; }

// Query rows as the scores of packed keys need them: vectors in the order of Code::each_place, whose
// factors are units of the codes, and, where groups are of tokens, what minima add, lane by lane.
// Vectors hold a plane once for each of the tokens that a vector of words holds.
template <class A> struct Query {
  alignas(64) float vectors[A::ROWS][size_if(A::K::DIRECT, A::K::Code::SIZE)];
  Floats offset[A::ROWS];
};

// Query rows of a panel, and tokens that share the registers with them.
template <class A> struct Panel {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, TOKENS = LANES / ROWS;
  // Tokens of a pass. What the next block reads is prefetched; beyond the end that does nothing.
  static constexpr int BLOCK = 128;

  // The weighted sums of one query row over some tokens: those of packed ones in plane order.
  struct Row {
    alignas(64) float query[round_up(K::DIM, LANES)];
    alignas(64) float exact[round_up(V::DIM, LANES)];
    alignas(64) float packed[size_if(V::DIRECT, V::Code::SIZE)];
    float top, total;
  };

  Row rows[ROWS];
  Query<A> query;
  // Lane r * TOKENS + u: the sum of row r's channels of a group of the keys.
  Floats sums[K::Code::GROUPS];

  float top(int r) const { return rows[r].top; }
  float total(int r) const { return rows[r].total; }
  void add_values(int r, float factor, float* result) const {
    using Code = typename V::Code;
    const Row& row = rows[r];
    for (int d = 0; d < V::DIM; d++) {
      float value = row.exact[d];
      if constexpr (V::DIRECT)
        for (int t = 0; t < Code::TOKENS; t++)
          value += row.packed[d / Code::WIDTH * Code::PADDED + t * Code::WIDTH + d % Code::WIDTH];
      result[d] += factor * value;
    }
  }
};

// Scores, then weights, of a panel's query rows for the tokens of a block.
template <class A> struct Block {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, SIZE = Panel<A>::BLOCK;

  // The last tokens of a run are scored TOKENS at a time, beyond its end.
  alignas(64) float scores[ROWS][SIZE + LANES];
  // Weights of packed values times the scales of a group, and the sums of weights times minima.
  alignas(64) float weights[ROWS][V::Code::GROUPS][size_if(V::DIRECT, SIZE + V::SLIDING * LANES)];
  float base[ROWS][V::Code::GROUPS];
  // Tokens that are decoded before they are multiplied.
  alignas(64) float keys[size_if(K::DEQUANT_FIRST, SIZE * STRIDE<K>)];
  alignas(64) float values[size_if(V::DEQUANT_FIRST, SIZE * STRIDE<V>)];
};

}  // namespace
