// Scores of a block of tokens, for a few query rows.
#pragma once
#include "panel.h"

namespace {

template <class A> inline void put_scores(Floats scores, int token, Block<A>& block) {
  constexpr int TOKENS = Panel<A>::TOKENS;
  for (int r = 0; r < A::ROWS; r++)
    std::memcpy(&block.scores[r][token], (const float*)&scores + r * TOKENS, 4 * TOKENS);
}

// Scores of exact keys, STRIDE numbers apart, for tokens first ... of the block.
template <int STRIDE, class A, class Number>
void exact_scores(const Number* keys, int first, int count, const Panel<A>& panel, Block<A>& block) {
  constexpr int ROWS = A::ROWS, TOKENS = Panel<A>::TOKENS;
  for (int t = 0; t < count; t += TOKENS) {
    Floats sums[LANES]{};
    each_vector<A::K::DIM>([&](auto at, auto width) {
      Floats q[ROWS];
      each<0, ROWS>([&](auto r) { q[r] = load<Floats, LANES>(panel.rows[r].query + at); });
      each<0, TOKENS>([&](auto u) {
        const int64_t token = std::min<int>(t + u, count - 1);
        const Floats x = load_numbers<width>(keys + token * STRIDE + at);
        each<0, ROWS>([&](auto r) { sums[r * TOKENS + u] += x * q[r]; });
      });
    });
    put_scores(lane_sums(sums), first + t, block);
  }
}

template <class A> void arrange_query(Panel<A>& panel) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int TOKENS = Panel<A>::TOKENS;
  each<0, A::ROWS>([&](auto r) {
    const float* query = panel.rows[r].query;
    Keys::each_place([&](auto plane, auto at, auto place) {
      constexpr int CHANNEL = plane * Keys::WIDTH + at;
      const Floats q = repeat<LANES / Keys::TOKENS>(
          load<Floats, Keys::channels(plane, at)>(query + CHANNEL));
      store<LANES>(panel.query.vectors[r] + place * LANES, q * unit<typename Keys::Codes>(plane));
    });
    if constexpr (K::BY_TOKEN) {
      float sums[Keys::GROUPS]{};
      for (int d = 0; d < K::DIM; d++) sums[Keys::group(d)] += query[d];
      for (int g = 0; g < Keys::GROUPS; g++)
        for (int u = 0; u < TOKENS; u++) panel.sums[g][r * TOKENS + u] = sums[g];
    }
  });
}

// The words of TOKENS tokens: those at `codes`, or, where there are fewer, a copy, filled up.
template <class A> struct Tile {
  static constexpr int TOKENS = Panel<A>::TOKENS, WORDS = A::K::Code::WORDS;
  alignas(64) uint16_t filled[TOKENS * WORDS];

  const uint16_t* read(const uint16_t* codes, int count) {
    if (count >= TOKENS) return codes;
    std::memset(filled, 0, sizeof filled);
    std::memcpy(filled, codes, count * WORDS * sizeof *codes);
    return filled;
  }
};

// The lane in which lane_sums leaves lane i of the below.
template <int HELD, int TOKENS> constexpr int lane_before(int i) {
  const int row = i / TOKENS, token = i % TOKENS;
  return token % HELD * (LANES / HELD) + row * (TOKENS / HELD) + token / HELD;
}
template <int HELD, int TOKENS, int... I>
inline Floats in_order(Floats sums, std::integer_sequence<int, I...>) {
  return SHUFFLE(sums, sums, (lane_before<HELD, TOKENS>(I)));
}

// Lane r * TOKENS + u is row r's sum for token u, from sums of each row's vectors of HELD tokens.
template <int HELD, int TOKENS> inline Floats join_sums(Floats (&sums)[LANES / HELD]) {
  return in_order<HELD, TOKENS>(lane_sums(sums), std::make_integer_sequence<int, LANES>{});
}

// Scores of TOKENS tokens: lane r * TOKENS + u is row r's for token u. scale(group, token): vectors
// of what codes are multiplied by; where one scale is for all channels, that is left to the caller.
template <class A, class Scale>
inline Floats code_sums(const uint16_t* codes, const Query<A>& query, const Scale& scale_of) {
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
              scale[u] = spread<Span>([&](int group) { return scale_of(group, TOKEN); });
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
  return join_sums<Keys::TOKENS, Panel<A>::TOKENS>(sums);
}

// Scores of packed keys in `count` slots from `slot` on, for tokens first ... of the block: groups
// are channels of one token.
// Flattened: compilers would make calls of parts of it, which take 3 to 8% of its time.
template <class A>
__attribute__((flatten)) void token_scores(
    const Pair<A>& pair, int64_t slot, int first, int count, const Panel<A>& panel,
    Block<A>& block) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int TOKENS = Panel<A>::TOKENS, BLOCK = Panel<A>::BLOCK;
  const K& k = pair.a.k;
  alignas(64) float scales[Keys::GROUPS][BLOCK], minima[Keys::GROUPS][BLOCK];
  for (int g = 0; g < Keys::GROUPS; g++)
    for (int t = 0; t < count; t += LANES) {
      const auto* place = k.qparams_of(pair.pair) + g * k.capacity + slot + t;
      const Affine affine = load_affine<typename K::Number>(place, std::min(count - t, LANES));
      __builtin_prefetch(place + BLOCK);
      store<LANES>(scales[g] + t, affine.scale);
      store<LANES>(minima[g] + t, affine.minimum);
    }
  Tile<A> tile;
  const auto repeated = [](const float* of_tokens) {
    return repeat<TOKENS>(load<Floats, TOKENS>(of_tokens));
  };
  for (int t = 0; t < count; t += TOKENS) {
    const uint16_t* codes = k.codes_of(pair.pair) + (slot + t) * Keys::WORDS;
    const auto scale_of = [&](int group, int u) {
      return stretch<Keys::TOKENS>(scales[group] + t + u);
    };
    Floats sums = code_sums(tile.read(codes, count - t), panel.query, scale_of);
    if constexpr (Keys::GROUPS == 1) sums *= repeated(scales[0] + t);
    for (int g = 0; g < Keys::GROUPS; g++) sums += panel.sums[g] * repeated(minima[g] + t);
    put_scores(sums, first + t, block);
  }
}

// Query rows whose codes have the scales and minima of a group of tokens.
template <class A>
inline Query<A> scaled_query(const typename A::K::Pair* qparams, const Query<A>& query) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int ROWS = A::ROWS;
  Query<A> result;
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
      const Floats q = load<Floats, LANES>(query.vectors[r] + place * LANES);
      offset[r] += q * start;
      store<LANES>(result.vectors[r] + place * LANES, q * step);
    });
  });
  each<0, ROWS>([&](auto r) { result.offset[r] = offset[r]; });
  return result;
}

// The same as token_scores, but groups are tokens of one channel.
template <class A>
__attribute__((flatten)) void channel_scores(
    const Pair<A>& pair, int64_t slot, int first, int count, const Panel<A>& panel,
    Block<A>& block) {
  using K = typename A::K;
  using Keys = typename K::Code;
  const K& k = pair.a.k;
  Tile<A> tile;
  for (int t = 0; t < count;) {
    const int64_t group = (slot + t) / K::GROUP;
    const int end = std::min<int64_t>(count, (group + 1) * K::GROUP - slot);
    const Query query = scaled_query<A>(k.qparams_of(pair.pair) + group * K::DIM, panel.query);
    for (; t < end; t += Panel<A>::TOKENS) {
      const uint16_t* codes = k.codes_of(pair.pair) + (slot + t) * Keys::WORDS;
      put_scores(code_sums(tile.read(codes, end - t), query, nullptr), first + t, block);
    }
    t = end;
  }
}

}  // namespace
