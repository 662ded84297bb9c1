// Where the channels of a token lie in its words, and the groups of channels with one scale.
#pragma once
#include "words.h"

namespace {

// Channel j * WIDTH + i is the i-th of plane j. Arrays in plane order pad every plane to whole
// vectors: it stands at j * PADDED + i.
// A group of channels is RUN of every PERIOD channels.
template <class Codes_, int DIM_, int RUN, int PERIOD = DIM_> struct Planes {
  using Codes = Codes_;
  static constexpr int DIM = DIM_, GROUPS = PERIOD / RUN, COUNT = Codes::COUNT;
  static constexpr int WIDTH = Codes::width(DIM), WORDS = Codes::PARTS * WIDTH;
  static constexpr int PADDED = round_up(WIDTH, LANES), SIZE = COUNT * PADDED;
  // Tokens that one vector of words holds, if several: their words lie one behind the other.
  static constexpr bool SEVERAL = Codes::PARTS == 1 && WIDTH >= 4 && LANES % WIDTH == 0;
  static constexpr int TOKENS = SEVERAL ? LANES / WIDTH : 1;
  // No vector of words is partly filled.
  static constexpr bool WHOLE = WIDTH % LANES == 0 || TOKENS > 1;

  // Each run of `size` words has channels of one group in every plane, and a plane's runs fill vectors
  // of words, or planes of several tokens do.
  static constexpr bool in_runs(int size) {
    const int runs = WIDTH / size, held = 2 * LANES / size;
    for (int d = 0; d < DIM; d += size)
      if (group(d) != group(std::min(d + size, DIM) - 1)) return false;
    return WIDTH % size == 0 && (runs % held == 0 || held % runs == 0);
  }

  // Channels in the vector of a plane from `at` on: the last plane may not be full.
  static constexpr int channels(int plane, int at) {
    return std::clamp(DIM - plane * WIDTH - at, 0, std::min(LANES, WIDTH - at));
  }

  // Asks for a line of a cache for every 64 bytes of a token, or of one of equal shares of it.
  template <int SHARES = 1> static void prefetch(const uint16_t* token) {
    for (int i = 0; i * SHARES < WORDS; i += 64 / sizeof *token) __builtin_prefetch(token + i);
  }

  static constexpr int group(int channel) { return std::min(channel % PERIOD / RUN, GROUPS - 1); }

  // The groups of such a vector's first and last channel; before(g): its channels before group g.
  template <int PLANE, int AT> struct Span {
    static constexpr int CHANNEL = (PLANE * WIDTH + AT) % PERIOD;
    static constexpr int COUNT = std::max(1, channels(PLANE, AT));
    static constexpr int FIRST = group(CHANNEL), LAST = group(CHANNEL + COUNT - 1);
    static_assert(FIRST <= LAST);
    static Ints before(int group) { return lane_numbers() % (LANES / TOKENS) < group * RUN - CHANNEL; }
  };

  // Where such a vector stands in the order in which chains are read.
  static constexpr int place(int at, int chain, int step) {
    return at / LANES * COUNT + chain * Codes::DEPTH + step;
  }
  // Calls body(plane, at, place) for all of them in that order.
  template <class Body> static inline void each_place(const Body& body) {
    each_vector<WIDTH>([&](auto at, auto) {
      each<0, COUNT>([&](auto i) {
        constexpr int CHAIN = i / Codes::DEPTH, STEP = i % Codes::DEPTH;
        body(Constant<Codes::plane(CHAIN, STEP)>{}, at, Constant<place(at, CHAIN, STEP)>{});
      });
    });
  }

  // Calls body(first, end) for the longest runs of a chain's steps whose channels share a group, or
  // a step whose channels have two.
  template <int AT, int CHAIN, int FIRST = 0, class Body>
  static inline void each_run(const Body& body) {
    if constexpr (FIRST < Codes::DEPTH) {
      constexpr int END = run_end<AT, CHAIN, FIRST, FIRST + 1>();
      body(Constant<FIRST>{}, Constant<END>{});
      each_run<AT, CHAIN, END>(body);
    }
  }
  template <int AT, int CHAIN, int FIRST, int END> static constexpr int run_end() {
    if constexpr (END < Codes::DEPTH) {
      using One = Span<Codes::plane(CHAIN, FIRST), AT>;
      using Next = Span<Codes::plane(CHAIN, END), AT>;
      if constexpr (One::FIRST == Next::LAST && One::LAST == Next::FIRST)
        return run_end<AT, CHAIN, FIRST, END + 1>();
    }
    return END;
  }
};

// The words of TOKENS tokens: those at `codes`, or, where there are fewer, a copy, filled up with zeros:
// what is beyond may be nobody's memory.
template <class Code, int TOKENS> struct Tile {
  alignas(64) uint16_t filled[TOKENS * Code::WORDS];

  const uint16_t* read(const uint16_t* codes, int count) {
    if (count >= TOKENS) return codes;
    std::memset(filled, 0, sizeof filled);
    std::memcpy(filled, codes, count * Code::WORDS * sizeof *codes);
    return filled;
  }
};

// Vectors of one number per group, for the channels of a vector.
template <class Span, class Number> inline auto spread(const Number& of_group) {
  auto x = of_group(Span::FIRST);
  each<Span::FIRST + 1, Span::LAST + 1>([&](auto group) {
    x = select(Span::before(group), x, of_group(group));
  });
  return x;
}

// Writes a token's words; codes(channel, count) are those of a vector of channels.
template <class Code, class Codes> inline void put_words(const Codes& codes, uint16_t* words) {
  using Format = typename Code::Codes;
  each_vector<Code::WIDTH>([&](auto at, auto width) {
    Ints parts[Format::PARTS]{};
    each<0, Code::COUNT>([&](auto plane) {
      constexpr int CHANNEL = plane * Code::WIDTH + at, COUNT = Code::channels(plane, at);
      if constexpr (COUNT > 0)
        Format::template put<plane>(parts, codes(Constant<CHANNEL>{}, Constant<COUNT>{}));
    });
    each<0, Format::PARTS>([&](auto part) {
      store<width>(words + part * Code::WIDTH + at, __builtin_convertvector(parts[part], Shorts));
    });
  });
}

}  // namespace
