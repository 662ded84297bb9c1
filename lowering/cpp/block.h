// Blocks of tokens, decoded.
#pragma once
#include "decode.h"
#include "lanes.h"
#include "pair.h"

namespace {

// Tokens a power of two apart would share few places of the processor's cache.
template <class X> constexpr int STRIDE = round_up(X::DIM, 16) + 16;

// Puts the outliers of `count` tokens, COUNT of each and of all heads, into those of one head.
template <int COUNT, int DIM, int STRIDE>
void put_outliers(const int32_t* outliers, int count, int head, float* out) {
  // Behind the last lane: nothing, which goes behind the last channel.
  static_assert(STRIDE > DIM);
  alignas(64) float values[LANES + 1]{};
  alignas(64) int32_t channels[LANES + 1]{};
  channels[LANES] = DIM;
  for (int t = 0; t < count; t++, outliers += COUNT, out += STRIDE) {
    for (int i = 0; i < COUNT; i += 64 / sizeof *outliers)
      __builtin_prefetch(outliers + AHEAD * COUNT + i);
    each_vector<COUNT>([&](auto at, auto width) {
      const Ints outlier = load<Ints, width>(outliers + at), channel = (outlier & 0xffff) - head * DIM;
      const Ints here = (channel >= 0) & (channel < DIM) & (lane_numbers() < (int)width);
      uint32_t bits = bits_of_lanes(here);
      store<LANES>(values, Float16::widen(outlier >> 16));
      store<LANES>(channels, channel);
      const auto put = [&] {
        const int i = __builtin_ctz(bits | 1u << LANES);
        out[channels[i]] = values[i];
        bits &= bits - 1;
      };
      // Hardly a head has more of them: without a branch that depends on how many it has.
      each<0, std::min<int>(width, LANES < 16 ? 2 : 3)>([&](auto) { put(); });
      while (bits) put();
    });
  }
}

// Rotates one key: its first HALF channels with its last ones, or channels side by side.
template <bool HALVES, int HALF, class Scalar> inline void rotate_key(const Scalar* row, float* key) {
  if constexpr (HALVES) {
    each_vector<HALF>([&](auto at, auto width) {
      const Floats cos = load_numbers<width>(row + at), sin = load_numbers<width>(row + HALF + at);
      const Floats a = load<Floats, width>(key + at), b = load<Floats, width>(key + HALF + at);
      store<width>(key + at, a * cos - b * sin);
      store<width>(key + HALF + at, b * cos + a * sin);
    });
  } else {
    alignas(64) float cos[round_up(HALF, LANES)], sin[round_up(HALF, LANES)];
    each_vector<HALF>([&](auto at, auto width) {
      store<LANES>(cos + at, load_numbers<width>(row + at));
      store<LANES>(sin + at, load_numbers<width>(row + HALF + at));
    });
    for (int i = 0; i < HALF; i++) {
      const float a = key[2 * i], b = key[2 * i + 1];
      key[2 * i] = a * cos[i] - b * sin[i];
      key[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  }
}

// Multiplies tokens by their factors.
template <class X, class Number> void scale_tokens(const Number* factors, int count, float* out) {
  for (int t = 0; t < count; t++, out += STRIDE<X>) {
    const float factor = to_float(factors[t]);
    each_vector<X::DIM>([&](auto at, auto width) {
      store<width>(out + at, load<Floats, width>(out + at) * factor);
    });
  }
}

// Tokens start ... start + count of the keys or the values go to out, STRIDE<X> numbers apart.
template <class A, class X>
void decode_tokens(const Pair<A>& pair, const Stored<X>& stored, int64_t start, int count, float* out) {
  const X& x = stored.x;
  pair.each_run_of(
      stored, start, count,
      [&](int64_t slot, int first, int n) {
        float* place = out + first * STRIDE<X>;
        if constexpr (X::PACKED) decode<STRIDE<X>>(x, pair.pair, slot, n, place);
        if constexpr (X::TOKEN_SCALES > 0)
          scale_tokens<X>(x.token_scales + pair.batch * x.capacity + slot, n, place);
        if constexpr (X::OUTLIERS > 0)
          put_outliers<X::OUTLIERS, X::DIM, STRIDE<X>>(
              x.outliers_of(pair.batch, slot), n, pair.pair % x.heads, place);
      },
      [&](auto* tokens, int first, int n) {
        float* place = out + first * STRIDE<X>;
        for (int t = 0; t < n; t++, tokens += X::DIM, place += STRIDE<X>)
          each_vector<X::DIM>([&](auto at, auto width) {
            store<width>(place + at, load_numbers<width>(tokens + at));
          });
      });
  if constexpr (X::ROPE_CHANNELS > 0)
    each_run(start + pair.gone(start, count), start + count, x.cos_sin_capacity,
             [&](int64_t slot, int64_t first, int n) {
               const auto* row = x.cos_sin + pair.batch * x.cos_sin_batch + slot * X::ROPE_CHANNELS;
               float* key = out + (first - start) * STRIDE<X> + X::ROPE_START;
               for (int t = 0; t < n; t++, row += X::ROPE_CHANNELS, key += STRIDE<X>) {
                 for (int i = 0; i < X::ROPE_CHANNELS; i += 64 / sizeof *row)
                   __builtin_prefetch(row + AHEAD * X::ROPE_CHANNELS + i);
                 rotate_key<X::ROPE_HALVES, X::ROPE_CHANNELS / 2>(row, key);
               }
             });
}

}  // namespace
