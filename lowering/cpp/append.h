// New tokens join a cache tensor in place: see kvpass/ops/append.py.
#pragma once
#include "encode_cross_head.h"
#include "rotary.h"

namespace {

// Returns the number of packed tokens that there is room for if they are too many, else -1.
template <class A> int64_t append_packed(const A& a) {
  const auto& state = a.state;
  using X = std::decay_t<decltype(state)>;
  const auto tokens = rotated_tokens(a);
  // Every sequence of a batch has the same ends.
  const int64_t written = state.end(0);
  // New tokens that are sinks; the others are treated as if those had been there before.
  const int64_t filling = std::clamp<int64_t>(X::SINKS - written, 0, a.count);
  const int64_t total = written + filling, count = a.count - filling;
  const int64_t packed = filling ? total : state.packed_end(0);
  // Tokens of one step are looked at after they have joined.
  const int64_t seen = a.count <= A::MAX_STEP ? total : total + count;
  const int64_t end = a.packed_end < 0 ? packed + X::due(packed, seen - packed) : a.packed_end;
  if (!X::SLIDING && end - X::SINKS > state.capacity) return state.capacity;
  // Of more tokens than there are slots, the last ones stay.
  const int64_t oldest = X::SLIDING ? std::max(packed, end - state.capacity) : packed;
  const int64_t pairs = state.batch * state.heads;
  const auto row_of = [&](int64_t pair, int64_t t) -> const typename A::Element* {
    return t < total ? state.exact(pair, t) : tokens.row(pair, state.heads, t - written);
  };
  // Waking threads costs more than storing a few tokens.
  const int threads = (end - packed) * pairs < 64 ? 1 : a.threads;
  if constexpr (X::DEQUANT_FIRST) encode_tokens(state, oldest, end, threads, row_of);
#pragma omp parallel for num_threads(threads)
  for (int64_t pair = 0; pair < pairs; pair++) {
    const auto row = [&](int64_t t) { return row_of(pair, t); };
    if constexpr (X::DIRECT) encode(state, pair, oldest, end, row);
    store_exact(state, pair, std::max(total, end), total + count, row);
    const auto sink = [&](int64_t t) { return tokens.row(pair, state.heads, t - written); };
    store_sinks(state, pair, written, total, sink);
  }
  // Until sinks are all there, they are all that is.
  state.set_ends(filling ? total : state.segment_ends[0], end, total + count);
  return -1;
}

// Tokens are stored as they are, and every sequence has an end of its own.
template <class A> int64_t append_exact(const A& a) {
  const auto& state = a.state;
  using X = std::decay_t<decltype(state)>;
  const auto tokens = rotated_tokens(a);
  for (int64_t b = 0; b < state.batch; b++)
    if (!X::SLIDING && state.end(b) + a.count > state.capacity) return state.capacity;
  // Of more tokens than there are slots, the last ones stay.
  const int64_t oldest = X::SLIDING ? std::max<int64_t>(0, a.count - state.capacity) : 0;
  for (int64_t pair = 0; pair < state.batch * state.heads; pair++) {
    const int64_t total = state.end(pair / state.heads);
    for (int64_t t = oldest; t < a.count; t++)
      copy_token(state.exact(pair, total + t), tokens.row(pair, state.heads, t), X::DIM);
  }
  for (int64_t b = 0; b < state.batch; b++) state.end(b) += a.count;
  return -1;
}

template <class A> int64_t append(const A& a) {
  if (a.state.batch * a.state.heads == 0) return -1;
  if constexpr (decltype(a.state)::PACKED) return append_packed(a);
  else return append_exact(a);
}

}  // namespace
