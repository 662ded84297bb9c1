// Attention of many query rows: a block of tokens is decoded once for all of them, then multiplied as
// matrices are.
#pragma once
#include "float_matrices.h"
#include "functions.h"
#include "lanes.h"
#include "tile_matrices.h"

namespace {

template <class A>
using Matrices = std::conditional_t<BFLOAT16_TILES<A>, TileMatrices<A>, FloatMatrices<A>>;

// The weighted sums of some query rows over some tokens. Rows lie side by side: they are the lanes of
// vectors.
template <class A> struct WidePanel {
  using Tokens = Matrices<A>;
  using Shapes = typename Tokens::Shapes;
  static constexpr int ROWS = Tokens::ROWS, BLOCK = Tokens::BLOCK;

  typename Tokens::Query query;
  alignas(64) typename Tokens::Sums out;
  alignas(64) float tops[ROWS], totals[ROWS];

  float top(int r) const { return tops[r]; }
  float total(int r) const { return totals[r]; }
  void add_values(int r, float factor, float* result) const {
    for (int d = 0; d < A::V::DIM; d++) result[d] += factor * out[d][r];
  }
};

template <class A> void start_panel(const Pair<A>& pair, int64_t first, WidePanel<A>& panel) {
  for (int r = 0; r < WidePanel<A>::ROWS; r++) {
    panel.tops[r] = -INFINITE;
    if (first + r < pair.a.rows) panel.query.put(pair, first + r, r);
  }
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
                  const Matrices<A>& tokens, WidePanel<A>& panel) {
  constexpr int ROWS = WidePanel<A>::ROWS;
  // Scores, then weights.
  alignas(64) float scores[WidePanel<A>::BLOCK][ROWS];
  tokens.template score<USED>(pair, panel.query, count, scores);
  if (pair.a.softcap > 0) cap_scores(scores[0], count * ROWS, pair.a.softcap);
  for (int r = 0; r < USED * LANES; r++)
    pair.template mask_scores<ROWS>(start, count, first_row + r, scores[0] + r);
  each<0, USED>([&](auto u) { softmax(scores, count, u * LANES, panel); });
  tokens.template add_values<USED>(scores, count, panel.out);
}

// Lets the panels that see one of the tokens start ... start + count attend to them.
template <class A>
void attend_block(const Pair<A>& pair, int64_t start, int count, WidePanel<A>* panels) {
  Matrices<A> tokens;
  bool read = false;
  for (int64_t row = 0; row < pair.a.rows; row += WidePanel<A>::ROWS, panels++) {
    if (!pair.template one_sees<WidePanel<A>::ROWS>(start, count, row)) continue;
    if (!read) tokens.read(pair, start, count);
    read = true;
    if (pair.a.rows - row > LANES) attend_panel<2>(pair, start, count, row, tokens, *panels);
    else attend_panel<1>(pair, start, count, row, tokens, *panels);
  }
}

}  // namespace
