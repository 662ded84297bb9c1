// Weighted sums of a block of values, for a few query rows.
#pragma once
#include "weights.h"

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
  Floats tops[V::Code::GROUPS][ROWS]{};
  for (int g = 0; g < V::Code::GROUPS; g++)
    scale_group(pair, slot, g, first, count, block, tops[g], [&](auto r, int t, Floats weight) {
      store<LANES>(block.weights[r][g] + first + t, weight);
    });
  if constexpr (IN_INTEGERS<V>)
    for (int g = 0; g < V::Code::GROUPS; g++) {
      const Steps steps(tops[g], limit_of(Block<A>::SIZE, V::Code::Codes::MAX_LEFT));
      each<0, ROWS>([&](auto r) {
        block.steps[r][g] = steps.step(r);
        steps.store(r, block.integers[r][g] + first, block.weights[r][g] + first,
                    round_up(count, LANES));
      });
    }
}

// Sums of codes times weights, of one token of each vector's place at a time.
template <class A> struct FloatSums {
  using Code = typename A::V::Code;
  using Codes = typename Code::Codes;
  static constexpr int TOKENS = Code::TOKENS;

  Codes words;

  template <int CHAIN, int STEP, int AT, int SIZE, int VECTORS>
  static void start(const uint16_t* tokens, FloatSums (&sums)[VECTORS]) {
    each<0, VECTORS>([&](auto v) {
      sums[v].words.template start<CHAIN, STEP, AT + v * LANES, TOKENS == 1 ? SIZE : LANES>(
          tokens, Code::WIDTH);
    });
  }
  template <int PLANE> Floats next() {
    const Floats code = shifted_code<PLANE>(words);
    words.next();
    return code;
  }
  static const auto& weights(const Block<A>& block) { return block.weights; }
  static Floats read(const float* weights) { return stretch<TOKENS>(weights); }
  static Floats add(Floats sums, Floats codes, Floats weights) { return sums + codes * weights; }
  static float step(const Block<A>&, int, int) { return 1; }
  static constexpr float unit(int plane) { return ::unit<Codes>(plane); }
  template <int PART, int VECTORS> static Floats ordered(const Floats (&x)[VECTORS]) { return x[PART]; }
};

// The same of two tokens, in integers.
template <class A> struct IntegerSums {
  using Code = typename A::V::Code;
  static constexpr int TOKENS = 2 * Code::TOKENS;

  Ints words;

  template <int, int, int AT, int, int VECTORS>
  static void start(const uint16_t* tokens, IntegerSums (&sums)[VECTORS]) {
    if constexpr (VECTORS == 2) {
      constexpr auto HALF = std::make_integer_sequence<int, 2 * LANES>{};
      const auto one = load<Int16s, 2 * LANES>(tokens + AT);
      const auto other = load<Int16s, 2 * LANES>(tokens + AT + Code::WORDS);
      sums[0].words = unpack_pairs<0>(one, other, HALF);
      sums[1].words = unpack_pairs<4>(one, other, HALF);
    } else {
      sums[0].words = load_pairs<Code::WIDTH>(tokens + AT, Code::WORDS);
    }
  }
  template <int PLANE> Ints next() {
    return Code::Codes::template pairs<PLANE, Code::Codes::left(PLANE)>(words);
  }
  static const auto& weights(const Block<A>& block) { return block.integers; }
  static Ints read(const int16_t* weights) { return stretch_pairs<Code::TOKENS>(weights); }
  static Ints add(Ints sums, Ints codes, Ints weights) { return add_products(sums, codes, weights); }
  static float step(const Block<A>& block, int row, int group) { return block.steps[row][group]; }
  static constexpr float unit(int plane) { return 1.0f / (1 << Code::Codes::left(plane)); }
  template <int PART, int VECTORS> static Floats ordered(const Floats (&x)[VECTORS]) {
    if constexpr (VECTORS == 2) return in_word_order<PART>(x, std::make_integer_sequence<int, LANES>{});
    else return x[0];
  }
};

// Adds `count` packed values, whose words these are, for tokens first ... of the block.
// Flattened: compilers would keep the sums in memory.
template <class A>
__attribute__((flatten)) void packed_values(
    const uint16_t* values, int first, int count, const Block<A>& block, Panel<A>& panel) {
  using V = typename A::V;
  using Values = typename V::Code;
  using Codes = typename Values::Codes;
  using Sums = std::conditional_t<IN_INTEGERS<V>, IntegerSums<A>, FloatSums<A>>;
  using Sum = decltype(Sums::read(nullptr));
  constexpr int ROWS = A::ROWS, BLOCK = Block<A>::SIZE, TOKENS = Sums::TOKENS;
  // Vectors beside each other that have the same weights: Intel's processors multiply one vector a
  // cycle by a number that is read for it alone, and two by one in a register.
  constexpr int VECTORS = SUMMED<A> > 1 && Values::in_runs(2 * LANES) ? 2 : 1;
  constexpr int PLANES = std::min(SUMMED<A> / VECTORS, Codes::DEPTH);
  constexpr int PARTS = Codes::CHAINS * round_up(Codes::DEPTH, PLANES) / PLANES;
  constexpr int WIDE = VECTORS * LANES, COUNT = round_up(Values::WIDTH, WIDE) / WIDE;
  each<0, COUNT>([&](auto some) {
    each<0, PARTS>([&](auto part) {
      constexpr int AT = some * WIDE, WIDTH = std::min(LANES, Values::WIDTH - AT);
      constexpr int CHAIN = part % Codes::CHAINS, STEP = part / Codes::CHAINS * PLANES;
      constexpr int HERE = std::min(PLANES, Codes::DEPTH - STEP);
      Sum out[HERE * VECTORS][ROWS]{};
      // Each of these loops asks for its share, spread over its tokens: at once, lines would wait for
      // each other.
      constexpr int SHARES = COUNT * PARTS, SHARE = some * PARTS + part;
      const uint16_t* ahead = values + (BLOCK * SHARES + SHARE * count) * Values::WORDS / SHARES;
      constexpr int STRIDE = sizeof Sums::weights(block)[0][0] / sizeof Sums::weights(block)[0][0][0];
      const auto* weights = Sums::weights(block)[0][0] + first;
      const auto add = [&](const uint16_t* tokens) __attribute__((always_inline)) {
        Sums sums[VECTORS];
        Sums::template start<CHAIN, STEP, AT, WIDTH>(tokens, sums);
        each<0, HERE>([&](auto j) {
          constexpr int PLANE = Codes::plane(CHAIN, STEP + j);
          using Span = typename Values::template Span<PLANE, AT>;
          Sum codes[VECTORS];
          each<0, VECTORS>([&](auto v) { codes[v] = sums[v].template next<PLANE>(); });
          each<0, ROWS>([&](auto r) {
            const Sum weight = spread<Span>([&](int group) {
              return Sums::read(weights + (r * Values::GROUPS + group) * STRIDE);
            });
            each<0, VECTORS>([&](auto v) {
              out[j * VECTORS + v][r] = Sums::add(out[j * VECTORS + v][r], codes[v], weight);
            });
          });
        });
      };
      int t = 0;
      for (; t + TOKENS <= count; t += TOKENS, weights += TOKENS) {
        Values::template prefetch<SHARES>(ahead + t * Values::WORDS / SHARES);
        add(values + t * Values::WORDS);
      }
      if (t < count) {
        // The weights of zeros count for nothing.
        Tile<Values, TOKENS> tile;
        add(tile.read(values + t * Values::WORDS, count - t));
      }
      each<0, HERE>([&](auto j) {
        constexpr int PLANE = Codes::plane(CHAIN, STEP + j);
        using Span = typename Values::template Span<PLANE, AT>;
        each<0, ROWS>([&](auto r) {
          Floats base = spread<Span>([&](int g) { return all(block.base[r][g]); });
          if constexpr (Values::TOKENS > 1)
            base = select(lane_numbers() < Values::WIDTH, base, Floats{});
          const Floats step = spread<Span>([&](int g) { return all(Sums::step(block, r, g)); });
          Floats added[VECTORS];
          each<0, VECTORS>([&](auto v) {
            const Floats sum = __builtin_convertvector(out[j * VECTORS + v][r], Floats) * Sums::unit(PLANE);
            added[v] = base + sum * step;
          });
          each<0, VECTORS>([&](auto v) {
            float* total = panel.rows[r].packed + PLANE * Values::PADDED + AT + v * LANES;
            store<LANES>(total, load<Floats, LANES>(total) + Sums::template ordered<v>(added));
          });
        });
      });
    });
  });
}

}  // namespace
