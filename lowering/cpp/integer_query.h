// Query rows as integers, with a step each.
#pragma once
#include "code_sums.h"

namespace {

// Rows for keys whose tokens have scales of their own: one for all channels, or one for each of PARTS
// groups of them, with 0 elsewhere.
template <int PARTS, class A, class Integers>
inline void arrange_integers(const Panel<A>& panel, Integers& result) {
  using Keys = typename A::K::Code;
  constexpr int DIM = A::K::DIM;
  alignas(64) float rows[A::ROWS][DIM];
  Floats tops[A::ROWS]{};
  each<0, A::ROWS>([&](auto r) {
    for (int d = 0; d < DIM; d += LANES)
      tops[r] = larger_magnitude(tops[r], load<Floats, LANES>(panel.rows[r].query + d));
  });
  const Steps steps(tops, Integers::LIMIT);
  for (int part = 0; part < PARTS; part++) {
    for (int r = 0; r < A::ROWS; r++)
      for (int d = 0; d < DIM; d++)
        rows[r][d] = PARTS == 1 || Keys::group(d) == part ? panel.rows[r].query[d] : 0;
    put_query(rows, steps, part, result);
  }
  result.steps = steps.steps;
  result.offsets = Floats{};
}

// Rows whose codes have the scales and minima of a group of tokens.
template <class A, class Integers>
inline void scale_query(
    const typename A::K::Pair* qparams, const Panel<A>& panel, Integers& result) {
  using K = typename A::K;
  alignas(64) float rows[A::ROWS][K::DIM];
  Floats tops[A::ROWS]{}, sums[A::ROWS]{};
  each_vector<K::DIM>([&](auto at, auto width) {
    const auto [scale, minimum] = load_affine<typename K::Number, width>(qparams + at);
    if constexpr (at * sizeof(*qparams) % 64 == 0) __builtin_prefetch(qparams + at + K::DIM);
    const Floats factor = scale, start = minimum;
    each<0, A::ROWS>([&](auto r) {
      const Floats q = load<Floats, LANES>(panel.rows[r].query + at), x = q * factor;
      sums[r] += q * start;
      tops[r] = larger_magnitude(tops[r], x);
      store<LANES>(rows[r] + at, x);
    });
  });
  const Steps steps(tops, Integers::LIMIT);
  put_query(rows, steps, 0, result);
  result.steps = steps.steps;
  result.offsets = join_rows(sums, add<Floats>);
}

}  // namespace
