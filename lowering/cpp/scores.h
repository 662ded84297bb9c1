// Scores of a block of tokens, for a few query rows.
#pragma once
#include "code_sums.h"
#include "integer_sums.h"

namespace {

template <class A> inline void put_scores(Floats scores, int token, Block<A>& block) {
  constexpr int TOKENS = Panel<A>::TOKENS;
  for (int r = 0; r < A::ROWS; r++)
    std::memcpy(&block.scores[r][token], (const float*)&scores + r * TOKENS, 4 * TOKENS);
}

// Scores of exact keys, STRIDE numbers apart, for tokens first ... of the block.
template <int STRIDE, class A, class Number>
void exact_scores(const Number* keys, int first, int count, const Panel<A>& panel, Block<A>& block) {
  constexpr int ROWS = A::ROWS, TOKENS = Panel<A>::TOKENS;
  for (int t = 0; t < count; t += TOKENS) {
    Floats sums[LANES]{};
    each_vector<A::K::DIM>([&](auto at, auto width) {
      Floats q[ROWS];
      each<0, ROWS>([&](auto r) { q[r] = load<Floats, LANES>(panel.rows[r].query + at); });
      each<0, TOKENS>([&](auto u) {
        const int64_t token = std::min<int>(t + u, count - 1);
        const Floats x = load_numbers<width>(keys + token * STRIDE + at);
        each<0, ROWS>([&](auto r) { sums[r * TOKENS + u] += x * q[r]; });
      });
    });
    put_scores(lane_sums(sums), first + t, block);
  }
}

template <class A> void arrange_query(Panel<A>& panel) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int TOKENS = Panel<A>::TOKENS;
  arrange_query(panel, panel.query);
  if constexpr (K::BY_TOKEN)
    each<0, A::ROWS>([&](auto r) {
      float sums[Keys::GROUPS]{};
      for (int d = 0; d < K::DIM; d++) sums[Keys::group(d)] += panel.rows[r].query[d];
      for (int g = 0; g < Keys::GROUPS; g++)
        for (int u = 0; u < TOKENS; u++) panel.sums[g][r * TOKENS + u] = sums[g];
    });
}

// Scores of packed keys in `count` slots from `slot` on, for tokens first ... of the block: groups
// are channels of one token.
// Flattened: compilers would make calls of parts of it, which take 3 to 8% of its time.
template <class A>
__attribute__((flatten)) void token_scores(
    const Pair<A>& pair, int64_t slot, int first, int count, const Panel<A>& panel,
    Block<A>& block) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int TOKENS = Panel<A>::TOKENS, BLOCK = Panel<A>::BLOCK;
  const K& k = pair.a.k;
  alignas(64) float scales[Keys::GROUPS][BLOCK], minima[Keys::GROUPS][BLOCK];
  for (int g = 0; g < Keys::GROUPS; g++)
    for (int t = 0; t < count; t += LANES) {
      const auto* place = k.qparams_at(pair.pair, slot) + g * k.capacity + t;
      const Affine affine = load_affine<typename K::Number>(place, std::min(count - t, LANES));
      __builtin_prefetch(place + BLOCK);
      store<LANES>(scales[g] + t, affine.scale);
      store<LANES>(minima[g] + t, affine.minimum);
    }
  Tile<Keys, SCORED<A>> tile;
  const uint16_t* keys = k.codes_at(pair.pair, slot);
  const auto repeated = [](const float* of_tokens) {
    return repeat<TOKENS>(load<Floats, TOKENS>(of_tokens));
  };
  for (int t = 0; t < count; t += SCORED<A>) {
    const uint16_t* codes = keys + t * Keys::WORDS;
    const auto scale_of = [&](int group, int u) { return scales[group] + t + u; };
    Floats sums[Query<A>::SETS];
    code_sums(tile.read(codes, count - t), panel.query, scale_of, sums);
    each<0, Query<A>::SETS>([&](auto set) {
      const int token = t + set * TOKENS;
      if constexpr (Keys::GROUPS == 1) sums[set] *= repeated(scales[0] + token);
      for (int g = 0; g < Keys::GROUPS; g++) sums[set] += panel.sums[g] * repeated(minima[g] + token);
      put_scores(sums[set], first + token, block);
    });
  }
}

// The same as token_scores, but groups are tokens of one channel.
template <class A>
__attribute__((flatten)) void channel_scores(
    const Pair<A>& pair, int64_t slot, int first, int count, const Panel<A>& panel,
    Block<A>& block) {
  using K = typename A::K;
  using Keys = typename K::Code;
  const K& k = pair.a.k;
  Tile<Keys, SCORED<A>> tile;
  const uint16_t* keys = k.codes_at(pair.pair, slot);
  // A group's query is scaled beside the products of the group before it: its divisions take long.
  Query<A> queries[2];
  for (int t = 0, next = 0, group = 0; t < count; group++) {
    const int end = next;
    if (end < count) {
      scale_query(k.qparams_at(pair.pair, slot + end), panel, queries[group % 2]);
      next = std::min<int64_t>(count, ((slot + end) / K::GROUP + 1) * K::GROUP - slot);
    }
    const Query<A>& query = queries[(group + 1) % 2];
    for (; t < end; t += SCORED<A>) {
      const uint16_t* codes = keys + t * Keys::WORDS;
      Floats scores[Query<A>::SETS];
      code_sums(tile.read(codes, end - t), query, nullptr, scores);
      each<0, Query<A>::SETS>([&](auto set) {
        put_scores(scores[set], first + t + set * Panel<A>::TOKENS, block);
      });
    }
    t = end;
  }
}

}  // namespace
