// Sums of packed keys' codes times a few query rows.
#pragma once
#include "panel.h"

namespace {

// Query rows as they are in the units of the codes.
template <class A> inline void arrange_query(const Panel<A>& panel, FloatQuery<A>& result) {
  using Keys = typename A::K::Code;
  each<0, A::ROWS>([&](auto r) {
    Keys::each_place([&](auto plane, auto at, auto place) {
      constexpr int CHANNEL = plane * Keys::WIDTH + at;
      const Floats q = repeat<LANES / Keys::TOKENS>(
          load<Floats, Keys::channels(plane, at)>(panel.rows[r].query + CHANNEL));
      store<LANES>(result.vectors[r] + place * LANES, q * unit<typename Keys::Codes>(plane));
    });
  });
}

// Query rows whose codes have the scales and minima of a group of tokens.
template <class A>
inline void scale_query(
    const typename A::K::Pair* qparams, const Panel<A>& panel, FloatQuery<A>& result) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int ROWS = A::ROWS;
  Floats offset[ROWS]{};
  Keys::each_place([&](auto plane, auto at, auto place) {
    constexpr int FIRST = plane * Keys::WIDTH + at;
    const auto [scale, minimum] =
        load_affine<typename K::Number, Keys::channels(plane, at)>(qparams + FIRST);
    if constexpr (FIRST * sizeof(*qparams) % 64 == 0) __builtin_prefetch(qparams + FIRST + K::DIM);
    constexpr int REPEATED = LANES / Keys::TOKENS;
    const Floats step = repeat<REPEATED>(scale);
    const Floats start = repeat<REPEATED>(minimum) * (1 / unit<typename Keys::Codes>(plane));
    each<0, ROWS>([&](auto r) {
      const Floats q = load<Floats, LANES>(panel.query.vectors[r] + place * LANES);
      offset[r] += q * start;
      store<LANES>(result.vectors[r] + place * LANES, q * step);
    });
  });
  each<0, ROWS>([&](auto r) { result.offset[r] = offset[r]; });
}

// The lane in which lane_sums leaves lane i of join_sums.
template <int HELD, int TOKENS> constexpr int lane_before(int i) {
  const int row = i / TOKENS, token = i % TOKENS;
  return token % HELD * (LANES / HELD) + row * (TOKENS / HELD) + token / HELD;
}
template <int HELD, int TOKENS, class Vector, int... I>
inline Vector in_order(Vector sums, std::integer_sequence<int, I...>) {
  return SHUFFLE(sums, sums, (lane_before<HELD, TOKENS>(I)));
}

// Lane r * TOKENS + u is row r's sum for token u, from sums of each row's vectors of HELD tokens.
template <int HELD, int TOKENS, class Vector>
inline Vector join_sums(Vector (&sums)[LANES / HELD]) {
  return in_order<HELD, TOKENS>(lane_sums(sums), std::make_integer_sequence<int, LANES>{});
}

// Scores of SCORED tokens, TOKENS in each vector: lane r * TOKENS + u is row r's for token u.
// scale_of(group, token): what its codes, and those of tokens behind it, are multiplied by; where one
// scale is for all channels, that is left to the caller.
template <class A, class Scale>
inline void code_sums(const uint16_t* codes, const FloatQuery<A>& query, const Scale& scale_of,
                      Floats (&scores)[1]) {
  using K = typename A::K;
  using Keys = typename K::Code;
  using Codes = typename Keys::Codes;
  constexpr int ROWS = A::ROWS, VECTORS = Panel<A>::TOKENS / Keys::TOKENS;
  constexpr bool SCALED = K::BY_TOKEN && Keys::GROUPS > 1;
  Floats sums[ROWS * VECTORS];
  each<0, ROWS * VECTORS>([&](auto i) {
    if constexpr (K::BY_TOKEN) sums[i] = Floats{};
    else sums[i] = query.offset[i / VECTORS];
  });
  each_vector<Keys::WIDTH>([&](auto at, auto width) {
    each<0, Codes::CHAINS>([&](auto chain) {
      // More words would not fit into registers beside the sums.
      constexpr int HELD = std::min(VECTORS, LANES / 2);
      each<0, VECTORS / HELD>([&](auto part) {
        Codes words[HELD];
        each<0, HELD>([&](auto u) {
          const uint16_t* key = codes + (part * HELD + u) * Keys::TOKENS * Keys::WORDS;
          constexpr int SIZE = Keys::TOKENS > 1 ? LANES : (int)width;
          words[u].template start<chain, 0, at, SIZE>(key, Keys::WIDTH);
          if constexpr (chain == 0 && at == 0)
            Keys::prefetch(key + Panel<A>::BLOCK * Keys::WORDS);
        });
        Keys::template each_run<at, chain>([&](auto first, auto end) {
          using Span = typename Keys::template Span<Codes::plane(chain, first), at>;
          Floats scale[HELD];
          if constexpr (SCALED)
            each<0, HELD>([&](auto u) {
              constexpr int TOKEN = (part * HELD + u) * Keys::TOKENS;
              scale[u] = spread<Span>(
                  [&](int group) { return stretch<Keys::TOKENS>(scale_of(group, TOKEN)); });
            });
          each<first, end>([&](auto step) {
            constexpr int PLANE = Codes::plane(chain, step), PLACE = Keys::place(at, chain, step);
            Floats q[ROWS];
            each<0, ROWS>([&](auto r) {
              q[r] = load<Floats, LANES>(query.vectors[r] + PLACE * LANES);
            });
            each<0, HELD>([&](auto u) {
              Floats code = shifted_code<PLANE>(words[u]);
              if constexpr (SCALED) code *= scale[u];
              words[u].next();
              each<0, ROWS>([&](auto r) { sums[r * VECTORS + part * HELD + u] += code * q[r]; });
            });
          });
        });
      });
    });
  });
  scores[0] = join_sums<Keys::TOKENS, Panel<A>::TOKENS>(sums);
}

}  // namespace
