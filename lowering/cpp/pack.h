// A first prompt becomes a cache tensor: see kvpass/ops/pack.py.
#pragma once
#include "encode_cross_head.h"

namespace {

// Tokens that a thread takes at a time.
template <class X> constexpr int64_t CHUNK = round_up(512, X::TOKEN_GROUP);

template <class A> void pack(const A& a) {
  const auto& state = a.state;
  using X = std::decay_t<decltype(state)>;
  const int64_t pairs = state.batch * state.heads, chunks = a.count / CHUNK<X> + 1;
  const int64_t packed = X::SINKS + a.packed;
  const auto row_of = [&](int64_t pair, int64_t t) { return a.tokens.row(pair, state.heads, t); };
  if constexpr (X::PACKED && X::DEQUANT_FIRST)
    encode_tokens(state, X::SINKS, packed, a.threads, row_of);
#pragma omp parallel for num_threads(a.threads) collapse(2)
  for (int64_t pair = 0; pair < pairs; pair++) {
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const auto row = [&](int64_t t) { return row_of(pair, t); };
      const int64_t first = X::SINKS + chunk * CHUNK<X>, stop = std::min(first + CHUNK<X>, a.count);
      if constexpr (X::DIRECT) encode(state, pair, first, std::min(stop, packed), row);
      store_exact(state, pair, X::PACKED ? std::max(first, packed) : first, stop, row);
      if (chunk == 0) store_sinks(state, pair, 0, std::min<int64_t>(X::SINKS, a.count), row);
    }
  }
  const int64_t sinks = std::min<int64_t>(X::SINKS, a.count);
  state.set_ends(sinks, sinks + a.packed, a.count);
}

}  // namespace
