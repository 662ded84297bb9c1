// Decoded tokens as matrices of floats.
#pragma once
#include "block.h"

namespace {

// A block of tokens, and what its products with query rows are.
template <class A> struct FloatMatrices {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = 2 * LANES;
  // Tokens of a pass.
  static constexpr int BLOCK = 96;
  // Vectors that are summed at once; they stay in registers.
  static constexpr int SUMMED = A::SUMS * 3 / 2;
  static_assert(BLOCK % SUMMED == 0);
  struct Shapes {};

  struct Query {
    alignas(64) float channels[K::DIM][ROWS];

    void put(const Pair<A>& pair, int64_t row, int r) {
      alignas(64) float query[round_up(K::DIM, LANES)];
      pair.read_query(row, pair.a.scale, query);
      for (int d = 0; d < K::DIM; d++) channels[d][r] = query[d];
    }
  };
  // What rows have summed.
  using Sums = float[V::DIM][ROWS];

  alignas(64) float keys[BLOCK * STRIDE<K>];
  alignas(64) float values[BLOCK * STRIDE<V>];
  int gone;

  void read(const Pair<A>& pair, int64_t start, int count) {
    gone = pair.gone(start, count);
    decode_tokens(pair, pair.keys, start, count, keys);
    decode_tokens(pair, pair.values, start, count, values);
  }

  // Scores of rows in USED vectors; behind `count` there may be anything.
  template <int USED>
  void score(const Pair<A>&, const Query& query, int count, float (*scores)[ROWS]) const {
    constexpr int COUNT = SUMMED / USED;
    for (int t = 0; t < count; t += COUNT)
      multiply<COUNT, USED, STRIDE<K>, 1, false>(
          keys + t * STRIDE<K>, query.channels, K::DIM, scores + t);
  }

  template <int USED> void add_values(const float (*weights)[ROWS], int count, Sums& sums) const {
    constexpr int COUNT = SUMMED / USED;
    const auto add = [&](auto some, int d) {
      multiply<some, USED, 1, STRIDE<V>, true>(
          values + gone * STRIDE<V> + d, weights + gone, count - gone, sums + d);
    };
    int d = 0;
    for (; d + COUNT <= V::DIM; d += COUNT) add(Constant<COUNT>{}, d);
    if constexpr (V::DIM % COUNT > 0) add(Constant<V::DIM % COUNT>{}, d);
  }

 private:
  // sums[i] += the sum over j < depth of left[i * I + j * J] * right[j], for COUNT rows of USED vectors.
  template <int COUNT, int USED, int I, int J, bool ADDS>
  static void multiply(
      const float* left, const float (*right)[ROWS], int depth, float (*sums)[ROWS]) {
    Floats out[COUNT][USED]{};
    for (int j = 0; j < depth; j++, left += J, right++) {
      Floats row[USED];
      each<0, USED>([&](auto u) { row[u] = load<Floats, LANES>(*right + u * LANES); });
      each<0, COUNT>([&](auto i) {
        const Floats x = all(left[i * I]);
        each<0, USED>([&](auto u) { out[i][u] += x * row[u]; });
      });
    }
    each<0, COUNT>([&](auto i) {
      each<0, USED>([&](auto u) {
        float* place = sums[i] + u * LANES;
        store<LANES>(place, ADDS ? load<Floats, LANES>(place) + out[i][u] : out[i][u]);
      });
    });
  }
};

}  // namespace
