// A linear layer of few tokens: see kvpass/ops/linear.py. Memory is what it waits for: the weight is
// read once, for all tokens.
#pragma once
#include "lanes.h"
#include "numbers.h"

namespace {

// Outputs first ... first + ROWS of all tokens; those from a.outputs on are not there. Few have
// several sums each, which hide how long an addition takes.
template <int ROWS, class A> void linear_rows(const A& a, const float* x, int64_t first) {
  constexpr int SUMS = ROWS > 1 ? 1 : A::TOKENS > 1 ? 2 : 4, STEP = SUMS * LANES;
  const typename A::Weight* rows[ROWS];
  for (int r = 0; r < ROWS; r++)
    rows[r] = a.weight + std::min<int64_t>(first + r, a.outputs - 1) * a.inputs;
  Floats sums[ROWS][A::TOKENS][SUMS]{};
  int64_t i = 0;
  for (; i + STEP <= a.inputs; i += STEP) {
    each<0, ROWS>([&](auto r) {
      each<0, SUMS>([&](auto s) {
        const Floats w = load_numbers<LANES>(rows[r] + i + s * LANES);
        each<0, A::TOKENS>([&](auto t) {
          sums[r][t][s] += w * load<Floats, LANES>(x + t * a.inputs + i + s * LANES);
        });
      });
    });
  }
  for (int r = 0; r < std::min<int64_t>(ROWS, a.outputs - first); r++) {
    for (int t = 0; t < A::TOKENS; t++) {
      Floats all_sums{};
      for (const Floats& part : sums[r][t]) all_sums += part;
      float total = sum(all_sums);
      for (int64_t j = i; j < a.inputs; j++) total += to_float(rows[r][j]) * x[t * a.inputs + j];
      if (a.scale != nullptr) total *= a.scale[first + r];
      if (a.bias != nullptr) total += to_float(a.bias[first + r]);
      store_numbers<1>(a.out + t * a.outputs + first + r, all(total));
    }
  }
}

template <int ROWS, class A> void linear_blocks(const A& a, const float* x) {
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t block = 0; block < (a.outputs + ROWS - 1) / ROWS; block++)
    linear_rows<ROWS>(a, x, block * ROWS);
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
  if (A::TOKENS == 1 || A::TOKENS * a.inputs <= HELD) linear_blocks<1>(a, x);
  else linear_blocks<LANES / 4>(a, x);
}

}  // namespace
