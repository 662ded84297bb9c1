// What is due of many requests joins the packed tokens in their pages: see kvpass/ops/append_pages.py.
#pragma once
#include "encode_cross_head.h"
#include "pages.h"

namespace {

template <class A> void append_pages(const A& a) {
  using X = std::decay_t<decltype(a.state)>;
  const int64_t heads = a.state.heads;
  // Encodes what is due of a request, of one head if they are encoded apart, else of all.
  const auto pack = [&](int64_t number, int64_t head) {
    const PagedRequest request(a, number);
    const int64_t end = X::packed_before(request.total - 1);
    const int64_t first = std::max<int64_t>(X::packed_before(request.past - 1), X::SINKS);
    X state = a.state;
    state.table = request.table;
    const auto row_of = [&](int64_t pair, int64_t t) -> const typename X::Element* {
      if (t < request.past) return state.exact_slot(pair, state.slot_in(request.exact_table, t));
      return state.new_tokens.at(0, pair, request.first_new + t - request.past);
    };
    const auto row = [&](int64_t t) { return row_of(head, t); };
    if constexpr (X::DIRECT) encode(state, head, first, end, row);
    else if constexpr (X::PACKED) encode_tokens(state, first, end, 1, row_of);
    else
      for (int64_t t = first; t < end; t++)
        copy_token(state.unpacked_slot(head, state.slot_of(t)), row(t), X::DIM);
  };
  const int64_t parts = X::DEQUANT_FIRST ? 1 : heads;
  int64_t due = 0;
  for (int64_t i = 0; i < a.count; i++) {
    const PagedRequest request(a, i);
    due += X::packed_before(request.total - 1) - X::packed_before(request.past - 1);
  }
  // Waking threads costs more than encoding a few tokens.
  const int threads = due * heads < 64 ? 1 : a.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < a.count * parts; i++) pack(i / parts, i % parts);
}

}  // namespace
