// Encoding of tokens whose heads belong together: static ranges and codebooks, outliers, groups of
// several heads. As kvpass/format/quantize.py does, but for the order of outliers.
#pragma once
#include "encode.h"

namespace {

// The codes of count numbers.
template <class X>
inline void nearest(
    const X& state, const float* x, int count, const float* scales, const float* minima, int stride,
    int32_t* codes) {
  for (int i = 0; i < count; i++) {
    const float scale = scales[i * stride], normal = (x[i] - minima[i * stride]) / scale;
    if constexpr (X::CODEBOOK) {
      int32_t code = 0;
      for (int j = 0; j < X::MAX_CODE; j++) code += state.midpoints[j] < normal;
      codes[i] = code;
    } else {
      // Adding 2^23 rounds half to even and leaves the code in the low bits.
      const float steps =
          normal > 0 ? std::min<float>(normal, X::MAX_CODE) + 8388608.0f : 8388608.0f;
      codes[i] = scale > 0 ? bits_of<int32_t>(steps) & 255 : 0;
    }
  }
}

inline uint32_t outlier(const float* x, int channel) {
  return (uint32_t)saturated<Float16>(x[channel]) << 16 | channel;
}

// What encoding one token needs; memory is kept for the next.
struct Scratch {
  std::vector<float> x, keys;
  std::vector<int32_t> codes, channels;
};

// The extremes of SIZE numbers without COUNT outliers, half of them at each end, which go to slots.
template <int SIZE, int COUNT>
inline std::pair<float, float> inner_extremes(const float* x, Scratch& scratch, uint32_t* slots) {
  auto& [_, keys, codes, channels] = scratch;
  constexpr int HALF = COUNT / 2;
  // What is no number counts as largest.
  for (int i = 0; i < SIZE; i++) {
    keys[i] = or_infinite(x[i]);
    channels.push_back(i);
  }
  const auto below = [&keys = keys](int a, int b) { return keys[a] < keys[b]; };
  std::nth_element(channels.begin(), channels.begin() + HALF, channels.end(), below);
  const float low = x[channels[HALF]];
  std::nth_element(channels.begin() + HALF, channels.end() - HALF - 1, channels.end(), below);
  const float high = x[channels[SIZE - HALF - 1]];
  for (int i = 0; i < HALF; i++) {
    slots[i] = outlier(x, channels[i]);
    slots[HALF + i] = outlier(x, channels[SIZE - HALF + i]);
  }
  return {low, high};
}

// Groups are channels of a token, of several heads.
template <class X>
inline void encode_groups(
    const X& state, int64_t batch, int64_t slot, Scratch& scratch, uint32_t* slots) {
  constexpr int SIZE = X::HEADS_PER_GROUP * X::DIM;
  for (int g = 0; g < state.heads / X::HEADS_PER_GROUP; g++) {
    const float* part = &scratch.x[g * SIZE];
    std::pair<float, float> range;
    if constexpr (X::OUTLIERS > 0) range = inner_extremes<SIZE, X::OUTLIERS>(part, scratch, slots);
    else range = extremes<SIZE>(part);
    float scale, minimum;
    *state.qparams_at(batch * state.heads + g * X::HEADS_PER_GROUP, slot) =
        set_scale<X>(range.first, range.second, 1, scale, minimum);
    nearest(state, part, SIZE, &scale, &minimum, 0, &scratch.codes[g * SIZE]);
  }
}

// Every channel has a static range. Outliers are what lies farthest beyond these.
template <class X>
inline void encode_channels(const X& state, int64_t batch, Scratch& scratch, uint32_t* slots) {
  auto& [x, keys, codes, channels] = scratch;
  Scales<X> scales;
  for (int h = 0; h < state.heads; h++) {
    scales.read(state.qparams_at(batch * state.heads + h, 0));
    const float* part = &x[h * X::DIM];
    nearest(state, part, X::DIM, scales.scale, scales.minimum, 1, &codes[h * X::DIM]);
    for (int d = 0; X::OUTLIERS > 0 && d < X::DIM; d++) {
      const float scale = scales.scale[d], minimum = scales.minimum[d];
      const float low = X::CODEBOOK ? minimum - scale : minimum;
      const float high = minimum + (X::CODEBOOK ? scale : scale * X::MAX_CODE);
      const float excess = std::max(low - part[d], part[d] - high);
      // What is no number is beyond any range.
      if (excess <= 0) continue;
      keys[h * X::DIM + d] = part[d] == part[d] ? excess : INFINITE;
      channels.push_back(h * X::DIM + d);
    }
  }
  const int found = std::min<int>(channels.size(), X::OUTLIERS);
  if (found < (int)channels.size())
    std::nth_element(
        channels.begin(), channels.begin() + found, channels.end(),
        [&keys = keys](int a, int b) { return keys[a] > keys[b]; });
  for (int i = 0; i < X::OUTLIERS; i++)
    slots[i] = i < found ? outlier(x.data(), channels[i]) : 0xffff;
}

// Encodes a token of sequence `batch` into `slot`; row(head) points to its channels.
template <class X, class Row>
void encode_token(const X& state, int64_t batch, int64_t slot, const Row& row) {
  using Code = typename X::Code;
  const int heads = state.heads, count = heads * X::DIM;
  static thread_local Scratch scratch;
  auto& [x, keys, codes, channels] = scratch;
  x.resize(count + LANES);
  codes.resize(count + LANES);
  for (int h = 0; h < heads; h++) {
    const auto* token = row(h);
    each_vector<X::DIM>([&](auto at, auto width) {
      store<width>(&scratch.x[h * X::DIM + at], load_numbers<width>(token + at));
    });
  }
  uint32_t* slots = nullptr;
  if constexpr (X::OUTLIERS > 0) {
    slots = (uint32_t*)state.outliers_of(batch, slot);
    keys.resize(count);
    channels.clear();
  }
  if constexpr (X::BY_TOKEN) encode_groups(state, batch, slot, scratch, slots);
  else encode_channels(state, batch, scratch, slots);
  for (int h = 0; h < heads; h++)
    put_words<Code>(
        [&](auto channel, auto lanes) {
          return load<Ints, lanes>(&scratch.codes[h * X::DIM + channel]);
        },
        state.codes_at(batch * heads + h, slot));
}

// Encodes tokens first ... stop of all sequences; row(pair, t) points to the channels of token t.
template <class X, class Row>
void encode_tokens(const X& state, int64_t first, int64_t stop, int threads, const Row& row) {
#pragma omp parallel for num_threads(threads) collapse(2)
  for (int64_t b = 0; b < state.batch; b++)
    for (int64_t t = first; t < stop; t++)
      encode_token(state, b, state.slot_of(t), [&](int64_t h) { return row(b * state.heads + h, t); });
}

}  // namespace
