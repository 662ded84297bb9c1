// Calls of compiled functions, made again in the order in which they were recorded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

namespace {

// Addresses and sizes are passed alike.
template <std::size_t... I>
void call(int64_t function, const int64_t* numbers, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(I, int64_t{})...)>(function)(numbers[I]...);
}

template <std::size_t COUNT> void call(int64_t function, const int64_t* numbers) {
  call(function, numbers, std::make_index_sequence<COUNT>{});
}

// What calls a function of so many numbers.
template <std::size_t MOST> struct Calls {
  void (*of[MOST + 1])(int64_t, const int64_t*);
};

template <std::size_t... COUNTS>
constexpr Calls<sizeof...(COUNTS) - 1> calls(std::index_sequence<COUNTS...>) {
  return {{call<COUNTS>...}};
}

// A call is a function, how many numbers it takes, and these. Where that is negative it takes one, and
// refuses by a result that is not. The number of calls that were made: fewer than all if one refused, or
// threw an error, whose message then stands in the arguments.
template <class Arguments> int64_t replay(const Arguments& a) {
  static constexpr auto KNOWN = calls(std::make_index_sequence<Arguments::MOST_NUMBERS + 1>{});
  const int64_t* next = a.calls;
  int64_t made = 0;
  try {
    for (; made < a.count; made++) {
      const int64_t function = next[0], numbers = next[1];
      next += 2;
      if (numbers < 0) {
        if (reinterpret_cast<int64_t (*)(int64_t)>(function)(*next++) >= 0) break;
        continue;
      }
      KNOWN.of[numbers](function, next);
      next += numbers;
    }
  } catch (const std::exception& error) {
    std::strncpy(a.message, error.what(), a.room - 1);
  }
  return made;
}

}  // namespace
