// A linear layer of few tokens: see kvpass/ops/linear.py. Memory is what it waits for: the weight is
// read once, for all tokens.
#pragma once
#include "lanes.h"
#include "numbers.h"

namespace {

// Outputs first ... first + ROWS of TOKENS tokens from token `from` on; those from a.outputs on are
// not there. Few have several sums each, which hide how long an addition takes.
template <int ROWS, int TOKENS, class A>
void linear_rows(const A& a, const float* tokens, int64_t first, int from) {
  constexpr int SUMS = ROWS > 1 ? 1 : TOKENS > 1 ? 2 : 4, STEP = SUMS * LANES;
  const float* x = tokens + from * a.inputs;
  const typename A::Weight* rows[ROWS];
  for (int r = 0; r < ROWS; r++)
    rows[r] = a.weight + std::min<int64_t>(first + r, a.outputs - 1) * a.inputs;
  Floats sums[ROWS][TOKENS][SUMS]{};
  int64_t i = 0;
  for (; i + STEP <= a.inputs; i += STEP) {
    each<0, SUMS>([&](auto s) {
      Floats numbers[TOKENS];
      each<0, TOKENS>([&](auto t) {
        numbers[t] = load<Floats, LANES>(x + t * a.inputs + i + s * LANES);
      });
      each<0, ROWS>([&](auto r) {
        const Floats w = load_numbers<LANES>(rows[r] + i + s * LANES);
        each<0, TOKENS>([&](auto t) { sums[r][t][s] += w * numbers[t]; });
      });
    });
  }
  Floats vectors[LANES]{};
  each<0, ROWS>([&](auto r) {
    each<0, TOKENS>([&](auto t) {
      each<0, SUMS>([&](auto s) { vectors[r * TOKENS + t] += sums[r][t][s]; });
    });
  });
  const Floats totals = lane_sums(vectors);
  for (int r = 0; r < std::min<int64_t>(ROWS, a.outputs - first); r++) {
    for (int t = 0; t < TOKENS; t++) {
      float total = totals[r * TOKENS + t];
      for (int64_t j = i; j < a.inputs; j++) total += to_float(rows[r][j]) * x[t * a.inputs + j];
      if (a.scale != nullptr) total *= a.scale[first + r];
      if (a.bias != nullptr) total += to_float(a.bias[first + r]);
      store_numbers<1>(a.out + (from + t) * a.outputs + first + r, all(total));
    }
  }
}

// Tokens of which the sums of four rows fit into the registers: the first cache holds these rows for
// the next ones.
constexpr int TILE = 4;

template <int ROWS, class A> void linear_blocks(const A& a, const float* x) {
  constexpr int TILES = (A::TOKENS + TILE - 1) / TILE;
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t block = 0; block < (a.outputs + ROWS - 1) / ROWS; block++)
    each<0, TILES>([&](auto tile) {
      constexpr int FROM = A::TOKENS * tile / TILES, TO = A::TOKENS * (tile + 1) / TILES;
      linear_rows<ROWS, TO - FROM>(a, x, block * ROWS, FROM);
    });
}

template <class A> void linear(const A& a) {
  using Scalar = typename A::Element;
  std::vector<float> wide;
  const float* x;
  if constexpr (std::is_same_v<Scalar, float>) {
    x = a.x;
  } else {
    const int64_t count = A::TOKENS * a.inputs;
    wide.resize(count);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store<LANES>(&wide[i], load_numbers<LANES>(a.x + i));
    for (; i < count; i++) wide[i] = to_float(a.x[i]);
    x = wide.data();
  }
  // Memory is fastest in one stream. Tokens that the first cache does not hold are read for several
  // rows at a time.
  constexpr int64_t HELD = 8192;
  if (A::TOKENS == 1 || (A::TOKENS <= TILE && A::TOKENS * a.inputs <= HELD)) linear_blocks<1>(a, x);
  else linear_blocks<LANES / 4>(a, x);
}

}  // namespace
