// The same sums of integers.
#pragma once
#include "integer_query.h"

namespace {

// Query rows are the integers that come nearest.
template <class A> inline void put_query(
    const float (&rows)[A::ROWS][A::K::DIM], const Steps<A::ROWS>& steps, int, IntegerQuery<A>& result) {
  each<0, A::ROWS>([&](auto r) {
    steps.store(r, result.integers[r], rows[r], round_up(A::K::DIM, LANES));
  });
  // Compilers would keep some in registers, and make more instructions of those than of reading them.
  asm volatile("" : : "r"(&result) : "memory");
}

template <class A> inline void arrange_query(const Panel<A>& panel, IntegerQuery<A>& result) {
  if constexpr (A::K::BY_TOKEN) arrange_integers<1>(panel, result);
}

// Chunks FIRST ... of TOKENS tokens' words, one chunk of all tokens in each vector.
template <class A, int FIRST, int COUNT>
inline void load_chunks(const uint16_t* codes, Ints (&words)[COUNT]) {
  using Keys = typename A::K::Code;
  constexpr int CHUNKS = Keys::WIDTH / CHUNK, HELD = IntegerQuery<A>::TOKENS;
  // Vectors of several tokens, or of each token one.
  constexpr int STRIDE = CHUNKS < HELD ? 2 * LANES : Keys::WORDS;
  each<0, COUNT>([&](auto i) {
    const uint16_t* place = codes + i * STRIDE + FIRST * CHUNK;
    std::memcpy(&words[i], place, sizeof words[i]);
    if constexpr ((i * STRIDE + FIRST * CHUNK) % 32 == 0)
      __builtin_prefetch(place + Panel<A>::BLOCK * Keys::WORDS);
  });
  // Where a chunk of a token stands is a number of bits: those of the chunk go to the front.
  if constexpr (COUNT > 1) unzip(words);
  if constexpr (COUNT > 2) unzip(words);
  static_assert(COUNT <= 4);
}

template <class A, class Scale>
inline void code_sums(const uint16_t* codes, const IntegerQuery<A>& query, const Scale& scale_of,
                      Floats (&scores)[IntegerQuery<A>::SETS]) {
  using K = typename A::K;
  using Keys = typename K::Code;
  constexpr int ROWS = A::ROWS, HELD = IntegerQuery<A>::TOKENS, VECTORS = Panel<A>::TOKENS / HELD;
  constexpr int CHUNKS = Keys::WIDTH / CHUNK, COUNT = std::min(CHUNKS, HELD);
  constexpr bool SCALED = K::BY_TOKEN && Keys::GROUPS > 1;
  // Vectors of tokens that share what is read of the query, and eight sums for them and the rows: one
  // addition would wait for another.
  constexpr int SHARED = 2, SUMS = 8 / (SHARED * ROWS);
  std::conditional_t<SCALED, Floats, Ints> sums[IntegerQuery<A>::SETS][ROWS * VECTORS]{};
  each<0, IntegerQuery<A>::SETS * VECTORS / SHARED>([&](auto some) {
    each<0, CHUNKS / COUNT>([&](auto part) {
      Ints words[SHARED][COUNT];
      each<0, SHARED>([&](auto u) {
        load_chunks<A, part * COUNT>(codes + (some * SHARED + u) * HELD * Keys::WORDS, words[u]);
      });
      each<0, SCALED ? Keys::GROUPS : 1>([&](auto group) {
        Ints products[SHARED][ROWS][SUMS]{};
        each<0, Keys::COUNT>([&](auto plane) {
          each<0, COUNT>([&](auto i) {
            constexpr int CHANNEL = plane * Keys::WIDTH + (part * COUNT + i) * CHUNK;
            if constexpr (SCALED && Keys::group(CHANNEL) != group) return;
            Ints code[SHARED];
            each<0, SHARED>([&](auto u) { code[u] = Keys::Codes::template pairs<plane>(words[u][i]); });
            each<0, ROWS>([&](auto r) {
              const Ints q = repeat_chunk(query.integers[r] + CHANNEL);
              each<0, SHARED>([&](auto u) {
                Ints& sum = products[u][r][(plane * COUNT + i) % SUMS];
                sum = add_products(sum, code[u], q);
              });
            });
          });
        });
        each<0, SHARED>([&](auto u) {
          constexpr int VECTOR = some * SHARED + u;
          each<0, ROWS>([&](auto r) {
            Ints product = products[u][r][0];
            each<1, SUMS>([&](auto i) { product += products[u][r][i]; });
            auto& sum = sums[VECTOR / VECTORS][r * VECTORS + VECTOR % VECTORS];
            if constexpr (SCALED)
              sum += __builtin_convertvector(product, Floats) *
                     stretch<HELD>(scale_of(group, VECTOR * HELD));
            else sum += product;
          });
        });
      });
    });
  });
  each<0, IntegerQuery<A>::SETS>([&](auto set) {
    const auto joined = join_sums<HELD, Panel<A>::TOKENS>(sums[set]);
    scores[set] = __builtin_convertvector(joined, Floats) * query.steps + query.offsets;
  });
}

}  // namespace
