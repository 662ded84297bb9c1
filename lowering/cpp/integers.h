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

// LANES numbers of at most 16 bits as integers, half to even.
inline void store_rounded(int16_t* p, Floats x) {
  // The sum's last place is 1, and its lowest 16 bits are the integer's.
  ::store<LANES>(p, __builtin_convertvector((Ints)(x + 12582912.0f), Shorts));
}
inline void store_rounded(int16_t* p, Floats x, Floats y) {
  // In fewer instructions than a vector of half the size takes.
#if KVPASS_LANES == 16 && defined(__AVX512BW__)
  const __m512i joined = _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)x), _mm512_cvtps_epi32((__m512)y));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), joined));
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  const __m256i joined = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x), _mm256_cvtps_epi32((__m256)y));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(joined, 0xd8));
#else
  store_rounded(p, x);
  store_rounded(p + LANES, y);
#endif
}

// What brings the numbers of some rows into such a limit, and what brings sums back.
template <int ROWS> struct Steps {
  // Lane r * (LANES / ROWS) and those behind it: row r's.
  Floats steps, inverse;

  Steps(const Floats (&largest)[ROWS], int limit) {
    const Floats top = join_rows(largest, maximum);
    const Ints some = top > 1e-30f;
    // What is infinite has no step.
    steps = select(some, top * (1.0f / limit) + (top - top), Floats{});
    inverse = select(some, (float)limit / top, Floats{});
  }
  float step(int row) const { return steps[row * (LANES / ROWS)]; }
  // The integers of a row that come nearest to its numbers, of which there are multiples of LANES.
  void store(int row, int16_t* p, const float* x, int count) const {
    const float by = inverse[row * (LANES / ROWS)];
    int i = 0;
    for (; i + LANES < count; i += 2 * LANES)
      store_rounded(p + i, load<Floats, LANES>(x + i) * by, load<Floats, LANES>(x + i + LANES) * by);
    if (i < count) store_rounded(p + i, load<Floats, LANES>(x + i) * by);
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
// Of two tokens' words, WIDTH of them, or of as many tokens as fill a vector; from the first word on
// where these fill less than one.
template <int WIDTH> inline Ints load_pairs(const uint16_t* tokens, int words) {
  constexpr auto HALF = std::make_integer_sequence<int, 2 * LANES>{};
  if constexpr (WIDTH <= LANES) return interleave<WIDTH>(load<Int16s, 2 * LANES>(tokens), HALF);
  // Put together in memory, they would be waited for.
  else return widen(load<Shorts, LANES>(tokens)) | widen(load<Shorts, LANES>(tokens + words)) << 16;
}

// Lane i: word i / 4 * 8 + FIRST + i % 4 of one token, and of another: what an instruction unpacks.
template <int FIRST, int... I>
inline Ints unpack_pairs(Int16s one, Int16s other, std::integer_sequence<int, I...>) {
  return (Ints)SHUFFLE(one, other, (I / 8 * 8 + FIRST + I / 2 % 4 + I % 2 * 2 * LANES));
}
// Vector PART of numbers that lie in the order of those words, FIRST = 0 and 4, in the words' order.
template <int PART, int... I>
inline Floats in_word_order(const Floats (&x)[2], std::integer_sequence<int, I...>) {
  return SHUFFLE(x[0], x[1],
                 ((PART * LANES + I) / 8 * 4 + I % 4 + (I / 4 % 2) * LANES));
}

// Eight words, as many as are side by side in a vector of TOKENS tokens' words.
constexpr int CHUNK = 8;

template <int ODD, int... I> inline Ints unzip(Ints a, Ints b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, ((I / 4 * 2 + ODD) * 4 + I % 4));
}
// Vectors of chunks: the even ones, then the odd ones.
template <int COUNT> inline void unzip(Ints (&x)[COUNT]) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  Ints y[COUNT];
  each<0, COUNT / 2>([&](auto i) {
    y[i] = unzip<0>(x[2 * i], x[2 * i + 1], LANE);
    y[COUNT / 2 + i] = unzip<1>(x[2 * i], x[2 * i + 1], LANE);
  });
  each<0, COUNT>([&](auto i) { x[i] = y[i]; });
}

// A chunk of integers in all places.
inline Ints repeat_chunk(const int16_t* integers) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)integers));
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  return (Ints)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)integers));
#else
  Ints x;
  for (int i = 0; i < LANES; i += 4) std::memcpy((int32_t*)&x + i, integers, 16);
  return x;
#endif
}

}  // namespace
