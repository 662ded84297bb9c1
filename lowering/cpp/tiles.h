// Products of matrices of bytes: what AMX multiplies in tiles of 16 rows of 64 bytes.
#pragma once
#include "integers.h"

namespace {

// KVPASS_TILES: 1: the CPU has such instructions and this process may use them; 2: loops stand in for
// them.
#if KVPASS_TILES == 1 && KVPASS_LANES == 16 && defined(__AMX_INT8__)
#define KVPASS_AMX
#endif
#if defined(KVPASS_AMX) || (KVPASS_TILES == 2 && KVPASS_LANES == 16)
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif
// Rows of a tile, and bytes of a row: those of 16 sums of four products.
constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
// Tokens of a tile's rows, four in each.
constexpr int TILE_TOKENS = 4 * TILE_ROWS;
typedef int8_t Bytes __attribute__((vector_size(4 * LANES)));

// While it lives, this thread's tiles have the shapes of products with ROWS rows: sums, two factors, and
// two tiles of one row for keep_tiles_awake.
template <int ROWS> struct TileShapes {
#ifdef KVPASS_AMX
  TileShapes() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14]{};
      uint16_t row_bytes[16]{TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
      uint8_t rows[16]{ROWS, ROWS, TILE_ROWS, 1, 1};
    } shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
#else
  TileShapes() = default;
#endif
  TileShapes(const TileShapes&) = delete;
};

// What multiplies tiles, and what stores them, each falls asleep after some 1,800 cycles without work,
// and wakes up in 700: called between products that are further apart.
inline void keep_tiles_awake() {
#ifdef KVPASS_AMX
  alignas(64) int32_t nothing[TILE_BYTES / 4];
  _tile_dpbsud(3, 4, 2);
  _tile_stored(3, nothing, TILE_BYTES);
#endif
}

// sums[r][i] = the sum of a[r][k] * b[k / 4][4 * i + k % 4] over COUNT tiles' numbers k. Rows of a are
// `stride` bytes apart.
template <int ROWS, int COUNT>
inline void multiply_tiles(const int8_t* a, int stride, const uint8_t* b, int32_t* sums) {
#ifdef KVPASS_AMX
  // Compilers do not know which memory these instructions read and write.
  asm volatile("" : : "r"(a), "r"(b), "r"(sums) : "memory");
  _tile_zero(0);
  each<0, COUNT>([&](auto i) {
    _tile_loadd(1, a + i * TILE_BYTES, stride);
    _tile_loadd(2, b + i * TILE_ROWS * TILE_BYTES, TILE_BYTES);
    _tile_dpbsud(0, 1, 2);
  });
  _tile_stored(0, sums, TILE_BYTES);
  asm volatile("" : : "r"(sums) : "memory");
#else
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < TILE_BYTES / 4; i++) {
      int32_t sum = 0;
      for (int k = 0; k < COUNT * TILE_BYTES; k++)
        sum += a[r * stride + k] * b[k / 4 * TILE_BYTES + 4 * i + k % 4];
      sums[r * (TILE_BYTES / 4) + i] = sum;
    }
#endif
}

// Numbers as digits of eight bits, with signs, the highest first. Three of them hold what a float32
// does; models in 16 bits round more than two.
template <class A> constexpr int DIGITS = sizeof(typename A::Element) == 2 ? 2 : 3;
// The largest integer that is rounded to.
template <int COUNT> constexpr int DIGITS_LIMIT = COUNT == 2 ? 32600 : 4160000;

// Integers nearest to x * by, in the lowest bits: what is added makes digits but the highest positive.
template <int COUNT> inline Ints offset_integers(Floats x, Floats by) {
  // The sum's last place is 1.
  return (Ints)(x * by + (12582912.0f + (COUNT == 2 ? 0x80 : 0x8080)));
}

// Digits of four vectors of offset_integers, those of four lanes side by side, `stride` bytes apart.
template <int COUNT> inline void store_digits(const Ints (&x)[4], int8_t* p, int stride) {
  const Ints even = blend(0xffff, x[0], x[2] << 16), odd = blend(0xffff, x[1], x[3] << 16);
  const Ints low = blend(0x00ff00ff, even, odd << 8), middle = blend(0x00ff00ff, even >> 8, odd);
  const auto put = [&](int digit, Bytes of) { std::memcpy(p + digit * stride, &of, sizeof of); };
  put(COUNT - 1, (Bytes)low ^ (int8_t)0x80);
  if constexpr (COUNT == 2) {
    put(0, (Bytes)middle);
  } else {
    const Ints a = blend(0xffff, x[0] >> 16, x[2]), b = blend(0xffff, x[1] >> 16, x[3]);
    put(1, (Bytes)middle ^ (int8_t)0x80);
    // Above it there are a float's exponent, and 1.
    put(0, (Bytes)blend(0x00ff00ff, a, b << 8) - (int8_t)0x40);
  }
}

// What digits, the highest first and ROWS rows of each, have summed, as rows of numbers.
template <int COUNT, int ROWS> inline Floats join_digits(const int32_t* sums, int row) {
  constexpr int WIDTH = TILE_BYTES / 4;
  const auto digit = [&](int i) {
    return __builtin_convertvector(load<Ints, LANES>(sums + (i * ROWS + row) * WIDTH), Floats);
  };
  Floats sum = digit(0);
  for (int i = 1; i < COUNT; i++) sum = sum * 256.0f + digit(i);
  return sum;
}

// A vector of words holds so many tokens. Transposing four vectors, lane by lane, brings token t of as
// many steps of four to 4 * (t % HELD) + t / HELD.
template <class Code> constexpr int HELD = std::max(1, 2 * LANES / Code::WIDTH);
template <int HELD, class Vector, int... I>
inline Vector in_token_order(Vector x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I / (4 * HELD) * (4 * HELD) + I % HELD * 4 + I % (4 * HELD) / HELD));
}

}  // namespace
