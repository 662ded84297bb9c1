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

template <class Vector> inline Vector add(Vector a, Vector b) { return a + b; }
inline float sum(Floats x) { return join_lanes(x, add<Floats>); }

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

// Lane i of every four: two neighbours joined, of a for i < 2, else of b. Lanes are moved as floats,
// for which there is an instruction that needs no index.
template <class Vector, class Join, int... I>
inline Vector join_pairs(Vector a, Vector b, const Join& join, std::integer_sequence<int, I...>) {
  const Floats x = (Floats)a, y = (Floats)b;
  return join((Vector)SHUFFLE(x, y, (I / 4 * 4 + I % 2 * 2 + (I & 2 ? LANES : 0))),
              (Vector)SHUFFLE(x, y, (I / 4 * 4 + I % 2 * 2 + (I & 2 ? LANES : 0) + 1)));
}
// Lanes with a zero bit DISTANCE: the sum of that lane of a and the one DISTANCE on; else of b.
template <int DISTANCE, class Vector, int... I>
inline Vector fold(Vector a, Vector b, std::integer_sequence<int, I...>) {
  const Floats x = (Floats)a, y = (Floats)b;
  return (Vector)SHUFFLE(x, y, (I & DISTANCE ? LANES + I : I)) +
         (Vector)SHUFFLE(x, y, (I & DISTANCE ? LANES + I - DISTANCE : I + DISTANCE));
}

// Lane s * COUNT + i is the sum of the s-th COUNT lanes of x[i]. Indices of register arrays are
// compile-time constants throughout: otherwise compilers keep such arrays in memory.
template <int COUNT, int N = COUNT / 2, class Vector> inline Vector lane_sums(Vector (&x)[COUNT]) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  static_assert(COUNT >= 4);
  if constexpr (N >= COUNT / 4) {
    each<0, N>([&](auto i) { x[i] = join_pairs(x[2 * i], x[2 * i + 1], add<Vector>, LANE); });
  } else {
    // Lanes 4 * i ... 4 * i + 3 of every vector are parts of four sums.
    each<0, N>([&](auto i) { x[i] = fold<4 * N>(x[i], x[i + N], LANE); });
  }
  if constexpr (N > 1) return lane_sums<COUNT, N / 2>(x);
  return x[0];
}

// Lane i: number i / (LANES / COUNT).
template <int COUNT, class Vector, class Number, int... I>
inline Vector stretch(const Number* numbers, std::integer_sequence<int, I...>) {
  const Vector x = load<Vector, COUNT>(numbers);
  return SHUFFLE(x, x, (I / (LANES / COUNT)));
}
template <int COUNT> inline Floats stretch(const float* numbers) {
  if constexpr (COUNT == 1) return all(*numbers);
  return stretch<COUNT, Floats>(numbers, std::make_integer_sequence<int, LANES>{});
}

// Lane i: all lanes of x[i / (LANES / ROWS)] joined, for 1, 2 or 4 ROWS.
template <int STEP, int ROWS, int... I>
inline Floats every(Floats x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I / (LANES / ROWS) * STEP));
}
template <int ROWS, class Join> inline Floats join_rows(const Floats (&x)[ROWS], const Join& join) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  Floats all = x[0];
  if constexpr (ROWS == 4)
    all = join_pairs(join_pairs(x[0], x[1], join, LANE), join_pairs(x[2], x[3], join, LANE), join, LANE);
  if constexpr (ROWS == 2) all = join_pairs(x[0], x[1], join, LANE);
  if constexpr (ROWS <= 2) all = join(all, swap_lanes<1>(all, LANE));
  if constexpr (ROWS == 1) all = join(all, swap_lanes<2>(all, LANE));
  if constexpr (LANES > 4) all = join(all, swap_lanes<4>(all, LANE));
  if constexpr (LANES > 8) all = join(all, swap_lanes<8>(all, LANE));
  return every<4 / ROWS % 4, ROWS>(all, LANE);
}

// The first COUNT lanes, over and over.
template <int COUNT, int... I> inline Floats repeat(Floats x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I % COUNT));
}
template <int COUNT> inline Floats repeat(Floats x) {
  return repeat<COUNT>(x, std::make_integer_sequence<int, LANES>{});
}


}  // namespace
