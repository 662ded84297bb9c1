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

template <class A, class Number> void rotate_tokens(const A& a, typename A::Element* rotated) {
  constexpr int DIM = decltype(a.state)::DIM;
  const auto& r = a.rotary;
  for (int64_t pair = 0; pair < a.state.batch * a.state.heads; pair++)
    for (int64_t t = 0; t < a.count; t++, rotated += DIM) {
      const auto* cos_sin = (const Number*)r.cos_sin + pair / a.state.heads * r.batch_stride;
      rotate_token<DIM>(
          a.tokens.row(pair, a.state.heads, t), cos_sin + t * r.token_stride, r, rotated);
    }
}

template <class A> void change_basis(const A& a, typename A::Element* rotated) {
  constexpr int DIM = decltype(a.state)::DIM;
  for (int64_t pair = 0; pair < a.state.batch * a.state.heads; pair++)
    for (int64_t t = 0; t < a.count; t++, rotated += DIM)
      rotate_channels<DIM>(
          a.tokens.row(pair, a.state.heads, t), a.basis, pair % a.state.heads, rotated);
}

// The tokens as they are to be stored: with a rotary embedding, in another basis, or as they come.
// Where they are rotated, that is in memory of the next call's.
template <class A> auto rotated_tokens(const A& a) {
  using Element = typename A::Element;
  auto tokens = a.tokens;
  if (!a.rotary.pairs && !a.basis.data) return tokens;
  const int64_t head = a.count * decltype(a.state)::DIM, sequence = head * a.state.heads;
  static thread_local std::vector<Element> memory;
  memory.resize(a.state.batch * sequence);
  if (a.basis.data) change_basis(a, memory.data());
  else if (a.rotary.wide) rotate_tokens<A, float>(a, memory.data());
  else rotate_tokens<A, Element>(a, memory.data());
  tokens.data = memory.data();
  tokens.batch_stride = sequence;
  tokens.head_stride = head;
  tokens.token_stride = decltype(a.state)::DIM;
  return tokens;
}

}  // namespace
