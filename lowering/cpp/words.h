// How codes lie in 16-bit words: see kvpass/format/words.py.
#pragma once
#include "vectors.h"

namespace {

// SIZE words from `at` on of a token, whose last vector may not be full; other lanes hold anything.
template <int AT, int SIZE, int... I>
inline Ints load_words(const uint16_t* token, std::integer_sequence<int, I...>) {
  // The words before them are read as well: a vector put together in memory would be waited for.
  constexpr int BACK = LANES - SIZE;
  if constexpr (BACK == 0 || AT < BACK) return widen(load<Shorts, SIZE>(token + AT));
  const Ints words = widen(load<Shorts, LANES>(token + AT - BACK));
  return SHUFFLE(words, words, ((I + BACK) % LANES));
}
template <int AT, int SIZE> inline Ints load_words(const uint16_t* token) {
  return load_words<AT, SIZE>(token, std::make_integer_sequence<int, LANES>{});
}

// A format says how a vector of words holds vectors of codes, one of each of COUNT planes. It reads
// them in CHAINS of DEPTH planes; its members are one chain's state, at one of its steps. A code stays
// where it stands, `shift` bits from the right: a number holds it as well there, and moving it would
// be an instruction more. A token has PARTS words for each channel of a plane, `width` apart.

// Bits [j * BITS, (j + 1) * BITS) of a word are plane j.
template <int BITS> struct Bits {
  static constexpr int COUNT = 16 / BITS, CHAINS = 1, DEPTH = COUNT, PARTS = 1;
  static constexpr bool PAIRS = true;
  static constexpr int width(int dim) { return dim / COUNT; }
  static constexpr int plane(int, int step) { return step; }
  static constexpr int shift(int plane) { return BITS * plane; }
  static constexpr int MASK = (1 << BITS) - 1;

  Ints words;

  template <int CHAIN, int STEP, int AT, int SIZE> void start(const uint16_t* token, int) {
    words = load_words<AT, SIZE>(token);
  }
  template <int PLANE> Ints shifted() const { return words & MASK << shift(PLANE); }
  void next() {}
  // Codes of two words in each lane, as two numbers, times 2^LEFT.
  template <int PLANE, int LEFT = 0> static Ints pairs(Ints words) {
    if constexpr (PLANE == COUNT - 1 && !LEFT) return (Ints)((Words)words >> shift(PLANE));
    else return words >> (shift(PLANE) - LEFT) & (MASK << LEFT) * 0x10001;
  }
  // The codes of a plane in the low byte of each word; in the high one, of the plane half of all on.
  template <int PLANE> static Ints bytes(Ints words) {
    return words >> shift(PLANE) & MASK * 0x01010101;
  }
  // The LEFT with which no code of a byte is shifted; the largest code then.
  static constexpr int left(int plane) { return shift(plane) % 8; }
  static constexpr int MAX_LEFT = MASK << BITS * (COUNT - 1) % 8;

  template <int PLANE> static void put(Ints (&words)[PARTS], Ints code) {
    words[0] |= code << shift(PLANE);
  }
};

// Words of the low two bits of even planes, of those of odd planes, and of the high bits of all.
struct ThreeBits {
  static constexpr int COUNT = 16, CHAINS = 2, DEPTH = 8, PARTS = 3;
  static constexpr bool PAIRS = false;
  static constexpr int width(int dim) { return dim / COUNT; }
  static constexpr int plane(int chain, int step) { return 2 * step + chain; }
  static constexpr int shift(int plane) { return plane / 2 * 2; }

  Ints low, high;

  template <int CHAIN, int STEP, int AT, int SIZE> void start(const uint16_t* token, int width) {
    low = load_words<AT, SIZE>(token + CHAIN * width);
    high = load_words<AT, SIZE>(token + 2 * width) << (2 - CHAIN);
  }
  template <int PLANE> Ints shifted() const {
    return pick(low, Ints{} + (3 << shift(PLANE)), high & (4 << shift(PLANE)));
  }
  void next() {}

  template <int PLANE> static void put(Ints (&words)[PARTS], Ints code) {
    words[PLANE % 2] |= (code & 3) << shift(PLANE);
    words[2] |= code >> 2 << PLANE;
  }
};

// Words of the low and of the high halves of 32 bits: ten codes of 3 bits, then one of 2.
struct Pack11 {
  static constexpr int COUNT = 11, CHAINS = 1, DEPTH = COUNT, PARTS = 2;
  static constexpr bool PAIRS = false;
  static constexpr int width(int dim) { return (dim + COUNT - 1) / COUNT; }
  static constexpr int plane(int, int step) { return step; }
  // The last code's would be the sign.
  static constexpr int shift(int plane) { return plane < COUNT - 1 ? 3 * plane : 0; }

  Ints words;

  template <int CHAIN, int STEP, int AT, int SIZE> void start(const uint16_t* token, int width) {
    words = load_words<AT, SIZE>(token + width) << 16 | (load_words<AT, SIZE>(token) & 0xffff);
  }
  template <int PLANE> Ints shifted() const {
    if constexpr (PLANE == COUNT - 1) return words >> 30 & 3;
    else return words & (7 << shift(PLANE));
  }
  void next() {}

  template <int PLANE> static void put(Ints (&words)[PARTS], Ints code) {
    constexpr int AT = 3 * PLANE;
    if constexpr (PLANE == COUNT - 1) code = code > 3 ? Ints{} + 3 : code;
    if constexpr (AT < 16) words[0] |= (code << AT) & 0xffff;
    if constexpr (AT >= 16) words[1] |= code << (AT - 16);
    else if constexpr (AT > 13) words[1] |= code >> (16 - AT);
  }
};

constexpr int power_of_3(int n) { return n ? 3 * power_of_3(n - 1) : 1; }

// Five base-3 digits in each byte of a word.
struct Ternary {
  static constexpr int COUNT = 10, CHAINS = 2, DEPTH = 5, PARTS = 1;
  static constexpr bool PAIRS = false;
  static constexpr int width(int dim) { return (dim + COUNT - 1) / COUNT; }
  static constexpr int plane(int chain, int step) { return chain * DEPTH + DEPTH - 1 - step; }
  static constexpr int shift(int) { return 21; }

  // A digit, and what follows it as a fraction of 2^21: three times that is the next digit.
  Ints rest;

  template <int CHAIN, int STEP, int AT, int SIZE> void start(const uint16_t* token, int) {
    const Ints byte = load_words<AT, SIZE>(token) >> (8 * CHAIN) & 255;
    // Rounded up, so that no digit is missed; 242 times that error is less than one of the digits.
    rest = byte * ((1 << 21) / power_of_3(DEPTH - STEP) + 1);
    next();
  }
  template <int PLANE> Ints shifted() const { return rest & (3 << 21); }
  void next() {
    const Ints fraction = rest & ((1 << 21) - 1);
    rest = fraction + (fraction << 1);
  }

  template <int PLANE> static void put(Ints (&words)[PARTS], Ints code) {
    words[0] += code * (power_of_3(PLANE % DEPTH) << (8 * (PLANE / DEPTH)));
  }
};

// A code of a format's state, and the code times 2^shift, exactly.
template <int PLANE, class Codes> inline Ints code_of(const Codes& codes) {
  return codes.template shifted<PLANE>() >> Codes::shift(PLANE);
}
template <int PLANE, class Codes> inline Floats shifted_code(const Codes& codes) {
  return __builtin_convertvector(codes.template shifted<PLANE>(), Floats);
}
// What that number is to be multiplied by.
template <class Codes> constexpr float unit(int plane) { return 1.0f / (1 << Codes::shift(plane)); }

}  // namespace
