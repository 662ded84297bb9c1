// Attention of few query rows, straight from packed words.
#pragma once
#include "functions.h"
#include "scores.h"
#include "tile_scores.h"
#include "tile_values.h"
#include "values.h"

namespace {

// Scores become weights; what the rows have summed so far is scaled to their new maxima. All rows
// together, for each of these steps waits for the one before it.
template <class A> void softmax(Block<A>& block, int count, Panel<A>& panel) {
  constexpr int ROWS = A::ROWS, SIZE = Block<A>::SIZE;
  Floats before[ROWS], tops[ROWS], totals[ROWS]{};
  each<0, ROWS>([&](auto r) {
    for (int t = count; t < SIZE; t++) block.scores[r][t] = -INFINITE;
    tops[r] = before[r] = all(panel.rows[r].top);
  });
  const auto scores = [&](int r, int t) { return load<Floats, LANES>(block.scores[r] + t); };
  for (int t = 0; t < SIZE; t += LANES)
    each<0, ROWS>([&](auto r) { tops[r] = maximum(tops[r], scores(r, t)); });
  // Lane r * (LANES / ROWS) and those behind it: row r's.
  const Floats top = join_rows(tops, maximum);
  // Nothing is visible yet: subtract 0, since -inf - -inf is NaN.
  const Floats pivot = select(top == -INFINITE, Floats{}, top);
  const Floats last = join_rows(before, maximum);
  const Floats shrink = select(last == top, all(1), exponential(last - pivot));
  each<0, ROWS>([&](auto r) { tops[r] = all(pivot[r * (LANES / ROWS)]); });
  for (int t = 0; t < SIZE; t += LANES)
    each<0, ROWS>([&](auto r) {
      const Floats weight = exponential(scores(r, t) - tops[r]);
      totals[r] += weight;
      store<LANES>(block.scores[r] + t, weight);
    });
  const Floats total = join_rows(totals, add<Floats>);
  each<0, ROWS>([&](auto r) {
    constexpr int LANE = r * (LANES / ROWS);
    auto& row = panel.rows[r];
    row.top = top[LANE];
    row.total = row.total * shrink[LANE] + total[LANE];
    if (shrink[LANE] == 1.0f) return;
    for (float& x : row.exact) x *= shrink[LANE];
    for (float& x : row.packed) x *= shrink[LANE];
  });
}

template <class A> void start_panel(const Pair<A>& pair, int64_t first, Panel<A>& panel) {
  for (int r = 0; r < A::ROWS; r++) {
    auto& row = panel.rows[r];
    row.top = -INFINITE;
    if (first + r < pair.a.rows) pair.read_query(first + r, pair.a.scale, row.query);
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
  Ahead ahead;
  each_run_read(
      pair, pair.keys, start, count, block.keys,
      [&](int64_t slot, int first, int n) {
        if constexpr (KEYS_IN_TILES<K>) tile_scores(pair, slot, first, n, panel, block, ahead);
        else if constexpr (K::DIRECT && K::BY_TOKEN) token_scores(pair, slot, first, n, panel, block);
        else if constexpr (K::DIRECT) channel_scores(pair, slot, first, n, panel, block);
      },
      [&](auto stride, auto* keys, int first, int n) {
        exact_scores<stride>(keys, first, n, panel, block);
      });
  for (int r = 0; r < A::ROWS; r++) {
    float* scores = block.scores[r];
    if (pair.a.softcap > 0) cap_scores(scores, count, pair.a.softcap);
    pair.template mask_scores<1>(start, count, first_row + r, scores);
  }
  softmax(block, count, panel);
  each_run_read(
      pair, pair.values, start, count, block.values,
      [&](int64_t slot, int first, int n) {
        if constexpr (V::DIRECT) {
          const uint16_t* values = pair.a.v.codes_at(pair.pair, slot);
          if constexpr (VALUES_IN_TILES<V>) {
            ValueBytes<A> bytes;
            // Tiles wait long for what was stored just now.
            bytes.put(values, n, ahead);
            tile_weights(pair, slot, first, n, block, ahead);
            tile_values(bytes, n, block, panel, ahead);
          } else {
            scale_weights(pair, slot, first, n, block);
            packed_values(values, first, n, block, panel);
          }
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
