// The functions that scores go through.
#pragma once
#include "vectors.h"

namespace {

// 2^f on [-0.5, 0.5]: least squares of the relative error.
inline Floats power_of_2(Floats f) {
  Floats y = all(0.0013266971f);
  y = y * f + 0.00967546f;
  y = y * f + 0.055507425f;
  y = y * f + 0.24022122f;
  y = y * f + 0.69314694f;
  return y * f + 1.0000001f;
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87, NaN for NaN.
inline Floats exponential(Floats x) {
  x *= 1.44269504f;
#if KVPASS_LANES == 16 && defined(__AVX512F__)
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 y = (__m512)power_of_2(x - (Floats)whole);
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-126.0f), _CMP_NLE_UQ);
  return (Floats)_mm512_maskz_scalef_ps(seen, y, whole);
#else
  const Ints seen = ~(x <= all(-126.0f));
  x = maximum(all(-126.0f), x);
  const Ints exponent = __builtin_convertvector(x - 0.5f, Ints);
  const Floats y = power_of_2(x - __builtin_convertvector(exponent, Floats));
  return (Floats)(((Ints)y + (exponent << 23)) & seen);
#endif
}

// tanh, absolute error below 2e-7. The polynomial near 0 is that of the Cephes library.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = magnitude(x), y = exponential(-2.0f * size);
  const Floats far = (1.0f - y) / (1.0f + y), square = x * x;
  Floats near = square * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * x + x;
  return select(size < 0.625f, near, (Floats)((Ints)far | ((Ints)x & (Ints{} + INT32_MIN))));
}

// Scores become cap * tanh(scores / cap).
inline void cap_scores(float* scores, int count, float cap) {
  const Floats inverse = all(1 / cap);
  for (int t = 0; t < count; t += LANES) {
    const Floats x = load<Floats, LANES>(scores + t) * inverse;
    store<LANES>(scores + t, hyperbolic_tangent(x) * cap);
  }
}

}  // namespace
