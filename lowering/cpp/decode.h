// Decoding of packed tokens, as kvpass/format/quantize.py does.
#pragma once
#include "cache.h"

namespace {

// Tokens that are asked for ahead of their decoding; beyond the end that does nothing.
constexpr int AHEAD = 64;

// Codes of BITS bits as the numbers of a codebook of 16.
template <int BITS> inline Floats look_up(const float* codebook, Ints code) {
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(codebook));
#elif KVPASS_LANES == 8 && defined(__AVX2__)
  const Floats low = (Floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(codebook), (__m256i)code);
  if constexpr (BITS < 4) return low;
  const Floats high =
      (Floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(codebook + 8), (__m256i)code);
  return select(code < 8, low, high);
#else
  Floats x{};
  for (int i = 0; i < LANES; i++) x[i] = codebook[code[i]];
  return x;
#endif
}

// Writes a token's channels; affine(plane, at) gives the scales and minima of a vector of them.
template <class X, class Number, class AffineOf>
inline void decode_token(
    const uint16_t* words, const AffineOf& affine, const float* codebook, Number* out) {
  using Code = typename X::Code;
  using Codes = typename Code::Codes;
  each_vector<Code::WIDTH>([&](auto at, auto width) {
    each<0, Codes::CHAINS>([&](auto chain) {
      Codes codes;
      codes.template start<chain, 0, at, width>(words, Code::WIDTH);
      each<0, Codes::DEPTH>([&](auto step) {
        constexpr int PLANE = Codes::plane(chain, step), COUNT = Code::channels(PLANE, at);
        if constexpr (COUNT > 0) {
          const Affine group = affine(Constant<PLANE>{}, at);
          const Ints code = code_of<PLANE>(codes);
          Floats x;
          if constexpr (X::CODEBOOK) x = look_up<X::BITS>(codebook, code);
          else x = __builtin_convertvector(code, Floats);
          store_numbers<COUNT>(out + PLANE * Code::WIDTH + at, x * group.scale + group.minimum);
        }
        codes.next();
      });
    });
  });
}

// Decodes the tokens of `count` slots of one (batch, head) from `slot` on, STRIDE numbers apart.
template <int STRIDE, class X, class Number>
void decode(const X& state, int64_t pair, int64_t slot, int64_t count, Number* out) {
  using Code = typename X::Code;
  const uint16_t* words = state.codes_at(pair, slot);
  const float* codebook = state.codebook;
  const auto put = [=](int64_t t, const auto& affine) {
    Code::prefetch(words + (t + AHEAD) * Code::WORDS);
    decode_token<X>(words + t * Code::WORDS, affine, codebook, out + t * STRIDE);
  };
  if constexpr (X::BY_TOKEN) {
    alignas(64) float scales[Code::GROUPS][LANES], minima[Code::GROUPS][LANES];
    const auto* qparams = state.qparams_at(pair, slot);
    for (int64_t t = 0; t < count; t += LANES) {
      const int some = std::min<int64_t>(count - t, LANES);
      for (int g = 0; g < Code::GROUPS; g++) {
        const auto* place = qparams + g * state.capacity + t;
        const Affine affine = load_affine<typename X::Number>(place, some);
        store<LANES>(scales[g], affine.scale);
        store<LANES>(minima[g], affine.minimum);
      }
      for (int u = 0; u < some; u++)
        put(t + u, [&](auto plane, auto at) {
          using Span = typename Code::template Span<plane, at>;
          return Affine{spread<Span>([&](int group) { return all(scales[group][u]); }),
                        spread<Span>([&](int group) { return all(minima[group][u]); })};
        });
    }
  } else {
    Scales<X> scales;
    for (int64_t t = 0; t < count;) {
      // Without groups, all tokens have one range.
      scales.read(state.qparams_at(pair, slot + t));
      const int64_t next = ((slot + t) / X::TOKEN_GROUP + 1) * X::TOKEN_GROUP - slot;
      const int64_t end = X::GROUP ? std::min(count, next) : count;
      for (; t < end; t++)
        put(t, [&](auto plane, auto at) {
          constexpr int FIRST = plane * Code::WIDTH + at;
          return Affine{load<Floats, LANES>(scales.scale + FIRST),
                        load<Floats, LANES>(scales.minimum + FIRST)};
        });
    }
  }
}

}  // namespace
