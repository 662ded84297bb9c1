// Attention of many query rows: a block of tokens is decoded once for all of them, then multiplied as
// matrices are.
#pragma once
#include "block.h"
#include "functions.h"
#include "lanes.h"

namespace {

// The weighted sums of some query rows over some tokens. Rows lie side by side: they are the lanes of
// vectors.
template <class A> struct WidePanel {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = 2 * LANES;
  // Tokens of a pass.
  static constexpr int BLOCK = 96;
  // Vectors that are summed at once; they stay in registers.
  static constexpr int SUMMED = A::SUMS * 3 / 2;
  static_assert(BLOCK % SUMMED == 0);
  struct Shapes {};

  alignas(64) float query[K::DIM][ROWS];
  alignas(64) float out[V::DIM][ROWS];
  alignas(64) float tops[ROWS], totals[ROWS];

  float top(int r) const { return tops[r]; }
  float total(int r) const { return totals[r]; }
  void add_values(int r, float factor, float* result) const {
    for (int d = 0; d < V::DIM; d++) result[d] += factor * out[d][r];
  }
};

// Decoded tokens, and scores, then weights, of a panel for them.
template <class A> struct WideBlock {
  static constexpr int SIZE = WidePanel<A>::BLOCK, ROWS = WidePanel<A>::ROWS;

  alignas(64) float keys[SIZE * STRIDE<typename A::K>];
  alignas(64) float values[SIZE * STRIDE<typename A::V>];
  alignas(64) float scores[SIZE][ROWS];
};

template <class A> void start_panel(const Pair<A>& pair, int64_t first, WidePanel<A>& panel) {
  constexpr int DIM = A::K::DIM;
  alignas(64) float query[round_up(DIM, LANES)];
  for (int r = 0; r < WidePanel<A>::ROWS; r++) {
    panel.tops[r] = -INFINITE;
    if (first + r >= pair.a.rows) continue;
    pair.read_query(first + r, query);
    for (int d = 0; d < DIM; d++) panel.query[d][r] = query[d];
  }
}

// sums[i] += the sum over j < depth of left[i * I + j * J] * right[j], for COUNT rows of USED vectors.
template <int COUNT, int USED, int I, int J, bool ADDS, int ROWS>
inline void multiply(const float* left, const float (*right)[ROWS], int depth, float (*sums)[ROWS]) {
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

// Scores become weights; what the rows have summed so far is scaled to their new maxima.
template <class A, int ROWS>
void softmax(float (*scores)[ROWS], int count, int at, WidePanel<A>& panel) {
  const Floats before = load<Floats, LANES>(panel.tops + at);
  Floats top = before, total{};
  for (int t = 0; t < count; t++) top = maximum(top, load<Floats, LANES>(scores[t] + at));
  // Nothing is visible yet: subtract 0, since -inf - -inf is NaN.
  const Floats pivot = select(top == -INFINITE, Floats{}, top);
  for (int t = 0; t < count; t++) {
    const Floats weight = exponential(load<Floats, LANES>(scores[t] + at) - pivot);
    total += weight;
    store<LANES>(scores[t] + at, weight);
  }
  const Floats shrink = exponential(before - pivot);
  store<LANES>(panel.tops + at, top);
  store<LANES>(panel.totals + at, load<Floats, LANES>(panel.totals + at) * shrink + total);
  if (sum(shrink) == LANES) return;
  for (float* out : panel.out) store<LANES>(out + at, load<Floats, LANES>(out + at) * shrink);
}

// USED: vectors that hold rows.
template <int USED, class A>
void attend_panel(const Pair<A>& pair, int64_t start, int count, int64_t first_row,
                  WideBlock<A>& block, WidePanel<A>& panel) {
  using K = typename A::K;
  using V = typename A::V;
  constexpr int COUNT = WidePanel<A>::SUMMED / USED, ROWS = WidePanel<A>::ROWS;
  // Behind `count` there may be anything, which is not looked at.
  for (int t = 0; t < count; t += COUNT)
    multiply<COUNT, USED, STRIDE<K>, 1, false>(
        block.keys + t * STRIDE<K>, panel.query, K::DIM, block.scores + t);
  if (pair.a.softcap > 0) cap_scores(block.scores[0], count * ROWS, pair.a.softcap);
  for (int r = 0; r < USED * LANES; r++)
    pair.template mask_scores<ROWS>(start, count, first_row + r, block.scores[0] + r);
  each<0, USED>([&](auto u) { softmax(block.scores, count, u * LANES, panel); });
  const int gone = pair.gone(start, count);
  const float* values = block.values + gone * STRIDE<V>;
  int d = 0;
  for (; d + COUNT <= V::DIM; d += COUNT)
    multiply<COUNT, USED, 1, STRIDE<V>, true>(
        values + d, block.scores + gone, count - gone, panel.out + d);
  if constexpr (V::DIM % COUNT > 0)
    multiply<V::DIM % COUNT, USED, 1, STRIDE<V>, true>(
        values + d, block.scores + gone, count - gone, panel.out + d);
}

// Lets the panels that see one of the tokens start ... start + count attend to them.
template <class A>
void attend_block(const Pair<A>& pair, int64_t start, int count, WidePanel<A>* panels) {
  WideBlock<A> block;
  bool decoded = false;
  for (int64_t row = 0; row < pair.a.rows; row += WidePanel<A>::ROWS, panels++) {
    if (!pair.template one_sees<WidePanel<A>::ROWS>(start, count, row)) continue;
    if (!decoded) {
      decode_tokens(pair, pair.keys, start, count, block.keys);
      decode_tokens(pair, pair.values, start, count, block.values);
    }
    decoded = true;
    if (pair.a.rows - row > LANES) attend_panel<2>(pair, start, count, row, block, *panels);
    else attend_panel<1>(pair, start, count, row, block, *panels);
  }
}

}  // namespace
