// Weighted sums of a block of values, for a few query rows, by tiles of bytes.
#pragma once
#include "ahead.h"
#include "weights.h"

namespace {

// What scale_group finds, for all groups, as digits: those of no token are 0.
template <class A>
void tile_weights(const Pair<A>& pair, int64_t slot, int first, int count, Block<A>& block,
                  Ahead& ahead) {
  constexpr int COUNT = DIGITS<A>, ROWS = A::ROWS, SIZE = Block<A>::SIZE;
  constexpr int GROUPS = A::V::Code::GROUPS;
  alignas(64) float weights[ROWS][SIZE];
  for (int t = round_up(count, LANES); t < round_up(count, TILE_TOKENS); t += LANES)
    each<0, ROWS>([&](auto r) { store<LANES>(weights[r] + t, Floats{}); });
  for (int g = 0; g < GROUPS; g++) {
    keep_tiles_awake();
    Floats tops[ROWS];
    scale_group(pair, slot, g, first, count, block, tops, [&](auto r, int t, Floats weight) {
      store<LANES>(weights[r] + t, weight);
    });
    const Steps steps(tops, DIGITS_LIMIT<COUNT>);
    each<0, ROWS>([&](auto r) {
      block.steps[r][g] = steps.step(r);
      const Floats by = all(steps.inverse[r * (LANES / ROWS)]);
      ahead.ask(LINES<typename A::V, SIZE> * 7 / 10 / (ROWS * GROUPS));
      for (int t = 0; t < count; t += TILE_TOKENS) {
        Ints x[4];
        each<0, 4>([&](auto i) {
          x[i] = offset_integers<COUNT>(load<Floats, LANES>(weights[r] + t + i * LANES), by);
        });
        store_digits<COUNT>(x, block.digits[g][r] + t, ROWS * SIZE);
      }
    });
  }
}

// The low bytes of four tokens' words, or the high ones, in the four bytes of a lane: lane i
// has word i / 4 * 8 + FIRST + i % 4.
template <bool HIGH, int FIRST, int... I>
inline Ints join_bytes(const Int16s (&x)[4], std::integer_sequence<int, I...> half) {
  const auto pair = [](Int16s one, Int16s other) {
    if constexpr (HIGH) return (Int16s)blend(0x00ff00ff, (Ints)((Words)one >> 8), (Ints)other);
    else return (Int16s)blend(0x00ff00ff, (Ints)one, (Ints)((Words)other << 8));
  };
  return unpack_pairs<FIRST>(pair(x[0], x[1]), pair(x[2], x[3]), half);
}

// Of two vectors of join_bytes, FIRST = 0 and 4, of COUNT tokens each, all words of one token, or of two
// of four.
template <int COUNT, int PART, int... I>
inline Ints rows_of(Ints low, Ints high, std::integer_sequence<int, I...>) {
  constexpr int SIZE = LANES / COUNT, FROM = PART * LANES / 2;
  return SHUFFLE(low, high, (FROM + I / (2 * SIZE) * SIZE + I % SIZE + I / SIZE % 2 * LANES));
}

// The order of words of two tokens in a row of those.
template <int... I> inline Floats in_halves(Floats x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I / 8 * 4 + I % 4 + I / 4 % 2 * (LANES / 2)));
}

// The bytes of a block of tokens' words: rows of tiles, each of four tokens that are a quarter of a tile
// apart.
template <class A> struct ValueBytes {
  using V = typename A::V;
  using Values = typename V::Code;
  static constexpr int SIZE = Block<A>::SIZE, WIDTH = Values::WIDTH, HALF = Values::COUNT / 2;
  // Tiles of a plane.
  static constexpr int WIDE = std::max(1, WIDTH / LANES);
  alignas(64) uint8_t planes[Values::COUNT][WIDE][SIZE / 4][TILE_BYTES];

  void put(const uint16_t* values, int count, Ahead& ahead) {
    constexpr auto WORD = std::make_integer_sequence<int, 2 * LANES>{};
    constexpr int TOKENS = HELD<Values>, ROWS = SIZE / 4;
    Tile<Values, TILE_TOKENS> tile;
    const uint16_t* words = nullptr;
    ahead.add(values + SIZE * Values::WORDS, LINES<V, SIZE>);
    for (int row = 0; row < round_up(count, TILE_TOKENS) / 4; row += TOKENS) {
      const int at = row % TILE_ROWS, t = 4 * (row - at);
      if (!at) {
        words = tile.read(values + t * Values::WORDS, count - t);
        keep_tiles_awake();
      }
      ahead.ask(LINES<V, SIZE> * TOKENS / 2 / ROWS);
      each<0, round_up(WIDTH, 2 * LANES) / (2 * LANES)>([&](auto line) {
        Int16s x[4];
        each<0, 4>([&](auto i) {
          const uint16_t* place = words + (at + i * TILE_ROWS) * Values::WORDS + line * 2 * LANES;
          std::memcpy(&x[i], place, sizeof x[i]);
        });
        put_rows<line, 0>(row, join_bytes<false, 0>(x, WORD), join_bytes<false, 4>(x, WORD));
        put_rows<line, 1>(row, join_bytes<true, 0>(x, WORD), join_bytes<true, 4>(x, WORD));
      });
    }
  }

 private:
  template <int LINE, int HIGH> void put_rows(int row, Ints low, Ints high) {
    constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
    constexpr int TOKENS = HELD<Values>;
    if constexpr (TOKENS == 1) {
      put_codes<HIGH>(2 * LINE, row, low);
      put_codes<HIGH>(2 * LINE + 1, row, high);
    } else {
      put_codes<HIGH>(0, row, rows_of<TOKENS, 0>(low, high, LANE));
      put_codes<HIGH>(0, row + TOKENS / 2, rows_of<TOKENS, 1>(low, high, LANE));
    }
  }
  // Those of four tokens in a vector are two rows, whose second halves have no channels.
  template <int HIGH> void put_codes(int wide, int row, Ints words) {
    each<0, HALF>([&](auto plane) {
      const Ints codes = Values::Codes::template bytes<plane>(words);
      auto& rows = planes[HIGH * HALF + plane][wide];
      if constexpr (HELD<Values> < 4) {
        std::memcpy(rows[row], &codes, TILE_BYTES);
      } else {
        std::memcpy(rows[row], &codes, TILE_BYTES / 2);
        std::memcpy(rows[row + 1], (const char*)&codes + TILE_BYTES / 2, TILE_BYTES / 2);
      }
    });
  }
};

// Adds `count` packed values, whose bytes these are, with the weights of tile_weights.
template <class A>
__attribute__((flatten)) void tile_values(
    const ValueBytes<A>& bytes, int count, const Block<A>& block, Panel<A>& panel, Ahead& ahead) {
  using Values = typename A::V::Code;
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  constexpr int ROWS = A::ROWS, COUNT = DIGITS<A>, SIZE = Block<A>::SIZE;
  constexpr int WIDTH = Values::WIDTH, WIDE = ValueBytes<A>::WIDE, VECTORS = std::min(2, WIDE);
  each<0, Values::COUNT>([&](auto plane) {
    each<0, WIDE / VECTORS>([&](auto some) {
      constexpr int AT = some * 2 * LANES, GROUP = Values::group(plane * WIDTH + AT);
      alignas(64) int32_t sums[VECTORS][COUNT * ROWS][LANES];
      ahead.ask(LINES<typename A::V, SIZE> * 6 / 10 * VECTORS / (Values::COUNT * WIDE));
      each<0, VECTORS>([&](auto v) {
        const uint8_t* rows = bytes.planes[plane][VECTORS * some + v][0];
        const auto multiply = [&](auto tiles) {
          multiply_tiles<COUNT * ROWS, tiles>(block.digits[GROUP][0], SIZE, rows, sums[v][0]);
        };
        if (count > TILE_TOKENS) multiply(Constant<SIZE / TILE_TOKENS>{});
        else multiply(Constant<1>{});
      });
      each<0, ROWS>([&](auto r) {
        Floats x[VECTORS];
        each<0, VECTORS>([&](auto v) {
          x[v] = join_digits<COUNT, ROWS>(sums[v][0], r) * block.steps[r][GROUP] + block.base[r][GROUP];
        });
        each<0, VECTORS>([&](auto v) {
          float* total = panel.rows[r].packed + plane * Values::PADDED + AT + v * LANES;
          Floats added = x[0];
          if constexpr (WIDE > 1) added = in_word_order<v>(x, LANE);
          else if constexpr (WIDTH == LANES) added = in_halves(added, LANE);
          else added = select(lane_numbers() < WIDTH, added, Floats{});
          store<LANES>(total, load<Floats, LANES>(total) + added);
        });
      });
    });
  });
  ahead.ask(INT32_MAX);
}

}  // namespace
