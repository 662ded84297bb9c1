// What a few query rows have summed, and their scores for a block of tokens.
#pragma once
#include "block.h"

namespace {

// Query rows as the scores of packed keys need them: vectors in the order of Code::each_place, whose
// factors are units of the codes, and what minima add, lane by lane.
template <class A> struct Query {
  static constexpr bool OFFSET = !A::K::BY_TOKEN;

  alignas(64) float vectors[A::ROWS][A::K::Code::SIZE];
  std::conditional_t<OFFSET, Floats[A::ROWS], Nothing> offset;
};

// Lane r * TOKENS + u: the sum of row r's channels of a group.
template <class X> struct GroupSums {
  Floats of[X::Code::GROUPS];
};

// Query rows of a panel, and tokens that share the registers with them.
template <class A> struct Panel {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, TOKENS = LANES / ROWS;
  // Tokens of a pass. What the next block reads is prefetched; beyond the end that does nothing.
  static constexpr int BLOCK = 128;

  struct Packed {
    alignas(64) float of[V::Code::SIZE];
  };

  // The weighted sums of one query row over some tokens.
  struct Row {
    alignas(64) float query[round_up(K::DIM, LANES)];
    alignas(64) float exact[round_up(V::DIM, LANES)];
    std::conditional_t<V::DIRECT, Packed, Nothing> packed;
    float top, total;
    Bounds seen;
  };

  Row rows[ROWS];
  std::conditional_t<K::DIRECT, Query<A>, Nothing> query;
  std::conditional_t<K::DIRECT && K::BY_TOKEN, GroupSums<K>, Nothing> sums;

  float top(int r) const { return rows[r].top; }
  float total(int r) const { return rows[r].total; }
  const Bounds& seen(int r) const { return rows[r].seen; }
  void add_values(int r, float factor, float* result) const {
    const Row& row = rows[r];
    for (int d = 0; d < V::DIM; d++) {
      if constexpr (V::DIRECT) {
        using Code = typename V::Code;
        const float packed = row.packed.of[d / Code::WIDTH * Code::PADDED + d % Code::WIDTH];
        result[d] += factor * (row.exact[d] + packed);
      } else {
        result[d] += factor * row.exact[d];
      }
    }
  }
};

// Scores, then weights, of a panel's query rows for the tokens of a block.
template <class A> struct Block {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, SIZE = Panel<A>::BLOCK;

  struct Weights {
    alignas(64) float of[ROWS][V::Code::GROUPS][SIZE + (V::SLIDING ? LANES : 0)];
    float base[ROWS][V::Code::GROUPS];
  };
  template <class X> struct Decoded {
    alignas(64) float of[SIZE * STRIDE<X>];
  };

  // The last tokens of a run are scored TOKENS at a time, beyond its end.
  alignas(64) float scores[ROWS][SIZE + LANES];
  std::conditional_t<V::DIRECT, Weights, Nothing> weights;
  std::conditional_t<K::DEQUANT_FIRST, Decoded<K>, Nothing> keys;
  std::conditional_t<V::DEQUANT_FIRST, Decoded<V>, Nothing> values;
};

}  // namespace
