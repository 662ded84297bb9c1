// Attention of few query rows, straight from packed words.
#pragma once
#include <cmath>

#include "functions.h"
#include "scores.h"
#include "values.h"

namespace {

// Scores become weights; what the row has summed so far is scaled to the new maximum.
template <int BLOCK, class Row> void softmax(float* scores, int count, Row& row) {
  for (int t = count; t < BLOCK; t++) scores[t] = -INFINITE;
  Floats tops = all(row.top);
  for (int t = 0; t < BLOCK; t += LANES) tops = maximum(tops, load<Floats, LANES>(scores + t));
  const float top = join_lanes(tops, maximum);
  // Nothing is visible yet: subtract 0, since -inf - -inf is NaN.
  const float pivot = top == -INFINITE ? 0.0f : top;
  const float shrink = std::exp(row.top - pivot);
  Floats total{};
  for (int t = 0; t < BLOCK; t += LANES) {
    const Floats weight = exponential(load<Floats, LANES>(scores + t) - pivot);
    total += weight;
    store<LANES>(scores + t, weight);
  }
  row.top = top;
  row.total = row.total * shrink + sum(total);
  if (shrink == 1.0f) return;
  for (float& x : row.exact) x *= shrink;
  for (float& x : row.packed) x *= shrink;
}

template <class A> void start_panel(const Pair<A>& pair, int64_t first, Panel<A>& panel) {
  for (int r = 0; r < A::ROWS; r++) {
    auto& row = panel.rows[r];
    row.top = -INFINITE;
    if (first + r < pair.a.rows) pair.read_query(first + r, row.query);
  }
  if constexpr (A::K::DIRECT) arrange_query(panel);
}

// Calls packed(slot, first, n) for runs of packed tokens that are read as codes, and
// exact(stride, tokens, first, n) for the other ones, which may be decoded before.
template <class A, class X, class Packed, class Exact>
void each_run_read(const Pair<A>& pair, const Stored<X>& stored, int64_t start, int count,
                   float* decoded, const Packed& packed, const Exact& exact) {
  if constexpr (X::DEQUANT_FIRST) {
    // A few at a time, which stay in the processor's nearest cache until they are multiplied.
    for (int t = pair.gone(start, count); t < count; t += DECODED) {
      const int some = std::min(count - t, DECODED);
      decode_tokens(pair, stored, start + t, some, decoded);
      exact(Constant<STRIDE<X>>{}, decoded, t, some);
    }
  } else {
    pair.each_run_of(stored, start, count, packed, [&](auto* tokens, int first, int n) {
      exact(Constant<X::DIM>{}, tokens, first, n);
    });
  }
}

template <class A>
void attend_panel(
    const Pair<A>& pair, int64_t start, int count, int64_t first_row, Panel<A>& panel) {
  using K = typename A::K;
  using V = typename A::V;
  Block<A> block;
  each_run_read(
      pair, pair.keys, start, count, block.keys,
      [&](int64_t slot, int first, int n) {
        if constexpr (K::DIRECT && K::BY_TOKEN) token_scores(pair, slot, first, n, panel, block);
        else if constexpr (K::DIRECT) channel_scores(pair, slot, first, n, panel, block);
      },
      [&](auto stride, auto* keys, int first, int n) {
        exact_scores<stride>(keys, first, n, panel, block);
      });
  for (int r = 0; r < A::ROWS; r++) {
    float* scores = block.scores[r];
    if (pair.a.softcap > 0) cap_scores(scores, count, pair.a.softcap);
    pair.template mask_scores<1>(start, count, first_row + r, scores);
    softmax<Block<A>::SIZE>(scores, count, panel.rows[r]);
  }
  each_run_read(
      pair, pair.values, start, count, block.values,
      [&](int64_t slot, int first, int n) {
        if constexpr (V::DIRECT) {
          scale_weights(pair, slot, first, n, block);
          packed_values(pair.a.v.codes_at(pair.pair, slot), first, n, block, panel);
        }
      },
      [&](auto stride, auto* values, int first, int n) {
        exact_values<stride>(values, first, n, block, panel);
      });
}

// Lets the panels that see one of the tokens start ... start + count attend to them.
template <class A>
void attend_block(const Pair<A>& pair, int64_t start, int count, Panel<A>* panels) {
  for (int64_t row = 0; row < pair.a.rows; row += A::ROWS, panels++)
    if (pair.template one_sees<A::ROWS>(start, count, row))
      attend_panel(pair, start, count, row, *panels);
}

}  // namespace
