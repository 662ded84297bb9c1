// Softmax attention of query rows over a cache: see kvpass/ops/attention.py.
#pragma once
#include "pair.h"

#include <cmath>

namespace {

// See gemv.h for up to A::ROWS query rows, gemm.h for any number of them.
template <class A> struct Panel;
template <class A> struct WidePanel;
template <class A>
using PanelOf = typename std::conditional_t<(A::ROWS > 0), Panel<A>, WidePanel<A>>;

// Lets all query rows of a (batch, KV head) attend to the tokens start ... stop.
template <class A>
void attend(const Pair<A>& pair, int64_t start, int64_t stop, PanelOf<A>* panels) {
  constexpr int ROWS = PanelOf<A>::ROWS, BLOCK = PanelOf<A>::BLOCK;
  [[maybe_unused]] const typename PanelOf<A>::Shapes shapes;
  for (int64_t row = 0; row < pair.a.rows; row += ROWS) start_panel(pair, row, panels[row / ROWS]);
  for (int64_t t = start, next; t < stop; t = next) {
    // Sinks are blocks of their own.
    next = t < pair.SINKS ? std::min<int64_t>(t + BLOCK, pair.SINKS) : t + BLOCK;
    attend_block(pair, t, std::min(next, stop) - t, panels);
  }
}

// The score that takes weight and has no value.
template <class A> float sink_of(const A& a, int64_t head) {
  if (a.sinks_kind == NONE) return -INFINITE;
  return with_numbers(a.sinks_kind, a.sinks, [&](auto* sinks) { return to_float(sinks[head]); });
}

// What a query row has summed over earlier segments: values [V::DIM], the largest score, the total.
template <class A> float* carried_of(const A& a, int64_t row) {
  if constexpr (A::SEGMENT) return a.carried + row * (A::V::DIM + 2);
  return nullptr;
}

// Weighs the parts of row r of a panel together, and what is carried to them; parts lie `stride`
// panels apart. No token seen gives 0.
template <class A>
void merge(const A& a, const PanelOf<A>* parts, int64_t splits, int64_t stride, int r, float sink,
           int64_t row) {
  constexpr int DIM = A::V::DIM;
  alignas(64) float result[round_up(DIM, LANES)]{};
  float* carried = carried_of(a, row);
  bool first = true;
  if constexpr (A::SEGMENT) first = a.segment == 0;
  const float before = first ? sink : carried[DIM];
  float top = before;
  for (int64_t s = 0; s < splits; s++) top = std::max(top, parts[s * stride].top(r));
  const float shrink = before == -INFINITE ? 0 : std::exp(before - top);
  float total = first ? shrink : shrink * carried[DIM + 1];
  if (!first)
    for (int d = 0; d < DIM; d++) result[d] = shrink * carried[d];
  for (int64_t s = 0; s < splits; s++) {
    const PanelOf<A>& part = parts[s * stride];
    // It saw no token: the largest score weighs 1. Scores that are no numbers leave none in the total.
    if (part.total(r) == 0) continue;
    const float factor = std::exp(part.top(r) - top);
    total += part.total(r) * factor;
    part.add_values(r, factor, result);
  }
  // Tokens that are stored as they are are the last segment.
  if constexpr (A::SEGMENT && A::K::PACKED) {
    std::copy(result, result + DIM, carried);
    carried[DIM] = top;
    carried[DIM + 1] = total;
  } else {
    const float inverse = total == 0 ? 0 : 1 / total;
    auto* out = a.out + row * (DIM + A::PARTIAL);
    each_vector<DIM>([&](auto at, auto width) {
      const Floats x = load<Floats, LANES>(result + at) * inverse;
      store_numbers<width>(out + at, x);
    });
    // The weight of these tokens among others.
    if constexpr (A::PARTIAL) out[DIM] = total == 0 ? -INFINITE : top + std::log(total);
  }
}

// Parts of the tokens of a pair that are attended to side by side, of at least eight blocks each.
template <class A> int64_t splits_of(const A& a, int64_t blocks, int64_t pairs) {
  int64_t wanted = a.threads > 1 ? (4 * a.threads + pairs - 1) / pairs : 1;
  // All heads rotate some tokens before others: their cosines and sines stay in the cache. Sums of many
  // rows would take more of it.
  if (A::K::ROPE_CHANNELS > 0 && a.rows <= PanelOf<A>::ROWS)
    wanted = std::max((blocks * PanelOf<A>::BLOCK + 1023) / 1024,
                      (4 * a.threads + pairs - 1) / pairs);
  return std::max<int64_t>(1, std::min(wanted, blocks / 8));
}

template <class A> void attention(const A& a) {
  using Panel = PanelOf<A>;
  constexpr int ROWS = Panel::ROWS, BLOCK = Panel::BLOCK;
  constexpr bool ROPE = A::K::ROPE_CHANNELS > 0;
  const int64_t pairs = a.k.batch * a.k.heads, count = (a.rows + ROWS - 1) / ROWS;
  int64_t longest = 0;
  for (int64_t p = 0; p < pairs; p += a.k.heads) {
    const Pair<A> pair(a, p);
    longest = std::max(longest, pair.tokens - pair.begin());
  }
  const int64_t blocks = (longest + BLOCK - 1) / BLOCK, splits = splits_of(a, blocks, pairs);
  const int64_t share = (blocks + splits - 1) / splits * BLOCK;
  std::vector<Panel> panels(pairs * splits * count);
  // Waking threads costs more than so little work.
  const int threads = blocks * pairs * a.rows <= 16 ? 1 : a.threads;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < pairs * splits; i++) {
      const int64_t task = ROPE ? i % pairs * splits + i / pairs : i, part = task % splits;
      const Pair<A> pair(a, task / splits);
      const int64_t start = pair.begin() + part * share;
      const int64_t from = pair.SINKS && !part ? std::min(start, pair.first_of(0)) : start;
      attend(pair, from, std::min(start + share, pair.tokens), panels.data() + task * count);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pairs * a.rows; i++) {
      const int64_t row = i % a.rows;
      const Panel* parts = panels.data() + i / a.rows * splits * count + row / ROWS;
      const Pair<A> pair(a, i / a.rows);
      merge(a, parts, splits, count, row % ROWS, sink_of(a, pair.head_of(row)), pair.output_of(row));
    }
  }
}

}  // namespace
