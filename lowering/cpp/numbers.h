// Numbers of 8 and 16 bits: those of models, and the scale and minimum of a group, side by side.
#pragma once
#include "vectors.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};

// IEEE half precision.
struct Float16 {
  uint16_t bits;

  using Pair = int32_t;
  static constexpr int BITS = 16;
  static constexpr float MAX = 65504.0f;

  static inline Floats widen(Shorts x) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif KVPASS_LANES == 8 && defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
    return widen(::widen(x));
#endif
  }
  // Given in the low 16 bits of every lane; the high bits are ignored.
  static inline Floats widen(Ints x) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
#elif KVPASS_LANES == 8 && defined(__AVX2__) && defined(__F16C__)
    const __m256i low = (__m256i)(x & 0xffff);
    return (Floats)_mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
    const Ints sign = (x & 0x8000) << 16, magnitude = x & 0x7fff;
    Ints normal = (magnitude << 13) + (112 << 23);
    normal += (magnitude >= 0x7c00) & (112 << 23);
    // Subnormal numbers: the difference of two normal ones is exact, even where denormals are flushed.
    const Floats small = (Floats)((magnitude << 13) + (113 << 23)) - 6.103515625e-05f;
    return (Floats)((Ints)select(magnitude < 0x400, small, (Floats)normal) | sign);
#endif
  }

  // Half to even.
  static inline uint16_t narrow(float value) {
    uint32_t x = bits_of<uint32_t>(value);
    const uint32_t sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return sign | 0x7e00;
    if (x >= 0x47800000) return sign | 0x7c00;
    // The sum's last place is the step of subnormal halves.
    if (x < 0x38800000) return sign | (bits_of<uint32_t>(bits_of<float>(x) + 0.5f) - 0x3f000000);
    return sign | ((x + 0xc8000fff + (x >> 13 & 1)) >> 13);
  }
};

// fp8-e4m3: four bits of exponent, three of mantissa, no infinity.
struct Float8 {
  using Pair = int16_t;
  static constexpr int BITS = 8;
  static constexpr float MAX = 448.0f;

  // Given in the low 8 bits of every lane; the high bits are ignored.
  static inline Floats widen(Ints x) {
    const Ints sign = (x & 0x80) << 24, magnitude = x & 0x7f;
    const Ints normal = (magnitude << 20) + (120 << 23);
    // Subnormal numbers: the difference of two normal ones is exact, even where denormals are flushed.
    const Floats small = (Floats)((magnitude << 20) + (121 << 23)) - 0.015625f;
    const Ints nan = (magnitude == 0x7f) & 0x7fc00000;
    return (Floats)((Ints)select(magnitude < 8, small, (Floats)normal) | sign | nan);
  }

  // Numbers up to MAX in size, half to even.
  static inline uint8_t narrow(float value) {
    uint32_t x = bits_of<uint32_t>(value);
    const uint32_t sign = x >> 24 & 0x80;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return sign | 0x7f;
    // The sum's last place is the step of subnormal numbers.
    if (x < 0x3c800000) return sign | (bits_of<uint32_t>(bits_of<float>(x) + 16384.0f) - 0x46800000);
    return sign | ((x - 0x3c000000 + 0x7ffff + (x >> 20 & 1)) >> 20);
  }
};

template <class Number> inline float widen_one(uint16_t bits) {
  return Number::widen(Ints{} + (int32_t)bits)[0];
}
template <class Number> inline auto saturated(float x) {
  return Number::narrow(std::clamp(x, -Number::MAX, Number::MAX));
}

// The scales and minima of groups.
struct Affine {
  Floats scale, minimum;
};

inline Ints widen_pairs(Ints pairs) { return pairs; }
inline Ints widen_pairs(Shorts pairs) { return widen(pairs); }

// Those of COUNT, or of count <= LANES, pairs at p.
template <class Number> inline Affine affine_of(Ints pairs) {
  return {Number::widen(pairs), Number::widen(pairs >> Number::BITS)};
}
template <class Number>
using Pairs = std::conditional_t<sizeof(typename Number::Pair) == 4, Ints, Shorts>;
// Those of LANES pairs. Halves are widened as they lie side by side, and parted then.
inline Affine part_affine(const int32_t* p) {
  constexpr auto LANE = std::make_integer_sequence<int, LANES>{};
  const Floats x = Float16::widen(load<Shorts, LANES>((const uint16_t*)p));
  const Floats y = Float16::widen(load<Shorts, LANES>((const uint16_t*)p + LANES));
  return {every_other<0>(x, y, LANE), every_other<1>(x, y, LANE)};
}
template <class Number, int COUNT> inline Affine load_affine(const typename Number::Pair* p) {
  if constexpr (std::is_same_v<Number, Float16> && COUNT == LANES)
    return part_affine(p);
  else return affine_of<Number>(widen_pairs(load<Pairs<Number>, COUNT>(p)));
}
template <class Number> inline Affine load_affine(const typename Number::Pair* p, int count) {
  if (count >= LANES) return load_affine<Number, LANES>(p);
  return affine_of<Number>(widen_pairs(load_up_to<Pairs<Number>>(p, count)));
}

// Rounds the scale and the minimum of one group to Number, and returns them as they are stored.
template <class Number> inline typename Number::Pair round_pair(float& scale, float& minimum) {
  const auto low = saturated<Number>(scale), high = saturated<Number>(minimum);
  scale = widen_one<Number>(low);
  minimum = widen_one<Number>(high);
  return (typename Number::Pair)((uint32_t)high << Number::BITS | low);
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(BFloat16 x) { return bits_of<float>((uint32_t)x.bits << 16); }
inline float to_float(Float16 x) { return widen_one<Float16>(x.bits); }

// The first COUNT numbers at p; other lanes are zero.
template <int COUNT> inline Floats load_numbers(const float* p) { return load<Floats, COUNT>(p); }
template <int COUNT> inline Floats load_numbers(const BFloat16* p) {
  return (Floats)(widen(load<Shorts, COUNT>((const uint16_t*)p)) << 16);
}
template <int COUNT> inline Floats load_numbers(const Float16* p) {
  return Float16::widen(load<Shorts, COUNT>((const uint16_t*)p));
}

// LANES integers.
template <int COUNT> inline Floats load_numbers(const int8_t* p) {
  static_assert(COUNT == LANES);
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  return __builtin_convertvector(load<Bytes, LANES>(p), Floats);
#endif
}

// Half to even.
template <int COUNT> inline void store_numbers(float* p, Floats x) { store<COUNT>(p, x); }
template <int COUNT> inline void store_numbers(BFloat16* p, Floats x) {
  const Ints raw = (Ints)x;
  const Ints even = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
  const Ints rounded = (Ints)select(x == x, (Floats)even, (Floats)(Ints{} + 0x7fc0));
  store<COUNT>(p, __builtin_convertvector(rounded, Shorts));
}
template <int COUNT> inline void store_numbers(Float16* p, Floats x) {
  for (int i = 0; i < std::min(COUNT, LANES); i++) p[i].bits = Float16::narrow(x[i]);
}

// Two vectors rounded to bfloat16, one behind the other; of subnormal numbers some processors make zero.
inline Words round_both(Floats a, Floats b) {
#if KVPASS_LANES == 16 && defined(__AVX512BF16__)
  return (Words)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
  BFloat16 x[2 * LANES];
  store_numbers<LANES>(x, a);
  store_numbers<LANES>(x + LANES, b);
  return load<Words, 2 * LANES>(x);
#endif
}

}  // namespace
