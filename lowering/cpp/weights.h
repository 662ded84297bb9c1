// Weights of packed values, times the scales of their codes.
#pragma once
#include "panel.h"

namespace {

// The weights of tokens first ... of the block times the scales of a group of channels of `count` slots
// go to put(row, t, weights); the largest of them, and the sums of weights times minima, are kept.
template <class A, class Put>
inline void scale_group(const Pair<A>& pair, int64_t slot, int group, int first, int count,
                        Block<A>& block, Floats (&tops)[A::ROWS], const Put& put) {
  using V = typename A::V;
  constexpr int ROWS = A::ROWS;
  const V& v = pair.a.v;
  Floats base[ROWS]{}, top[ROWS]{};
  for (int t = 0; t < count; t += LANES) {
    const auto* place = v.qparams_at(pair.pair, slot) + group * v.capacity + t;
    const Affine affine = load_affine<typename V::Number>(place, std::min(count - t, LANES));
    __builtin_prefetch(place + Block<A>::SIZE);
    each<0, ROWS>([&](auto r) {
      // The weights of tokens behind count belong to exact values, or, where slots do not lie one
      // behind the other, to none. Digits are of whole tiles.
      Floats weight = load<Floats, LANES>(block.scores[r] + first + t);
      if constexpr (V::SCATTERED || VALUES_IN_TILES<V>)
        weight = select(lane_numbers() < count - t, weight, Floats{});
      base[r] += weight * affine.minimum;
      weight *= affine.scale;
      if constexpr (IN_INTEGERS<V> || VALUES_IN_TILES<V>) top[r] = maximum(top[r], weight);
      put(r, t, weight);
    });
  }
  const Floats bases = join_rows(base, add<Floats>);
  each<0, ROWS>([&](auto r) {
    block.base[r][group] = bases[r * (LANES / ROWS)];
    tops[r] = top[r];
  });
}

}  // namespace
