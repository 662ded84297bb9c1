// Tokens side by side that were one behind the other.
#pragma once
#include "integers.h"

namespace {

template <int PART, int... I> inline Ints zip_lanes(Ints a, Ints b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, (I / 4 * 4 + PART * 2 + I % 4 / 2 + I % 2 * LANES));
}
template <int PART, int... I> inline Ints zip_pairs(Ints a, Ints b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, (I / 4 * 4 + PART * 2 + I % 2 + I % 4 / 2 * LANES));
}
// Vector k: the k-th 32 bits of 16 tokens, in tile order, from vectors of LANES / COUNT tokens each.
template <int COUNT> inline void transpose_tokens(Ints (&x)[COUNT]) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  each<0, COUNT / 4>([&](auto some) {
    Ints* four = x + 4 * some;
    const Ints a = zip_lanes<0>(four[0], four[1], LANE), b = zip_lanes<0>(four[2], four[3], LANE);
    const Ints c = zip_lanes<1>(four[0], four[1], LANE), d = zip_lanes<1>(four[2], four[3], LANE);
    four[0] = zip_pairs<0>(a, b, LANE);
    four[1] = zip_pairs<1>(a, b, LANE);
    four[2] = zip_pairs<0>(c, d, LANE);
    four[3] = zip_pairs<1>(c, d, LANE);
  });
  each<0, COUNT == 4 ? 0 : 4>([&](auto j) {
    if constexpr (COUNT == 8) {
      const Ints even = unzip<0>(x[j], x[4 + j], LANE), odd = unzip<1>(x[j], x[4 + j], LANE);
      x[j] = even;
      x[4 + j] = odd;
    } else {
      const Ints a = unzip<0>(x[j], x[4 + j], LANE), b = unzip<1>(x[j], x[4 + j], LANE);
      const Ints c = unzip<0>(x[8 + j], x[12 + j], LANE), d = unzip<1>(x[8 + j], x[12 + j], LANE);
      x[j] = unzip<0>(a, c, LANE);
      x[4 + j] = unzip<0>(b, d, LANE);
      x[8 + j] = unzip<1>(a, c, LANE);
      x[12 + j] = unzip<1>(b, d, LANE);
    }
  });
}

}  // namespace
