// Encoding of tokens exactly as kvpass/format/quantize.py does: same words, same scales and minima.
#pragma once
#include "cache.h"
#include "lanes.h"

namespace {

// A number, infinite where it is none, so that the largest of a group tells.
inline float or_infinite(float x) { return x == x ? x : INFINITE; }

// The extremes of each lane of some vectors; the larger one is infinite where one was no number.
struct Extremes {
  Floats low, most;
  Ints number;

  explicit Extremes(Floats x) : low(x), most(x), number(x == x) {}
  void add(Floats x) {
    low = minimum(low, x);
    most = maximum(most, x);
    number &= x == x;
  }
  Floats high() const { return select(number, most, all(INFINITE)); }
};

// The same of SIZE numbers.
template <int SIZE> inline std::pair<float, float> extremes(const float* x) {
  if constexpr (SIZE >= LANES) {
    Extremes ends(load<Floats, LANES>(x));
    // The last vector may hold some that were seen before.
    for (int i = LANES; i < SIZE; i += LANES)
      ends.add(load<Floats, LANES>(x + std::min(i, SIZE - LANES)));
    return {join_lanes(ends.low, minimum), join_lanes(ends.high(), maximum)};
  }
  float low = INFINITE, high = -INFINITE;
  for (int i = 0; i < SIZE; i++) {
    low = std::min(low, x[i]);
    high = std::max(high, or_infinite(x[i]));
  }
  return {low, high};
}

// Sets the scale and minimum of one group from its extremes and returns them as stored. A codebook's
// numbers lie from -1 to 1. What is infinite or no number leaves no number of its group.
template <class X>
inline auto set_scale(float low, float high, float factor, float& scale, float& minimum) {
  if (!(low > -INFINITE && high < INFINITE)) low = std::numeric_limits<float>::quiet_NaN();
  scale = (high - low) * factor / (X::CODEBOOK ? 2 : X::MAX_CODE);
  minimum = X::CODEBOOK ? (high + low) / 2 : low * factor;
  return round_pair<typename X::Number>(scale, minimum);
}

// Groups are channels of one token.
template <class X>
inline void set_token_scales(
    const X& state, int64_t pair, int64_t slot, const typename X::Element* token,
    Scales<X>& scales) {
  constexpr int GROUPS = X::DIM / X::GROUP;
  // The ends of a group are multiplied by the factor of its channels.
  const float* clip = X::CLIPPED ? state.clip + pair % state.heads * GROUPS : nullptr;
  alignas(64) float x[round_up(X::DIM, LANES)];
  each_vector<X::DIM>([&](auto at, auto width) {
    store<LANES>(x + at, load_numbers<width>(token + at));
  });
  auto* qparams = state.qparams_at(pair, slot);
  for (int g = 0; g < GROUPS; g++) {
    const float* run = x + g * X::RUN;
    auto [low, high] = extremes<X::RUN>(run);
    if constexpr (X::PERIOD < X::DIM) {
      const auto [other_low, other_high] = extremes<X::RUN>(run + X::PERIOD);
      low = std::min(low, other_low);
      high = std::max(high, other_high);
    }
    float scale, minimum;
    qparams[g * state.capacity] =
        set_scale<X>(low, high, X::CLIPPED ? clip[g] : 1.0f, scale, minimum);
    for (int at = g * X::RUN; at < X::DIM; at += X::PERIOD) {
      std::fill_n(scales.scale + at, X::RUN, scale);
      std::fill_n(scales.minimum + at, X::RUN, minimum);
    }
  }
}

// Groups are tokens of one channel.
template <class X, class Row>
inline void set_channel_scales(
    const X& state, int64_t pair, int64_t slot, const Row& row, Scales<X>& scales) {
  const float factor = X::CLIPPED ? *state.clip : 1.0f;
  auto* qparams = state.qparams_at(pair, slot);
  each_vector<X::DIM>([&](auto at, auto width) {
    Extremes ends(load_numbers<width>(row(0) + at));
    for (int t = 1; t < X::GROUP; t++) ends.add(load_numbers<width>(row(t) + at));
    const Floats high = ends.high();
    for (int i = 0; i < width; i++)
      qparams[at + i] = set_scale<X>(
          ends.low[i], high[i], factor, scales.scale[at + i], scales.minimum[at + i]);
  });
}

// The codes of COUNT channels from CHANNEL on.
template <int CHANNEL, int COUNT, class X>
inline Ints codes_of(const typename X::Element* row, const Scales<X>& scales) {
  const Floats x = load_numbers<COUNT>(row + CHANNEL);
  const Floats scale = load<Floats, COUNT>(scales.scale + CHANNEL);
  const Floats offset = load<Floats, COUNT>(scales.minimum + CHANNEL);
  const Floats steps = minimum(maximum((x - offset) / scale, Floats{}), all(X::MAX_CODE));
  // Adding 2^23 rounds half to even and leaves the code in the low bits.
  return (Ints)(steps + 8388608.0f) & 255 & (scale > Floats{});
}

// Encodes tokens first ... stop of one (batch, head); row(t) points to the channels of token t.
template <class X, class Row>
void encode(const X& state, int64_t pair, int64_t first, int64_t stop, const Row& row) {
  using Code = typename X::Code;
  Scales<X> scales;
  for (int64_t start = first; start < stop; start += X::TOKEN_GROUP) {
    const int64_t slot = state.slot_of(start);
    if constexpr (X::BY_TOKEN) set_token_scales(state, pair, slot, row(start), scales);
    else set_channel_scales(state, pair, slot, [&](int t) { return row(start + t); }, scales);
    for (int t = 0; t < X::TOKEN_GROUP; t++) {
      const auto* token = row(start + t);
      put_words<Code>(
          [&](auto channel, auto count) { return codes_of<channel, count>(token, scales); },
          state.codes_at(pair, slot) + t * Code::WORDS);
    }
  }
}

// Stores tokens first ... stop as they are, among the sinks or in the ring of one (batch, head).
template <class X, class Row>
void store_sinks(const X& state, int64_t pair, int64_t first, int64_t stop, const Row& row) {
  if constexpr (X::SINKS > 0)
    for (int64_t t = first; t < stop; t++) copy_token(state.sink(pair, t), row(t), X::DIM);
}
template <class X, class Row>
void store_exact(const X& state, int64_t pair, int64_t first, int64_t stop, const Row& row) {
  for (int64_t t = first; t < stop; t++)
    std::memmove(state.exact(pair, t), row(t), X::DIM * sizeof(typename X::Element));
}

}  // namespace
