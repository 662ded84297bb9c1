// Asking for memory before it is needed.
#pragma once
#include "vectors.h"

namespace {

// Memory is asked for at the pace at which it comes: a processor that waits for many lines at once does
// no work beside it.
class Ahead {
  const char* next[2];
  int left[2]{};

 public:
  // Lines of 64 bytes, behind those that are left.
  void add(const void* first, int lines) {
    const int place = left[0] > 0;
    next[place] = (const char*)first;
    left[place] = lines;
  }
  // Asks for so many of them, or for what is left.
  void ask(int lines) {
    for (int i = 0; i < lines; i++) {
      if (!left[0]) {
        next[0] = next[1];
        left[0] = left[1];
        left[1] = 0;
      }
      if (!left[0]) return;
      __builtin_prefetch(next[0], 0, 2);
      next[0] += 64;
      left[0]--;
    }
  }
};

// Lines of the words of SIZE tokens. Each stage of a block asks for so many of them as come in its time:
// keys in tiles for a third of their own, the stages of values for the rest and theirs.
template <class X, int SIZE> constexpr int LINES = SIZE * X::Code::WORDS / 32;

}  // namespace
