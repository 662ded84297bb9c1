// Vectors of LANES 32-bit numbers in the compiler's own vector types.
#pragma once
#ifndef KVPASS_LANES
#define KVPASS_LANES 8
#endif
// The first of all headers, so that what is precompiled in its place can bring the others.
#if KVPASS_LANES > 4 && defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int LANES = KVPASS_LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t Words __attribute__((vector_size(4 * LANES)));
constexpr float INFINITE = std::numeric_limits<float>::infinity();

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class To, class From> inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <int... I> inline Floats all(float x, std::integer_sequence<int, I...>) {
  return Floats{((void)I, x)...};
}
inline Floats all(float x) { return all(x, std::make_integer_sequence<int, LANES>{}); }

template <int... I> inline Ints lane_numbers(std::integer_sequence<int, I...>) { return Ints{I...}; }
inline Ints lane_numbers() { return lane_numbers(std::make_integer_sequence<int, LANES>{}); }

// The first COUNT elements at p; the other lanes are zero and their memory is not read.
template <class Vector, int COUNT, class Element> inline Vector load(const Element* p) {
  constexpr int WIDTH = sizeof(Vector) / sizeof(Element);
  if constexpr (COUNT >= WIDTH) {
    Vector x;
    std::memcpy(&x, p, sizeof x);
    return x;
#if KVPASS_LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
  } else if constexpr (sizeof(Element) == 2) {
    return (Vector)_mm256_maskz_loadu_epi16((__mmask16)((1u << COUNT) - 1), p);
  } else if constexpr (sizeof(Element) == 4) {
    return (Vector)_mm512_maskz_loadu_epi32((__mmask16)((1u << COUNT) - 1), p);
#endif
  } else {
    Vector x{};
    std::memcpy(&x, p, COUNT * sizeof(Element));
    return x;
  }
}

// The first count <= LANES elements at p; the other lanes are zero and their memory is not read.
template <class Vector, class Element> inline Vector load_up_to(const Element* p, int count) {
  if (count >= LANES) return load<Vector, LANES>(p);
  Vector x{};
  std::memcpy(&x, p, count * sizeof(Element));
  return x;
}

template <int COUNT, class Vector, class Element> inline void store(Element* p, Vector x) {
  std::memcpy(p, &x, COUNT * sizeof(Element));
}

// 16-bit words as numbers of 32 bits. Some compilers make five instructions of the plain form.
inline Ints widen(Shorts x) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32((__m256i)x);
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Ints);
#endif
}

// (x & mask) | bits, in one instruction that leaves mask and bits in their registers.
inline Ints pick(Ints x, Ints mask, Ints bits) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)mask, (__m512i)bits, 0xea);
#elif KVPASS_LANES == 8 && defined(__AVX512VL__)
  return (Ints)_mm256_ternarylogic_epi32((__m256i)x, (__m256i)mask, (__m256i)bits, 0xea);
#else
  return (x & mask) | bits;
#endif
}

// One vector's numbers in the mask's bits, the other's elsewhere.
inline Ints blend(int mask, Ints one, Ints other) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Ints)_mm512_ternarylogic_epi32((__m512i)(Ints{} + mask), (__m512i)one, (__m512i)other, 0xca);
#else
  return (one & mask) | (other & ~mask);
#endif
}

template <class Vector> inline Vector select(Ints condition, Vector yes, Vector no) {
  return condition ? yes : no;
}
// The second argument if one of them is NaN, which is what instructions for this do; of the plain
// form compilers make two.
#if KVPASS_LANES == 16 && defined(__AVX512F__)
inline Floats maximum(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats minimum(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#elif KVPASS_LANES == 8 && defined(__AVX2__)
inline Floats maximum(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats minimum(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
#endif
inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
// The magnitude of x, or what is larger of those before.
inline Floats larger_magnitude(Floats before, Floats x) {
#if KVPASS_LANES == 16 && defined(__AVX512DQ__)
  return (Floats)_mm512_range_ps((__m512)before, (__m512)x, 0b1011);
#else
  return maximum(before, magnitude(x));
#endif
}

#if defined(__clang__)
#define SHUFFLE(a, b, index) __builtin_shufflevector(a, b, index...)
#else
#define SHUFFLE(a, b, index) __builtin_shuffle(a, b, decltype((a) == (a)){index...})
#endif

// Lane i: lane 2 * i + FIRST of both vectors, one behind the other.
template <int FIRST, int... I>
inline Floats every_other(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return SHUFFLE(a, b, (2 * I + FIRST));
}

template <int N> using Constant = std::integral_constant<int, N>;

// Calls body(offset, count) for every vector of SIZE elements; both are compile-time constants.
template <int SIZE, class Body, int... I>
inline void each_vector(const Body& body, std::integer_sequence<int, I...>) {
  (body(Constant<I * LANES>{}, Constant<std::min(LANES, SIZE - I * LANES)>{}), ...);
}
template <int SIZE, class Body> inline void each_vector(const Body& body) {
  each_vector<SIZE>(body, std::make_integer_sequence<int, (SIZE + LANES - 1) / LANES>{});
}

// Calls body(i) for i in FIRST ... LAST - 1, compile-time constants.
template <int FIRST, class Body, int... I>
inline void each(const Body& body, std::integer_sequence<int, I...>) {
  (body(Constant<FIRST + I>{}), ...);
}
template <int FIRST, int LAST, class Body> inline void each(const Body& body) {
  each<FIRST>(body, std::make_integer_sequence<int, std::max(0, LAST - FIRST)>{});
}

}  // namespace
