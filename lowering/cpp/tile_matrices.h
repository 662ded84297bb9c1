// Decoded tokens as matrices of bfloat16, which tiles multiply.
#pragma once
#include "block.h"
#include "tiles.h"
#include "transpose.h"

namespace {

// Whether the model's own numbers, to which others are rounded, are those of tiles.
template <class A>
constexpr bool BFLOAT16_TILES = TILES && std::is_same_v<typename A::Element, BFloat16>;

// A block of tokens, and what its products with query rows are. What is decoded is rounded, once, to the
// type of the model, and so are weights: as where a plain cache holds the decoded tokens.
template <class A> struct TileMatrices {
  using K = typename A::K;
  using V = typename A::V;
  using Shapes = TileShapes<16, 16, 16, 16, 16, 16, 16, 16>;
  static constexpr int ROWS = 2 * LANES, BLOCK = 128;
  // Numbers of a tile's row, and tiles side by side for all channels of keys.
  static constexpr int STEP = 2 * LANES, STEPS = round_up(K::DIM, STEP) / STEP;
  static constexpr int VALUES = round_up(V::DIM, STEP);

  // Tiles of a step's pairs of channels, for both vectors of rows.
  struct Query {
    alignas(64) BFloat16 tiles[STEPS][ROWS / LANES][TILE_ROWS][STEP];

    void put(const Pair<A>& pair, int64_t row, int r) {
      alignas(64) float query[STEPS * STEP]{};
      // Scaled, it would have to be rounded.
      pair.read_query(row, 1, query);
      each<0, STEPS>([&](auto step) {
        const float* place = query + step * STEP;
        const Words x = round_both(load<Floats, LANES>(place), load<Floats, LANES>(place + LANES));
        for (int p = 0; p < TILE_ROWS; p++)
          std::memcpy(&tiles[step][r / LANES][p][r % LANES * 2], (const uint16_t*)&x + 2 * p, 4);
      });
    }
  };
  using Sums = float[VALUES][ROWS];

  alignas(64) BFloat16 keys[BLOCK][STEPS * STEP];
  // Of a channel, all tokens.
  alignas(64) BFloat16 values[VALUES][BLOCK];

  void read(const Pair<A>& pair, int64_t start, int count) {
    for (int t = 0; t < count; t += STEP) {
      const int some = std::min(count - t, STEP), gone = pair.gone(start + t, some);
      keep_tiles_awake();
      read_keys(pair, start + t, some, t);
      keep_tiles_awake();
      read_values(pair, start + t, some, gone, t);
    }
  }

  template <int USED>
  void score(const Pair<A>& pair, const Query& query, int count, float (*scores)[ROWS]) const {
    const Floats scale = all((float)pair.a.scale);
    for (int t = 0; t < count; t += STEP) {
      multiply<false, USED>(keys[t], sizeof keys[t], query.tiles[0][0], STEPS, scores[t]);
      for (int u = t; u < t + STEP; u++)
        each<0, USED>([&](auto v) {
          float* place = scores[u] + v * LANES;
          store<LANES>(place, load<Floats, LANES>(place) * scale);
        });
    }
  }

  template <int USED> void add_values(const float (*weights)[ROWS], int count, Sums& sums) const {
    // Pairs of tokens, for all rows.
    alignas(64) BFloat16 tiles[BLOCK / STEP][ROWS / LANES][TILE_ROWS][STEP];
    const int steps = round_up(count, STEP) / STEP;
    for (int t = 0; t < steps * STEP; t += 2)
      each<0, USED>([&](auto v) {
        const auto at = [&](int u) {
          return u < count ? load<Floats, LANES>(weights[u] + v * LANES) : Floats{};
        };
        store<LANES>((int32_t*)tiles[t / STEP][v][t % STEP / 2], round_pairs(at(t), at(t + 1)));
      });
    for (int d = 0; d < VALUES; d += STEP)
      multiply<true, USED>(values[d], sizeof values[d], tiles[0][0], steps, sums[d]);
  }

 private:
  template <bool ADDS, int USED>
  static void multiply(const BFloat16* a, int stride, const BFloat16 (*b)[STEP], int steps, float* sums) {
    multiply_tiles<USED, ADDS, ROWS / LANES>(a, stride, b, steps, sums, [](int) {});
  }
  void read_keys(const Pair<A>& pair, int64_t start, int count, int at) {
    alignas(64) float decoded[STEP * STRIDE<K>];
    decode_tokens(pair, pair.keys, start, count, decoded);
    for (int t = 0; t < count; t++)
      each<0, STEPS>([&](auto step) {
        const float* place = decoded + t * STRIDE<K> + step * STEP;
        constexpr int LEFT = K::DIM - step * STEP;
        const Words x = round_both(
            load<Floats, LEFT>(place), load<Floats, std::max(0, LEFT - LANES)>(place + LANES));
        std::memcpy(keys[at + t] + step * STEP, &x, sizeof x);
      });
  }

  // What no row sees is 0: anything else might be no number.
  void read_values(const Pair<A>& pair, int64_t start, int count, int gone, int at) {
    alignas(64) float decoded[STEP * STRIDE<V>];
    for (int t = 0; t < STEP; t++)
      if (t < gone || t >= count) std::fill_n(decoded + t * STRIDE<V>, V::DIM, 0.0f);
    decode_tokens(pair, pair.values, start, count, decoded);
    each_vector<V::DIM>([&](auto d, auto width) {
      Ints x[LANES];
      each<0, LANES>([&](auto i) {
        const float* place = decoded + 2 * i * STRIDE<V> + d;
        x[i] = round_pairs(load<Floats, width>(place), load<Floats, width>(place + STRIDE<V>));
      });
      transpose_tokens(x);
      each<0, width>([&](auto i) { std::memcpy(values[d + i] + at, &x[i], sizeof x[i]); });
    });
  }
};

}  // namespace
