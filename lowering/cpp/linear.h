// Linear layers of few tokens, all of the same: see kvpass/ops/linear.py. Memory is what they wait for:
// a weight is read once, for all tokens, row by row; a row has the numbers of an output, or of an input.
#pragma once
#include "lanes.h"
#include "linear_tiles.h"
#include "numbers.h"

namespace {

// Bytes behind which the processor's own fetching begins anew.
constexpr int64_t PAGE = 4096;

// Whether a core reads memory faster in several streams, each of them asked for, than in one. Two cores
// with AVX-512, measured: Ice Lake reads 17 GB/s in one and 27 in eight, Zen 5 is fastest in one.
inline bool reads_in_streams() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Sums of products, a vector of COUNT numbers at a time.
struct FloatProducts {
  using Number = float;
  using Vector = Floats;
  static constexpr int COUNT = LANES;

  template <class Any> static Vector load(const Any* p) { return load_numbers<LANES>(p); }
  static void store(float* to, Vector numbers) { ::store<LANES>(to, numbers); }
  static Floats add(Floats sums, Vector a, Vector b) { return sums + a * b; }
};

// bfloat16, widened a lane of two numbers at a time: in fewer instructions than one after the other.
struct LaneProducts {
  using Number = float;
  struct Vector {
    Floats even, odd;
  };
  static constexpr int COUNT = 2 * LANES;

  static Vector load(const BFloat16* p) {
    const Ints lanes = ::load<Ints, COUNT>(p);
    return {(Floats)(lanes << 16), (Floats)(lanes & (int32_t)0xffff0000)};
  }
  // As `store` has put them.
  static Vector load(const float* p) { return {load_numbers<LANES>(p), load_numbers<LANES>(p + LANES)}; }
  static void store(float* to, Vector numbers) {
    ::store<LANES>(to, numbers.even);
    ::store<LANES>(to + LANES, numbers.odd);
  }
  static Floats add(Floats sums, Vector a, Vector b) {
    return sums + a.even * b.even + a.odd * b.odd;
  }
};

#if KVPASS_LANES == 16 && defined(__AVX512BF16__)
// Two to each sum; subnormal numbers count as zero.
struct PairProducts {
  using Number = BFloat16;
  using Vector = Ints;
  static constexpr int COUNT = 2 * LANES;

  static Vector load(const BFloat16* p) { return ::load<Ints, COUNT>(p); }
  static Vector load(const int8_t* p) {
    return (Ints)round_both(load_numbers<LANES>(p), load_numbers<LANES>(p + LANES));
  }
  static Floats add(Floats sums, Vector a, Vector b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
  }
};
template <class> using BFloat16Products = PairProducts;
#else
template <class Weight>
using BFloat16Products =
    std::conditional_t<std::is_same_v<Weight, BFloat16>, LaneProducts, FloatProducts>;
#endif
template <class A>
using Products = std::conditional_t<
    std::is_same_v<typename A::Element, BFloat16> && !A::TRANSPOSED,
    BFloat16Products<typename A::Weight>, FloatProducts>;

// Outputs first ... first + ROWS of a layer, of TOKENS tokens from token `from` on; those from
// layer.outputs on are not there. Few have several sums each, which hide how long an addition takes.
template <int ROWS, int TOKENS, class A, class Layer, class X>
void linear_rows(const A& a, const Layer& layer, const X* tokens, int64_t first, int from) {
  using P = Products<A>;
  constexpr int SUMS = ROWS > 1 ? 1 : TOKENS > 1 ? 2 : 4, STEP = SUMS * P::COUNT;
  const X* x = tokens + from * a.inputs;
  const typename A::Weight* rows[ROWS];
  for (int r = 0; r < ROWS; r++)
    rows[r] = layer.weight + std::min<int64_t>(first + r, layer.outputs - 1) * a.inputs;
  // The next rows are asked for meanwhile.
  const int64_t ahead = std::max<int64_t>(ROWS * a.inputs, PAGE / sizeof(typename A::Weight));
  Floats sums[ROWS][TOKENS][SUMS]{};
  const auto add = [&](int64_t at, auto s) __attribute__((always_inline)) {
    typename P::Vector numbers[TOKENS];
    each<0, TOKENS>([&](auto t) { numbers[t] = P::load(x + t * a.inputs + at); });
    each<0, ROWS>([&](auto r) {
      __builtin_prefetch(rows[r] + at + ahead);
      const auto w = P::load(rows[r] + at);
      each<0, TOKENS>([&](auto t) { sums[r][t][s] = P::add(sums[r][t][s], w, numbers[t]); });
    });
  };
  int64_t i = 0;
  for (; i + STEP <= a.inputs; i += STEP)
    each<0, SUMS>([&](auto s) { add(i + s * P::COUNT, s); });
  for (; i + P::COUNT <= a.inputs; i += P::COUNT) add(i, Constant<0>{});
  Floats vectors[LANES]{};
  each<0, ROWS>([&](auto r) {
    each<0, TOKENS>([&](auto t) {
      each<0, SUMS>([&](auto s) { vectors[r * TOKENS + t] += sums[r][t][s]; });
    });
  });
  const Floats totals = lane_sums(vectors);
  for (int r = 0; r < std::min<int64_t>(ROWS, layer.outputs - first); r++) {
    for (int t = 0; t < TOKENS; t++) {
      float total = totals[r * TOKENS + t];
      for (int64_t j = i; j < a.inputs; j++)
        total += to_float(rows[r][j]) * to_float(x[t * a.inputs + j]);
      if (layer.scale != nullptr) total *= layer.scale[first + r];
      if (layer.bias != nullptr) total += to_float(layer.bias[first + r]);
      store_numbers<1>(layer.out + (from + t) * layer.outputs + first + r, all(total));
    }
  }
}

// Tokens of which the sums of four rows fit into the registers: the first cache holds these rows for
// the next ones.
constexpr int TILE = 4;

struct NoSetup {};

template <int ROWS, class A, class X> void linear_blocks(const A& a, const X* x) {
  constexpr int TILES = (A::TOKENS + TILE - 1) / TILE;
  each_block<ROWS, NoSetup>(a, [&](const auto& layer, int64_t block) {
    each<0, TILES>([&](auto tile) {
      constexpr int FROM = A::TOKENS * tile / TILES, TO = A::TOKENS * (tile + 1) / TILES;
      linear_rows<ROWS, TO - FROM>(a, layer, x, block * ROWS, FROM);
    });
  });
}

// Whether a weight is multiplied in tiles, of more tokens than its rows are multiplied with at once.
template <class A>
constexpr bool LINEAR_TILES = TILES && !A::TRANSPOSED && (A::TOKENS > TILE) &&
    std::is_same_v<typename A::Weight, BFloat16> && std::is_same_v<typename A::Element, BFloat16>;

// Adds rows first ... first + ROWS of a weight [inputs, outputs], columns from ... to, to sums.
template <int ROWS, class A, class Layer>
void add_rows(
    const A& a, const Layer& layer, const float* x, float* sums, int64_t first, int64_t from, int64_t to
) {
  const typename A::Weight* rows = layer.weight + first * layer.outputs;
  const int64_t width = to - from;
  // Of larger numbers Zen 5 fetches as many streams better by itself.
  const bool asks = sizeof *rows < 4 || reads_in_streams();
  int64_t n = from;
  for (; n + LANES <= to; n += LANES) {
    Floats w[ROWS];
    each<0, ROWS>([&](auto r) {
      if (asks) __builtin_prefetch(rows + (r + ROWS) * layer.outputs + n);
      w[r] = load_numbers<LANES>(rows + r * layer.outputs + n);
    });
    each<0, A::TOKENS>([&](auto t) {
      float* sum = sums + t * width + n - from;
      // A sum of its own: the fewer additions behind one another, the smaller their errors.
      Floats part{};
      each<0, ROWS>([&](auto r) { part += w[r] * all(x[t * a.inputs + first + r]); });
      store<LANES>(sum, load<Floats, LANES>(sum) + part);
    });
  }
  for (; n < to; n++)
    for (int t = 0; t < A::TOKENS; t++)
      for (int r = 0; r < ROWS; r++)
        sums[t * width + n - from] += to_float(rows[r * layer.outputs + n]) * x[t * a.inputs + first + r];
}

// Rows that are read at a time: as many streams as memory keeps going.
constexpr int STREAMS = 8;

// The weight of a layer is [inputs, outputs]. Each thread has columns of its own, and sums of them.
template <class A, class Layer>
void linear_transposed(const A& a, const Layer& layer, const float* x) {
  const int64_t share = ((layer.outputs + a.threads - 1) / a.threads + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t from = 0; from < layer.outputs; from += share) {
    const int64_t to = std::min(from + share, layer.outputs), width = to - from;
    std::vector<float> sums(A::TOKENS * width);
    int64_t i = 0;
    for (; i + STREAMS <= a.inputs; i += STREAMS)
      add_rows<STREAMS>(a, layer, x, sums.data(), i, from, to);
    for (; i < a.inputs; i++) add_rows<1>(a, layer, x, sums.data(), i, from, to);
    for (int t = 0; t < A::TOKENS; t++)
      for (int64_t n = from; n < to; n++) {
        const float bias = layer.bias != nullptr ? to_float(layer.bias[n]) : 0.0f;
        store_numbers<1>(layer.out + t * layer.outputs + n, all(sums[t * width + n - from] + bias));
      }
  }
}

// Bytes of tokens that the first cache holds beside a row.
constexpr int64_t NEAREST = 32768;

template <class A, class X> void linear_by_rows(const A& a, const X* x) {
  if constexpr (A::TOKENS <= TILE) {
    if (reads_in_streams()) return linear_blocks<std::min(STREAMS, LANES / A::TOKENS)>(a, x);
    const bool held = A::TOKENS * a.inputs * (int64_t)sizeof(X) <= NEAREST;
    if (A::TOKENS == 1 || held) return linear_blocks<1>(a, x);
  }
  // Tokens that the cache does not hold are read for several rows at a time.
  linear_blocks<LANES / TILE>(a, x);
}

template <class A, class X> void linear(const A& a, const X* x) {
  if constexpr (A::TRANSPOSED)
    for (int64_t i = 0; i < a.count; i++) linear_transposed(a, a.layers[i], x);
  else linear_by_rows(a, x);
}

template <class A> void linear(const A& a) {
  using P = Products<A>;
  if constexpr (LINEAR_TILES<A>)
    if (fill_tiles(a)) return linear_tiles(a);
  if constexpr (std::is_same_v<typename A::Element, typename P::Number>) {
    linear(a, a.x);
  } else {
    std::vector<float> wide(A::TOKENS * a.inputs);
    for (int64_t from = 0; from < A::TOKENS * a.inputs; from += a.inputs) {
      int64_t i = 0;
      for (; i + P::COUNT <= a.inputs; i += P::COUNT)
        P::store(&wide[from + i], P::load(a.x + from + i));
      for (; i < a.inputs; i++) wide[from + i] = to_float(a.x[from + i]);
    }
    linear(a, (const float*)wide.data());
  }
}

}  // namespace
