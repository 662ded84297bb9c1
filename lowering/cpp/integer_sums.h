// The same sums of integers.
#pragma once
#include "code_sums.h"

namespace {

// Query rows are the integers that come nearest, with a step each.
template <class A> inline void put_query(
    const float (&rows)[A::ROWS][A::K::DIM], const Floats (&tops)[A::ROWS], IntegerQuery<A>& result) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int SPAN = IntegerQuery<A>::SPAN, COPIES = IntegerQuery<A>::TOKENS;
  const Steps steps(tops, limit_of(K::DIM, K::MAX_CODE));
  each<0, A::ROWS>([&](auto r) {
    alignas(64) int16_t one[size_if(COPIES > 1, K::DIM)];
    int16_t* to = COPIES > 1 ? one : result.integers[r];
    for (int d = 0; d < K::DIM; d += LANES) steps.store(r, to + d, load<Floats, LANES>(rows[r] + d));
    if constexpr (COPIES > 1)
      for (int i = 0; i < Keys::COUNT * COPIES; i++)
        std::memcpy(result.integers[r] + i * Keys::WIDTH, one + i / COPIES * Keys::WIDTH,
                    Keys::WIDTH * sizeof *one);
  });
  result.steps = steps.steps;
}

template <class A> inline void arrange_query(const Panel<A>& panel, IntegerQuery<A>& result) {
  using K = typename A::K;
  if constexpr (K::BY_TOKEN) {
    alignas(64) float rows[A::ROWS][K::DIM];
    Floats tops[A::ROWS]{};
    each<0, A::ROWS>([&](auto r) {
      std::memcpy(rows[r], panel.rows[r].query, sizeof rows[r]);
      for (int d = 0; d < K::DIM; d += LANES)
        tops[r] = maximum(tops[r], magnitude(load<Floats, LANES>(rows[r] + d)));
    });
    put_query<A>(rows, tops, result);
    result.offsets = Floats{};
  }
}

template <class A>
inline void scale_query(
    const typename A::K::Pair* qparams, const Panel<A>& panel, IntegerQuery<A>& result) {
  using K = typename A::K;
  alignas(64) float rows[A::ROWS][K::DIM];
  Floats tops[A::ROWS]{}, sums[A::ROWS]{};
  each_vector<K::DIM>([&](auto at, auto width) {
    const auto [scale, minimum] = load_affine<typename K::Number, width>(qparams + at);
    if constexpr (at * sizeof(*qparams) % 64 == 0) __builtin_prefetch(qparams + at + K::DIM);
    const Floats factor = scale, start = minimum;
    each<0, A::ROWS>([&](auto r) {
      const Floats q = load<Floats, LANES>(panel.rows[r].query + at), x = q * factor;
      sums[r] += q * start;
      tops[r] = maximum(tops[r], magnitude(x));
      store<LANES>(rows[r] + at, x);
    });
  });
  put_query<A>(rows, tops, result);
  result.offsets = join_rows(sums, add<Floats>);
}

template <class A, class Scale>
inline Floats code_sums(const uint16_t* codes, const IntegerQuery<A>& query, const Scale& scale_of) {
  using K = typename A::K;
  using Keys = typename K::Code;
  using Query = IntegerQuery<A>;
  constexpr int ROWS = A::ROWS, VECTORS = Panel<A>::TOKENS / Query::TOKENS;
  constexpr bool SCALED = K::BY_TOKEN && Keys::GROUPS > 1;
  std::conditional_t<SCALED, Floats, Ints> sums[ROWS * VECTORS]{};
  each<0, Query::SPAN / (2 * LANES)>([&](auto part) {
    constexpr int AT = part * 2 * LANES;
    const auto query_of = [&](int plane, int row) {
      return load<Ints, LANES>((const int32_t*)(query.integers[row] + plane * Query::SPAN + AT));
    };
    // More words would not fit into registers beside the sums.
    constexpr int HELD = SCALED ? 1 : std::min(VECTORS, LANES / 2);
    each<0, VECTORS / HELD>([&](auto some) {
      Ints words[HELD];
      each<0, HELD>([&](auto u) {
        const uint16_t* key = codes + (some * HELD + u) * Query::TOKENS * Keys::WORDS;
        std::memcpy(&words[u], key + AT, sizeof words[u]);
        if constexpr (part == 0) __builtin_prefetch(key + Panel<A>::BLOCK * Keys::WORDS);
      });
      each<0, SCALED ? Keys::GROUPS : 1>([&](auto group) {
        Ints products[ROWS]{};
        each<0, Keys::COUNT>([&](auto plane) {
          if constexpr (SCALED && Keys::group(plane * Keys::WIDTH + AT) != group) return;
          Ints q[ROWS];
          each<0, ROWS>([&](auto r) { q[r] = query_of(plane, r); });
          each<0, HELD>([&](auto u) {
            const Ints code = Keys::Codes::template pairs<plane>(words[u]);
            each<0, ROWS>([&](auto r) {
              if constexpr (SCALED) products[r] = add_products(products[r], code, q[r]);
              else {
                auto& sum = sums[r * VECTORS + some * HELD + u];
                sum = add_products(sum, code, q[r]);
              }
            });
          });
        });
        if constexpr (SCALED) {
          const Floats scale = stretch<Query::TOKENS>(scale_of(group, some * Query::TOKENS));
          each<0, ROWS>([&](auto r) {
            sums[r * VECTORS + some] += __builtin_convertvector(products[r], Floats) * scale;
          });
        }
      });
    });
  });
  const auto joined = join_sums<Query::TOKENS, Panel<A>::TOKENS>(sums);
  return __builtin_convertvector(joined, Floats) * query.steps + query.offsets;
}

}  // namespace
