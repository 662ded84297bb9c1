// Products of matrices of bytes, and of bfloat16: what AMX multiplies in tiles of 16 rows of 64 bytes.
#pragma once
#include "integers.h"
#include "numbers.h"

namespace {

// KVPASS_TILES: 1: the CPU has such instructions and this process may use them; 2: loops stand in for
// them.
#if KVPASS_TILES == 1 && KVPASS_LANES == 16 && defined(__AMX_INT8__) && defined(__AMX_BF16__)
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

// While it lives, this thread's tiles have so many rows of TILE_BYTES.
template <int... ROWS> struct TileShapes {
#ifdef KVPASS_AMX
  TileShapes() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14]{};
      uint16_t row_bytes[16]{((void)ROWS, TILE_BYTES)...};
      uint8_t rows[16]{ROWS...};
    } shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
#else
  TileShapes() = default;
#endif
  TileShapes(const TileShapes&) = delete;
};
// Those of products with ROWS rows: sums, two factors, and two tiles of one row for keep_tiles_awake.
template <int ROWS> using ByteTiles = TileShapes<ROWS, ROWS, TILE_ROWS, 1, 1>;

// What multiplies tiles, and what stores them, each falls asleep after some 1,800 cycles without work,
// and wakes up in 700: called between products that are further apart.
inline void keep_tiles_awake() {
#ifdef KVPASS_AMX
  // Of as many rows as such a tile may have.
  alignas(64) int32_t nothing[TILE_ROWS][TILE_BYTES / 4];
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

// In every lane the two numbers of that lane, rounded to bfloat16, the first one's in the low bits.
template <int... I> inline Words zip_halves(Words x, std::integer_sequence<int, I...>) {
  return SHUFFLE(x, x, (I / 2 + I % 2 * LANES));
}
inline Ints round_pairs(Floats a, Floats b) {
  return (Ints)zip_halves(round_both(a, b), std::make_integer_sequence<int, 2 * LANES>{});
}

// sums[i][j] = what was there, if ADDS, and the sum of a[i][k] * b[k / 2][2 * j + k % 2] over `steps` tiles'
// numbers k. Rows of a, two tiles of them, are `stride` bytes apart; of b each step has BESIDE tiles side by
// side, of which COUNT are multiplied; rows of sums are as long as all of them. meanwhile(k) is called in
// each step.
template <int COUNT, bool ADDS, int BESIDE, class Meanwhile>
inline void multiply_tiles(const BFloat16* a, int64_t stride, const BFloat16 (*b)[TILE_BYTES / 2], int steps,
                           float* sums, const Meanwhile& meanwhile) {
  constexpr int WIDTH = TILE_BYTES / 4;
#ifdef KVPASS_AMX
  constexpr int STRIDE = BESIDE * TILE_BYTES;
  asm volatile("" : : "r"(a), "r"(b), "r"(sums) : "memory");
  float* below = sums + TILE_ROWS * BESIDE * WIDTH;
  if constexpr (ADDS) {
    _tile_loadd(0, sums, STRIDE);
    _tile_loadd(1, below, STRIDE);
    if constexpr (COUNT == 2) {
      _tile_loadd(2, sums + WIDTH, STRIDE);
      _tile_loadd(3, below + WIDTH, STRIDE);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < steps; k++, a += TILE_BYTES / 2, b += BESIDE * TILE_ROWS) {
    meanwhile(k);
    _tile_loadd(4, a, stride);
    _tile_loadd(6, b, TILE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, (const char*)a + TILE_ROWS * stride, stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (COUNT == 2) {
      _tile_loadd(7, b + TILE_ROWS, TILE_BYTES);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, STRIDE);
  _tile_stored(1, below, STRIDE);
  if constexpr (COUNT == 2) {
    _tile_stored(2, sums + WIDTH, STRIDE);
    _tile_stored(3, below + WIDTH, STRIDE);
  }
  asm volatile("" : : "r"(sums) : "memory");
#else
  for (int i = 0; i < 2 * TILE_ROWS; i++)
    for (int j = 0; j < COUNT * WIDTH; j++) {
      float sum = ADDS ? sums[i * BESIDE * WIDTH + j] : 0;
      for (int k = 0; k < steps * TILE_BYTES / 2; k++) {
        const int at = k / (2 * TILE_ROWS) * BESIDE + j / WIDTH;
        const float x = to_float(*(const BFloat16*)((const char*)a + i * stride + 2 * k));
        sum += x * to_float(b[at * TILE_ROWS + k % (2 * TILE_ROWS) / 2][j % WIDTH * 2 + k % 2]);
      }
      sums[i * BESIDE * WIDTH + j] = sum;
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
