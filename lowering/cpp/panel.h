// What a few query rows have summed, and their scores for a block of tokens.
#pragma once
#include "block.h"
#include "integers.h"
#include "lanes.h"
#include "tiles.h"

namespace {

// An array that only some kernels need has one element in the others.
constexpr int size_if(bool needed, int size) { return needed ? size : 1; }

// Whether codes of a model in 16 bits are multiplied as integers. What they are multiplied by (weights
// times scales of a block of tokens, a query times scales of a group) is rounded to 1 / 65534 of the
// largest of them: a float32 model would lose by it, these models round more than that themselves.
template <class X>
constexpr bool IN_INTEGERS = MULTIPLIES_PAIRS && X::DIRECT && sizeof(typename X::Element) == 2 &&
                             X::Code::Codes::PAIRS && X::Code::WHOLE;

// The same of keys: pairs are channels of one token, and those of a chunk have one scale.
template <class X> constexpr bool KEYS_IN_INTEGERS = IN_INTEGERS<X> && X::Code::in_runs(CHUNK);

// Whether codes are multiplied as bytes, in tiles: a step of a token's words fills them.
template <class X>
constexpr bool IN_TILES = TILES && X::DIRECT && X::Code::Codes::PAIRS && X::DIM % TILE_BYTES == 0 &&
                          (X::Code::WIDTH == 8 || X::Code::WIDTH == 16 || X::Code::WIDTH % 32 == 0);
// Keys take a product for each group of channels with a scale; of values, those of a tile have one.
template <class X> constexpr bool KEYS_IN_TILES = IN_TILES<X> && X::Code::GROUPS <= 4;
template <class X>
constexpr bool VALUES_IN_TILES = IN_TILES<X> && X::Code::in_runs(std::min(32, X::Code::WIDTH));

// Query rows as the scores of packed keys need them: vectors in the order of Code::each_place, whose
// factors are units of the codes, and, where groups are of tokens, what minima add, lane by lane.
// Vectors hold a plane once for each of the tokens that a vector of words holds.
template <class A> struct FloatQuery {
  static constexpr int SETS = 1;
  alignas(64) float vectors[A::ROWS][size_if(A::K::DIRECT, A::K::Code::SIZE)];
  Floats offset[A::ROWS];
};

// The same in integers. Lane r * TOKENS + u: what an integer of row r stands for, what minima add.
template <class A> struct IntegerQuery {
  // Tokens of which a vector has a chunk each: their sums need fewer lanes to be added than those of
  // whole vectors.
  static constexpr int TOKENS = 2 * LANES / CHUNK, SETS = A::ROWS < 4 ? 1 : 2;
  static constexpr int LIMIT = limit_of(A::K::DIM, A::K::MAX_CODE);
  alignas(64) int16_t integers[A::ROWS][round_up(A::K::DIM, LANES)];
  Floats steps, offsets;
};

// The same in digits of integers, in the order of the bytes of a token's words.
template <class A> struct TileQuery {
  using K = typename A::K;
  static constexpr int SETS = 2 * A::ROWS, LIMIT = DIGITS_LIMIT<DIGITS<A>>;
  alignas(64) int8_t digits[K::Code::GROUPS][DIGITS<A> * A::ROWS][K::DIM];
  Floats steps, offsets;
};

template <class A>
using Query = std::conditional_t<
    KEYS_IN_TILES<typename A::K>, TileQuery<A>,
    std::conditional_t<KEYS_IN_INTEGERS<typename A::K>, IntegerQuery<A>, FloatQuery<A>>>;

// Tokens that are scored at once, in SETS vectors of all rows' scores.
template <class A> constexpr int SCORED = Query<A>::SETS * LANES / A::ROWS;

// Query rows of a panel, and tokens that share the registers with them.
template <class A> struct Panel {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, TOKENS = LANES / ROWS;
  // Tokens of a pass. What the next block reads is prefetched; beyond the end that does nothing.
  static constexpr int BLOCK = 128;
  // What tiles need meanwhile.
  struct None {};
  using Shapes = std::conditional_t<KEYS_IN_TILES<K> || VALUES_IN_TILES<V>,
                                    ByteTiles<DIGITS<A> * ROWS>, None>;

  // The weighted sums of one query row over some tokens: those of packed ones in plane order.
  struct Row {
    alignas(64) float query[round_up(K::DIM, LANES)];
    alignas(64) float exact[round_up(V::DIM, LANES)];
    alignas(64) float packed[size_if(V::DIRECT, V::Code::SIZE)];
    float top, total;
  };

  Row rows[ROWS];
  Query<A> query;
  // Lane r * TOKENS + u: the sum of row r's channels of a group of the keys.
  Floats sums[K::Code::GROUPS];

  float top(int r) const { return rows[r].top; }
  float total(int r) const { return rows[r].total; }
  void add_values(int r, float factor, float* result) const {
    using Code = typename V::Code;
    const Row& row = rows[r];
    for (int d = 0; d < V::DIM; d++) {
      float value = row.exact[d];
      if constexpr (V::DIRECT)
        for (int t = 0; t < Code::TOKENS; t++)
          value += row.packed[d / Code::WIDTH * Code::PADDED + t * Code::WIDTH + d % Code::WIDTH];
      result[d] += factor * value;
    }
  }
};

// Tokens that are decoded before they are multiplied, at a time.
constexpr int DECODED = 32;

// Scores, then weights, of a panel's query rows for the tokens of a block.
template <class A> struct Block {
  using K = typename A::K;
  using V = typename A::V;
  static constexpr int ROWS = A::ROWS, SIZE = Panel<A>::BLOCK;

  // The last tokens of a run are scored as many at a time, beyond its end.
  alignas(64) float scores[ROWS][SIZE + std::max(LANES, SCORED<A>)];
  // Weights of packed values times the scales of a group, and the sums of weights times minima.
  static constexpr bool FLOATS = V::DIRECT && !VALUES_IN_TILES<V>;
  alignas(64) float weights[ROWS][V::Code::GROUPS][size_if(FLOATS, SIZE + V::SCATTERED * LANES)];
  float base[ROWS][V::Code::GROUPS];
  // The same weights as integers, and what one of them stands for.
  alignas(64) int16_t integers[ROWS][V::Code::GROUPS][size_if(FLOATS && IN_INTEGERS<V>, SIZE + LANES)];
  float steps[ROWS][V::Code::GROUPS];
  // Those of tiles, as digits of integers.
  alignas(64) int8_t digits[V::Code::GROUPS][DIGITS<A> * ROWS][size_if(VALUES_IN_TILES<V>, SIZE)];
  // Tokens that are decoded before they are multiplied.
  alignas(64) float keys[size_if(K::DEQUANT_FIRST, DECODED * STRIDE<K>)];
  alignas(64) float values[size_if(V::DEQUANT_FIRST, DECODED * STRIDE<V>)];
};

}  // namespace
