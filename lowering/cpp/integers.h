// Products of 16-bit integers, added in pairs to sums of 32 bits.
#pragma once
#include "lanes.h"

namespace {

// Two numbers in each lane of 32 bits.
typedef int16_t Int16s __attribute__((vector_size(4 * LANES)));
// Where one instruction multiplies and adds pairs, they take half of what floats take.
#if (KVPASS_LANES == 16 && defined(__AVX512BW__)) || (KVPASS_LANES == 8 && defined(__AVX2__))
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

inline Ints add_products(Ints sums, Ints a, Ints b) {
#if KVPASS_LANES == 16 && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif KVPASS_LANES == 16 && defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif KVPASS_LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (Ints)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif KVPASS_LANES == 8 && defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The largest integer in size that so many codes may be multiplied by in one sum.
constexpr int limit_of(int64_t count, int max_code) {
  return std::min<int64_t>(INT16_MAX, INT32_MAX / (count * max_code));
}

// What brings the numbers of some rows into such a limit, and what brings sums back.
template <int ROWS> struct Steps {
  // Lane r * (LANES / ROWS) and those behind it: row r's.
  Floats steps, inverse;

  Steps(const Floats (&largest)[ROWS], int limit) {
    const Floats top = join_rows(largest, maximum);
    const Ints some = top > 1e-30f;
    steps = select(some, top * (1.0f / limit), Floats{});
    inverse = select(some, (float)limit / top, Floats{});
  }
  float step(int row) const { return steps[row * (LANES / ROWS)]; }
  // LANES integers of a row, half to even.
  void store(int row, int16_t* p, Floats x) const {
    // The sum's last place is 1, and its lowest 16 bits are the integer's.
    const Ints sum = (Ints)(x * inverse[row * (LANES / ROWS)] + 12582912.0f);
    ::store<LANES>(p, __builtin_convertvector(sum, Shorts));
  }
};

// Lane i: pair i / (LANES / COUNT).
template <int COUNT> inline Ints stretch_pairs(const int16_t* numbers) {
  if constexpr (COUNT > 1) {
    constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
    return stretch<COUNT, Ints>((const int32_t*)numbers, LANE);
  }
  int32_t pair;
  std::memcpy(&pair, numbers, sizeof pair);
  return Ints{} + pair;
}

// Lane i: word i % SIZE of token 2 * (i / SIZE), and of the next one.
template <int SIZE, int... I> inline Ints interleave(Int16s words, std::integer_sequence<int, I...>) {
  return (Ints)SHUFFLE(words, words, (I / 2 / SIZE * 2 * SIZE + I / 2 % SIZE + I % 2 * SIZE));
}
// Of two tokens' words from `at` on, or of as many tokens as fill a vector.
template <int SIZE> inline Ints load_pairs(const uint16_t* tokens, int words) {
  constexpr auto HALF = std::make_integer_sequence<int, 2 * LANES>{};
  if constexpr (SIZE < LANES) return interleave<SIZE>(load<Int16s, 2 * LANES>(tokens), HALF);
  // Put together in memory, they would be waited for.
  else return widen(load<Shorts, LANES>(tokens)) | widen(load<Shorts, LANES>(tokens + words)) << 16;
}

}  // namespace
