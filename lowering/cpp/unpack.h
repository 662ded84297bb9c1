// A cache tensor as plain tokens: see kvpass/ops/unpack.py.
#pragma once
#include "decode.h"

namespace {

// Decodes tokens first ... stop of one (batch, head), which are packed, to out.
template <class X>
void decode_tokens(
    const X& state, int64_t pair, int64_t first, int64_t stop, typename X::Element* out) {
  for (int64_t count; first < stop; first += count, out += count * X::DIM) {
    const int64_t slot = state.slot_of(first);
    count = X::SLIDING ? std::min(stop - first, state.capacity - slot) : stop - first;
    decode<X::DIM>(state, pair, slot, count, out);
  }
}

template <class A> void unpack(const A& a) {
  const auto& state = a.state;
  using X = std::decay_t<decltype(state)>;
  const int64_t pairs = state.batch * state.heads;
  if (pairs == 0) return;
  // Every sequence of a batch has the same ends.
  const int64_t written = state.end(0);
  // The tensor is tokens first ... last; those that are not written yet are zeros.
  const int64_t first = X::SLIDING ? std::max<int64_t>(0, written - a.count) : 0;
  const int64_t last = first + a.count, total = std::min(written, last);
  const int64_t packed = std::min(state.packed_end(0), total);
  // Tokens that a thread takes at a time.
  constexpr int64_t CHUNK = round_up(512, X::TOKEN_GROUP);
  const int64_t begin = first / CHUNK, end = last / CHUNK + 1;
#pragma omp parallel for num_threads(a.threads) collapse(2)
  for (int64_t pair = 0; pair < pairs; pair++) {
    for (int64_t chunk = begin; chunk < end; chunk++) {
      const auto out = [&](int64_t t) { return a.out + (pair * a.count + t - first) * X::DIM; };
      const int64_t start = std::max(first, chunk * CHUNK);
      const int64_t stop = std::min((chunk + 1) * CHUNK, last), filled = std::min(stop, total);
      int64_t t = start;
      if constexpr (X::SINKS > 0)
        for (; t < std::min<int64_t>(filled, X::SINKS); t++)
          copy_token(out(t), state.sink(pair, t), X::DIM);
      if constexpr (X::PACKED) decode_tokens(state, pair, t, std::min(filled, packed), out(t));
      for (t = std::max(t, packed); t < filled; t++)
        copy_token(out(t), state.exact(pair, t), X::DIM);
      const int64_t empty = std::max(start, total);
      if (empty < stop) std::fill(out(empty), out(stop), typename X::Element{});
    }
  }
}

}  // namespace
