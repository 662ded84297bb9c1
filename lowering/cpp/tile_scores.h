// Sums of packed keys' codes times a few query rows, by tiles of bytes.
#pragma once
#include "ahead.h"
#include "integer_query.h"
#include "tiles.h"
#include "transpose.h"

namespace {

// Query rows are the integers that come nearest, in the order of the bytes of a token's words: a word
// has a byte of the first half of all channels, and one of the second.
template <class A>
inline void put_query(const float (&rows)[A::ROWS][A::K::DIM], const Steps<A::ROWS>& steps, int group,
                      TileQuery<A>& result) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  constexpr int HALF = A::K::DIM / 2;
  each<0, A::ROWS>([&](auto r) {
    const Floats by = all(steps.inverse[r * (LANES / A::ROWS)]);
    for (int d = 0; d < HALF; d += 2 * LANES) {
      Ints x[4];
      each<0, 2>([&](auto half) {
        const float* place = rows[r] + half * HALF + d;
        const Floats a = load<Floats, LANES>(place), b = load<Floats, LANES>(place + LANES);
        x[half] = offset_integers<DIGITS<A>>(every_other<0>(a, b, LANE), by);
        x[2 + half] = offset_integers<DIGITS<A>>(every_other<1>(a, b, LANE), by);
      });
      store_digits<DIGITS<A>>(x, result.digits[group][r] + 2 * d, A::ROWS * A::K::DIM);
    }
  });
}

template <class A> inline void arrange_query(const Panel<A>& panel, TileQuery<A>& result) {
  if constexpr (A::K::BY_TOKEN) arrange_integers<A::K::Code::GROUPS>(panel, result);
}

// SIZE tokens on their way to their scores, in two halves.
template <class A> struct KeyTokens {
  using K = typename A::K;
  using Keys = typename K::Code;
  static constexpr int ROWS = A::ROWS, GROUPS = Keys::GROUPS, SIZE = 2 * LANES;
  // The bytes of each half.
  struct alignas(64) Matrices {
    uint8_t rows[2][K::DIM / 4][TILE_BYTES];
  };
  alignas(64) int32_t sums[2][GROUPS][DIGITS<A> * ROWS][LANES];
  const TileQuery<A>* query;
  int first;

  // Their words become bytes.
  static void put(const uint16_t* words, Matrices& bytes, Ahead& ahead) {
    constexpr int VECTORS = LANES / HELD<Keys>, QUADS = Keys::WIDTH / 2;
    constexpr int STRIDE = HELD<Keys> > 1 ? 2 * LANES : Keys::WORDS;
    // Values ask for the rest, if they are in tiles, too.
    constexpr int CALLS = VALUES_IN_TILES<typename A::V> ? 24 : 8;
    each<0, 2>([&](auto half) {
      ahead.ask(LINES<K, Panel<A>::BLOCK> / CALLS);
      each<0, round_up(Keys::WIDTH, 2 * LANES) / (2 * LANES)>([&](auto line) {
        Ints x[VECTORS];
        each<0, VECTORS>([&](auto i) {
          const uint16_t* place = words + half * LANES * Keys::WORDS + i * STRIDE + line * 2 * LANES;
          std::memcpy(&x[i], place, sizeof x[i]);
        });
        transpose_tokens(x);
        each<0, VECTORS>([&](auto i) {
          each<0, Keys::COUNT / 2>([&](auto plane) {
            const Ints codes = Keys::Codes::template bytes<plane>(x[i]);
            std::memcpy(bytes.rows[half][plane * QUADS + line * LANES + i], &codes, TILE_BYTES);
          });
        });
      });
    });
  }

  void multiply(const Matrices& bytes) {
    each<0, GROUPS>([&](auto group) {
      each<0, 2>([&](auto half) {
        multiply_tiles<DIGITS<A> * ROWS, K::DIM / TILE_BYTES>(
            query->digits[group][0], K::DIM, bytes.rows[half][0], sums[half][group][0]);
      });
    });
  }

  // qparams: of the first of `count` tokens.
  void score(const K& k, const typename K::Pair* qparams, int count, const Panel<A>& panel,
             float* (&scores)[ROWS]) const {
    constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
    each<0, 2>([&](auto half) {
      const int from = first + half * LANES;
      Floats added[ROWS];
      each<0, ROWS>([&](auto r) { added[r] = all(query->offsets[r * (LANES / ROWS)]); });
      each<0, GROUPS>([&](auto group) {
        Affine affine{};
        if constexpr (K::BY_TOKEN)
          affine = load_affine<typename K::Number>(
              qparams + group * k.capacity + from, std::clamp(count - from, 0, LANES));
        each<0, ROWS>([&](auto r) {
          constexpr int AT = r * (LANES / ROWS);
          const Floats digits = join_digits<DIGITS<A>, ROWS>(sums[half][group][0], r);
          Floats sum = in_token_order<HELD<Keys>>(digits, LANE) * query->steps[AT];
          if constexpr (K::BY_TOKEN) sum = sum * affine.scale + panel.sums[group][AT] * affine.minimum;
          added[r] += sum;
        });
      });
      each<0, ROWS>([&](auto r) { store<LANES>(scores[r] + from, added[r]); });
    });
  }
};

// Scores of packed keys in `count` slots from `slot` on, for tokens first ... of the block.
template <class A>
__attribute__((flatten)) void tile_scores(
    const Pair<A>& pair, int64_t slot, int first, int count, const Panel<A>& panel, Block<A>& block,
    Ahead& ahead) {
  using K = typename A::K;
  using Tokens = KeyTokens<A>;
  const K& k = pair.a.k;
  const uint16_t* codes = k.codes_at(pair.pair, slot);
  float* scores[A::ROWS];
  each<0, A::ROWS>([&](auto r) { scores[r] = block.scores[r] + first; });
  ahead.add(codes + Panel<A>::BLOCK * K::Code::WORDS, LINES<K, Panel<A>::BLOCK>);
  Tile<typename K::Code, Tokens::SIZE> tile;
  // Some are read as others are multiplied: tiles wait long for what was stored just now.
  Tokens steps[3];
  typename Tokens::Matrices bytes[2];
  TileQuery<A> scaled[K::BY_TOKEN ? 1 : 4];
  const TileQuery<A>* query = &panel.query;
  const auto step = [&](int i) -> Tokens& { return steps[i % 3]; };
  int groups = 0, end = K::BY_TOKEN ? count : 0;
  for (int i = 0, t = 0, made = 0; i < made + 2; i++) {
    if (t < count) {
      if constexpr (!K::BY_TOKEN)
        if (t == end) {
          TileQuery<A>& next = scaled[groups++ % 4];
          scale_query(k.qparams_at(pair.pair, slot + t), panel, next);
          query = &next;
          end = std::min<int64_t>(count, ((slot + t) / K::GROUP + 1) * K::GROUP - slot);
        }
      step(i).query = query;
      step(i).first = t;
      Tokens::put(tile.read(codes + t * K::Code::WORDS, end - t), bytes[i % 2], ahead);
      t = std::min(end, t + Tokens::SIZE);
      made++;
    }
    if (i > 0 && i <= made) step(i - 1).multiply(bytes[(i - 1) % 2]);
    if (i > 1) step(i - 2).score(k, k.qparams_at(pair.pair, slot), count, panel, scores);
  }
}

}  // namespace
