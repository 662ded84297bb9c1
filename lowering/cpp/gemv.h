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
  if constexpr (!std::is_same_v<decltype(row.packed), Nothing>)
    for (float& x : row.packed.of) x *= shrink;
}

template <class A> void start_panel(const Pair<A>& pair, int64_t first, Panel<A>& panel) {
  for (int r = 0; r < A::ROWS; r++) {
    auto& row = panel.rows[r];
    row.top = -INFINITE;
    row.seen = pair.bounds(first + r);
    if (first + r < pair.a.rows) pair.read_query(first + r, row.query);
  }
  if constexpr (A::K::DIRECT) arrange_query(panel);
}

template <class A>
void score(const Pair<A>& pair, int64_t start, int count, const Panel<A>& panel, Block<A>& block) {
  using K = typename A::K;
  if constexpr (K::DEQUANT_FIRST) {
    const int gone = pair.gone(start, count);
    decode_keys(pair, start, count, block.keys.of);
    exact_scores<STRIDE<K>>(block.keys.of + gone * STRIDE<K>, gone, count - gone, panel, block);
  } else {
    pair.each_key_run(
        start, count,
        [&](int64_t slot, int first, int n) {
          if constexpr (K::PACKED && K::BY_TOKEN) token_scores(pair, slot, first, n, panel, block);
          else if constexpr (K::PACKED) channel_scores(pair, slot, first, n, panel, block);
        },
        [&](auto* keys, int first, int n) { exact_scores<K::DIM>(keys, first, n, panel, block); });
  }
}

template <class A>
void add_values(const Pair<A>& pair, int64_t start, int count, Block<A>& block, Panel<A>& panel) {
  using V = typename A::V;
  if constexpr (V::DEQUANT_FIRST) {
    const int gone = pair.gone(start, count);
    decode_values(pair, start, count, block.values.of);
    exact_values<STRIDE<V>>(block.values.of + gone * STRIDE<V>, gone, count - gone, block, panel);
  } else {
    pair.each_value_run(
        start, count,
        [&](int64_t slot, int first, int n) {
          if constexpr (V::PACKED) {
            scale_weights(pair, slot, first, n, block);
            packed_values(pair.a.v.codes_of(pair.pair), slot, first, n, block, panel);
          }
        },
        [&](auto* values, int first, int n) {
          exact_values<V::DIM>(values, first, n, block, panel);
        });
  }
}

template <class A>
void attend_panel(
    const Pair<A>& pair, int64_t start, int count, int64_t first_row, Panel<A>& panel) {
  const A& a = pair.a;
  Block<A> block;
  const int gone = pair.gone(start, count);
  score(pair, start, count, panel, block);
  for (int r = 0; r < A::ROWS; r++) {
    float* scores = block.scores[r];
    auto& row = panel.rows[r];
    if (a.softcap > 0) cap_scores(scores, count, a.softcap);
    if (a.mask_kind && first_row + r < a.rows) {
      pair.with_mask(first_row + r, start + gone, [&](const auto& at) {
        for (int t = gone; t < count; t++) scores[t] += at(t - gone);
      });
    }
    std::fill(scores, scores + std::clamp<int64_t>(row.seen.first - start, 0, count), -INFINITE);
    softmax<Block<A>::SIZE>(scores, std::clamp<int64_t>(row.seen.end - start, 0, count), row);
  }
  add_values(pair, start, count, block, panel);
}

// Lets the panels that see one of the tokens start ... start + count attend to them.
template <class A>
void attend_block(const Pair<A>& pair, int64_t start, int count, Panel<A>* panels) {
  for (int64_t row = 0; row < pair.a.rows; row += A::ROWS, panels++)
    if (pair.one_sees(start, count, row, *panels)) attend_panel(pair, start, count, row, *panels);
}

}  // namespace
