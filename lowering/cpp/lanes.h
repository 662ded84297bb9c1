// What the lanes of vectors are together: sums, extremes, bits.
#pragma once
#include "vectors.h"

namespace {

template <int DISTANCE, int... I>
inline Floats swap_lanes(Floats x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I ^ DISTANCE));
}

// All lanes joined in pairs, then the pairs: fewer steps in a row than lane after lane.
template <int N = LANES / 2, class Join> inline float join_lanes(Floats x, const Join& join) {
  if constexpr (N > 0) {
    const Floats other = swap_lanes<N>(x, std::make_integer_sequence<int, LANES>{});
    return join_lanes<N / 2>(join(x, other), join);
  }
  return x[0];
}

inline float sum(Floats x) {
  return join_lanes(x, [](Floats a, Floats b) { return a + b; });
}

// The lanes in which a comparison holds, as bits.
inline uint32_t bits_of_lanes(Ints holds) {
#if KVPASS_LANES == 16 && defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)holds);
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  return _mm256_movemask_ps((__m256)holds);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (uint32_t)(holds[i] & 1) << i;
  return bits;
#endif
}

// Lane i of every four: the sum of two neighbours, of a for i < 2, else of b.
template <int... I> inline Floats add_pairs(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, (I / 4 * 4 + I % 2 * 2 + (I & 2 ? LANES : 0))) +
         SHUFFLE(a, b, (I / 4 * 4 + I % 2 * 2 + (I & 2 ? LANES : 0) + 1));
}
// Lanes with a zero bit DISTANCE: the sum of that lane of a and the one DISTANCE on; else of b.
template <int DISTANCE, int... I>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, (I & DISTANCE ? LANES + I : I)) +
         SHUFFLE(a, b, (I & DISTANCE ? LANES + I - DISTANCE : I + DISTANCE));
}

// Lane s * COUNT + i is the sum of the s-th COUNT lanes of x[i]. Indices of register arrays are
// compile-time constants throughout: otherwise compilers keep such arrays in memory.
template <int COUNT, int N = COUNT / 2> inline Floats lane_sums(Floats (&x)[COUNT]) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  static_assert(COUNT >= 4);
  if constexpr (N >= COUNT / 4) {
    each<0, N>([&](auto i) { x[i] = add_pairs(x[2 * i], x[2 * i + 1], LANE); });
  } else {
    // Lanes 4 * i ... 4 * i + 3 of every vector are parts of four sums.
    each<0, N>([&](auto i) { x[i] = fold<4 * N>(x[i], x[i + N], LANE); });
  }
  if constexpr (N > 1) return lane_sums<COUNT, N / 2>(x);
  return x[0];
}

// Lane i: number i / (LANES / COUNT).
template <int COUNT, int... I>
inline Floats stretch(const float* numbers, std::integer_sequence<int, I...>) {
  const Floats x = load<Floats, COUNT>(numbers);
  return SHUFFLE(x, x, (I / (LANES / COUNT)));
}
template <int COUNT> inline Floats stretch(const float* numbers) {
  if constexpr (COUNT == 1) return all(*numbers);
  return stretch<COUNT>(numbers, std::make_integer_sequence<int, LANES>{});
}

// The first COUNT lanes, over and over.
template <int COUNT, int... I> inline Floats repeat(Floats x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I % COUNT));
}
template <int COUNT> inline Floats repeat(Floats x) {
  return repeat<COUNT>(x, std::make_integer_sequence<int, LANES>{});
}


}  // namespace
