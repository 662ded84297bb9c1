// Weighted sums of a block of values, for a few query rows.
#pragma once
#include "panel.h"

namespace {

// Vectors of values that are summed at once for all rows of a panel; they stay in registers.
template <class A> constexpr int SUMMED = std::max(1, A::SUMS / A::ROWS);

// Adds exact values, STRIDE numbers apart, with the weights of tokens first ... of the block.
template <int STRIDE, class A, class Number>
void exact_values(
    const Number* values, int first, int count, const Block<A>& block, Panel<A>& panel) {
  constexpr int ROWS = A::ROWS, DIM = A::V::DIM, STEP = SUMMED<A> * LANES;
  auto* rows = panel.rows;
  each<0, round_up(DIM, STEP) / STEP>([&](auto part) {
    constexpr int FROM = part * STEP, SIZE = std::min(DIM - FROM, STEP);
    Floats out[SUMMED<A>][ROWS];
    each_vector<SIZE>([&](auto at, auto) {
      each<0, ROWS>([&](auto r) {
        out[at / LANES][r] = load<Floats, LANES>(rows[r].exact + FROM + at);
      });
    });
    for (int t = 0; t < count; t++) {
      const Number* value = values + (int64_t)t * STRIDE + FROM;
      each_vector<SIZE>([&](auto at, auto width) {
        const Floats x = load_numbers<width>(value + at);
        each<0, ROWS>([&](auto r) { out[at / LANES][r] += x * all(block.scores[r][first + t]); });
      });
    }
    each_vector<SIZE>([&](auto at, auto) {
      each<0, ROWS>([&](auto r) {
        store<LANES>(rows[r].exact + FROM + at, out[at / LANES][r]);
      });
    });
  });
}

// The scales of `count` slots from `slot` on go into the weights of tokens first ... of the block;
// minima are summed apart, for all channels of a group at once.
template <class A>
void scale_weights(const Pair<A>& pair, int64_t slot, int first, int count, Block<A>& block) {
  using V = typename A::V;
  constexpr int ROWS = A::ROWS;
  const V& v = pair.a.v;
  for (int g = 0; g < V::Code::GROUPS; g++) {
    Floats base[ROWS]{};
    for (int t = 0; t < count; t += LANES) {
      const auto* place = v.qparams_of(pair.pair) + g * v.capacity + slot + t;
      const Affine affine = load_affine<typename V::Number>(place, std::min(count - t, LANES));
      __builtin_prefetch(place + Block<A>::SIZE);
      for (int r = 0; r < ROWS; r++) {
        // The weights of tokens behind count belong to exact values, or, where slots are used again,
        // to none.
        Floats weight = load<Floats, LANES>(block.scores[r] + first + t);
        if constexpr (V::SLIDING) weight = select(lane_numbers() < count - t, weight, Floats{});
        base[r] += weight * affine.minimum;
        store<LANES>(block.weights[r][g] + first + t, weight * affine.scale);
      }
    }
    for (int r = 0; r < ROWS; r++) block.base[r][g] = sum(base[r]);
  }
}

// Adds packed values in `count` slots from `slot` on, for tokens first ... of the block.
template <class A>
void packed_values(
    const uint16_t* codes, int64_t slot, int first, int count, const Block<A>& block,
    Panel<A>& panel) {
  using Values = typename A::V::Code;
  using Codes = typename Values::Codes;
  constexpr int ROWS = A::ROWS, BLOCK = Block<A>::SIZE, HELD = Values::TOKENS;
  constexpr int PLANES = std::min(SUMMED<A>, Codes::DEPTH);
  constexpr int PARTS = Codes::CHAINS * round_up(Codes::DEPTH, PLANES) / PLANES;
  each_vector<Values::WIDTH>([&](auto at, auto width) {
    each<0, PARTS>([&](auto part) {
      constexpr int CHAIN = part % Codes::CHAINS, STEP = part / Codes::CHAINS * PLANES;
      constexpr int HERE = std::min(PLANES, Codes::DEPTH - STEP);
      Floats out[HERE][ROWS]{};
      const uint16_t* values = codes + slot * Values::WORDS;
      // Each of these loops asks for its share, spread over its tokens: at once, lines would wait for
      // each other.
      constexpr int SHARES = round_up(Values::WIDTH, LANES) / LANES * PARTS;
      constexpr int SHARE = at / LANES * PARTS + part;
      const uint16_t* ahead = values + (BLOCK * SHARES + SHARE * count) * Values::WORDS / SHARES;
      const auto add = [&](const uint16_t* tokens, int place) __attribute__((always_inline)) {
        Codes words;
        constexpr int SIZE = HELD > 1 ? LANES : (int)width;
        words.template start<CHAIN, STEP, at, SIZE>(tokens, Values::WIDTH);
        each<0, HERE>([&](auto j) {
          constexpr int PLANE = Codes::plane(CHAIN, STEP + j);
          using Span = typename Values::template Span<PLANE, at>;
          const Floats code = shifted_code<PLANE>(words);
          words.next();
          each<0, ROWS>([&](auto r) {
            out[j][r] += code * spread<Span>([&](int group) {
              return stretch<HELD>(block.weights[r][group] + place);
            });
          });
        });
      };
      int t = 0;
      for (; t + HELD <= count; t += HELD, values += HELD * Values::WORDS) {
        Values::template prefetch<SHARES>(ahead + t * Values::WORDS / SHARES);
        add(values, first + t);
      }
      if (t < count) {
        // What is beyond may be nobody's memory; its weights count for nothing.
        uint16_t rest[HELD * Values::WORDS]{};
        std::memcpy(rest, values, (count - t) * Values::WORDS * sizeof *values);
        add(rest, first + t);
      }
      each<0, HERE>([&](auto j) {
        constexpr int PLANE = Codes::plane(CHAIN, STEP + j);
        using Span = typename Values::template Span<PLANE, at>;
        each<0, ROWS>([&](auto r) {
          Floats base = spread<Span>([&](int g) { return all(block.base[r][g]); });
          if constexpr (HELD > 1) base = select(lane_numbers() < Values::WIDTH, base, Floats{});
          float* total = panel.rows[r].packed + PLANE * Values::PADDED + at;
          const Floats added = base + out[j][r] * unit<Codes>(PLANE);
          store<LANES>(total, load<Floats, LANES>(total) + added);
        });
      });
    });
  });
}

}  // namespace
