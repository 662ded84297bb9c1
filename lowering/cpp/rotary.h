// Rotary embeddings of new keys, exactly as kvpass/format/rope.py does.
#pragma once
#include "basis.h"
#include "cache.h"

namespace {

// Every step-th of the numbers at p; count <= LANES of them.
template <class Number> inline Floats load_few(const Number* p, int count, int step = 1) {
  if (count == LANES && step == 1) return load_numbers<LANES>(p);
  Number few[LANES]{};
  for (int i = 0; i < count; i++) few[i] = p[i * step];
  return load_numbers<LANES>(few);
}
template <class Number> inline void store_few(Number* p, Floats x, int count, int step) {
  if (count == LANES && step == 1) return store_numbers<LANES>(p, x);
  Number few[LANES];
  store_numbers<LANES>(few, x);
  for (int i = 0; i < count; i++) p[i * step] = few[i];
}

// cos_sin: a token's cosines, then its sines. Channels start + i * step and, distance behind, their
// partners are pair i.
template <int DIM, class Scalar, class Number, class Rotary>
void rotate_token(const Scalar* x, const Number* cos_sin, const Rotary& r, Scalar* rotated) {
  std::copy(x, x + DIM, rotated);
  for (int i = 0; i < r.pairs; i += LANES) {
    const int count = std::min<int>(LANES, r.pairs - i), channel = r.start + i * r.step;
    const Floats a = load_few(x + channel, count, r.step);
    const Floats b = load_few(x + channel + r.distance, count, r.step);
    const Floats cosines = load_few(cos_sin + i, count), sines = load_few(cos_sin + r.pairs + i, count);
    store_few(rotated + channel, a * cosines - b * sines, count, r.step);
    store_few(rotated + channel + r.distance, b * cosines + a * sines, count, r.step);
  }
}

// Calls rotate(token, pair, t, rotated) for all new tokens.
template <class A, class Rotate>
void rotate_tokens(const A& a, typename A::Element* rotated, const Rotate& rotate) {
  for (int64_t pair = 0; pair < a.state.batch * a.state.heads; pair++)
    for (int64_t t = 0; t < a.count; t++, rotated += decltype(a.state)::DIM)
      rotate(a.tokens.row(pair, a.state.heads, t), pair, t, rotated);
}

// The tokens as they are to be stored: with a rotary embedding, in another basis, or as they come.
// Where they are rotated, that is in memory of the next call's.
template <class A> auto rotated_tokens(const A& a) {
  using Element = typename A::Element;
  constexpr int DIM = decltype(a.state)::DIM;
  auto tokens = a.tokens;
  if (!a.rotary.pairs && !a.basis.data) return tokens;
  const int64_t heads = a.state.heads, head = a.count * DIM, sequence = head * heads;
  static thread_local std::vector<Element> memory;
  memory.resize(a.state.batch * sequence);
  const auto embed = [&](const auto* cos_sin) {
    const auto& r = a.rotary;
    rotate_tokens(a, memory.data(), [&](auto* x, int64_t pair, int64_t t, Element* out) {
      rotate_token<DIM>(x, cos_sin + pair / heads * r.batch_stride + t * r.token_stride, r, out);
    });
  };
  if (a.basis.data)
    rotate_tokens(a, memory.data(), [&](auto* x, int64_t pair, int64_t, Element* out) {
      rotate_channels<DIM>(x, a.basis, pair % heads, out);
    });
  else if (a.rotary.wide) embed((const float*)a.rotary.cos_sin);
  else embed((const Element*)a.rotary.cos_sin);
  tokens.data = memory.data();
  tokens.batch_stride = sequence;
  tokens.head_stride = head;
  tokens.token_stride = DIM;
  return tokens;
}

}  // namespace
