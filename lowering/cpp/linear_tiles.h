// Linear layers of some tokens in bfloat16, by tiles: a weight is read once for all of them.
#pragma once
#include "linear_blocks.h"
#include "tiles.h"
#include "transpose.h"

namespace {

// Outputs that are computed at a time, and inputs of a tile's row.
constexpr int OUTPUTS = 2 * TILE_ROWS, INPUTS = 2 * LANES;
// Inputs after which a row's next ones are asked for: with fewer in between they come too late, with more
// rows of 14,336 inputs (measured) are gone again.
constexpr int INPUTS_AHEAD = 8 * INPUTS;

// Pairs of inputs, of all tokens.
struct InputTile {
  alignas(64) BFloat16 pairs[TILE_ROWS][INPUTS];
};

// The tokens as tiles, but for inputs that do not fill one.
template <class A> std::vector<InputTile> input_tiles(const A& a) {
  std::vector<InputTile> tiles(a.inputs / INPUTS);
  for (size_t i = 0; i < tiles.size(); i++) {
    Ints x[LANES]{};
    each<0, A::TOKENS>([&](auto t) { x[t] = load<Ints, INPUTS>(a.x + t * a.inputs + i * INPUTS); });
    transpose_tokens(x);
    each<0, LANES>([&](auto p) { std::memcpy(tiles[i].pairs[p], &x[p], sizeof x[p]); });
  }
  return tiles;
}

// Outputs first ... first + OUTPUTS of a layer.
template <class A, class Layer>
void linear_tile(
    const A& a, const Layer& layer, const std::vector<InputTile>& tiles, int64_t first) {
  const BFloat16* rows = layer.weight + first * a.inputs;
  alignas(64) float sums[OUTPUTS][LANES];
  const auto ask = [&](int k) {
    const BFloat16* ahead = rows + k * INPUTS + INPUTS_AHEAD;
    for (int r = 0; r < OUTPUTS; r++) __builtin_prefetch(ahead + r * a.inputs);
  };
  const int steps = (int)tiles.size();
  multiply_tiles<1, false, 1>(rows, sizeof *rows * a.inputs, tiles.data()->pairs, steps, sums[0], ask);
  for (int64_t j = steps * INPUTS; j < a.inputs; j++)
    for (int r = 0; r < OUTPUTS; r++)
      for (int t = 0; t < A::TOKENS; t++)
        sums[r][t] += to_float(rows[r * a.inputs + j]) * to_float(a.x[t * a.inputs + j]);
  for (int r = 0; r < OUTPUTS; r += LANES) {
    Ints x[LANES];
    each<0, LANES>([&](auto i) { x[i] = load<Ints, LANES>(sums[r + i]); });
    transpose_tokens(x);
    Floats bias{};
    if (layer.bias != nullptr) bias = load_numbers<LANES>(layer.bias + first + r);
    each<0, A::TOKENS>([&](auto t) {
      store_numbers<LANES>(layer.out + t * layer.outputs + first + r, (Floats)x[t] + bias);
    });
  }
}

// Whether all layers have as many outputs as are computed at a time.
template <class A> bool fill_tiles(const A& a) {
  for (int64_t i = 0; i < a.count; i++)
    if (a.layers[i].outputs < OUTPUTS) return false;
  return true;
}

template <class A> void linear_tiles(const A& a) {
  const std::vector<InputTile> tiles = input_tiles(a);
  each_block<OUTPUTS, TileShapes<16, 16, 1, 1, 16, 16, 16>>(a, [&](const auto& layer, int64_t block) {
    // The last ones may be those of two blocks.
    linear_tile(a, layer, tiles, std::min(block * OUTPUTS, layer.outputs - OUTPUTS));
  });
}

}  // namespace
