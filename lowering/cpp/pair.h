// Where the tokens of one (batch, KV head) lie, and what its query rows see of them.
#pragma once
#include "cache.h"

namespace {

// Calls body(slot, first, count) for the runs of slots that hold tokens from ... to of a ring, which
// has so many slots; 0: tokens lie one after the other.
template <class Body>
inline void each_run(int64_t from, int64_t to, int64_t ring, const Body& body) {
  while (from < to) {
    const int64_t slot = ring ? from % ring : from;
    const int64_t count = ring ? std::min(to - from, ring - slot) : to - from;
    body(slot, from, (int)count);
    from += count;
  }
}

// The tokens that a query row sees, but for its mask.
struct Bounds {
  int64_t first, end;
};

enum Kind { NONE, BOOL, FLOAT, BFLOAT16, HALF };

// Calls body with the numbers at p.
template <class Body> auto with_numbers(int64_t kind, const void* p, const Body& body) {
  if (kind == FLOAT) return body((const float*)p);
  if (kind == BFLOAT16) return body((const BFloat16*)p);
  return body((const Float16*)p);
}

// A: the arguments of a kernel. Tokens are known by their position among the keys.
template <class A> struct Pair {
  using K = typename A::K;
  using V = typename A::V;
  // First tokens, which are stored as they are.
  static constexpr int64_t SINKS = std::max(K::SINKS, V::SINKS);

  const A& a;
  int64_t pair, batch, tokens, k_packed = 0, v_packed = 0;
  // The oldest token that is kept; its mask is column 0.
  int64_t oldest = 0;
  // Position among the values, less that among the keys.
  int64_t shift = 0;
  // Of a segment: where its tokens are, and the position of one whose place is -1, less its slot.
  const int32_t* positions = nullptr;
  int64_t behind = 0;

  Pair(const A& arguments, int64_t p) : a(arguments), pair(p), batch(p / a.k.heads) {
    if constexpr (A::SEGMENT) {
      const int32_t* ends = a.k.segment_ends + batch * a.segments;
      tokens = ends[a.segment];
      k_packed = v_packed = K::PACKED ? tokens : 0;
      for (int64_t s = 0; s < a.segments; s++) behind += ends[s];
      behind -= tokens;
      positions = a.positions + batch * a.positions_count;
    } else {
      tokens = a.k.end(batch);
      k_packed = a.k.packed_end(batch);
      v_packed = a.v.packed_end(batch);
      if constexpr (K::SLIDING) {
        shift = a.v.end(batch) - tokens;
        v_packed -= shift;
        oldest = std::max<int64_t>(0, tokens - a.queries - a.retained);
      }
    }
  }

  // The tokens that query i sees, but for its mask.
  int64_t first_of(int64_t i) const {
    return a.window ? std::max(oldest, tokens - a.queries + i + 1 - a.window) : oldest;
  }
  int64_t end_of(int64_t i) const {
    // New tokens are not packed: a packed segment lies before all of them.
    return a.causal && !(A::SEGMENT && K::PACKED) ? tokens - a.queries + i + 1 : tokens;
  }
  // Where the token in a slot of a segment stands among all tokens.
  int64_t position_of(int64_t slot) const {
    if constexpr (A::SEGMENT && K::PACKED) return positions[slot];
    else if constexpr (A::SEGMENT) {
      const int64_t position = slot < a.positions_count ? positions[slot] : -1;
      return position < 0 ? behind + slot : position;
    }
    return slot;
  }
  // Where walking the tokens begins, but for the sinks: vectors of slots start at multiples of LANES.
  int64_t begin() const {
    return SINKS + std::max<int64_t>(0, first_of(0) - SINKS) / LANES * LANES;
  }
  // How many tokens from `start` on may have lost their slots to newer ones.
  int gone(int64_t start, int count) const { return std::clamp<int64_t>(oldest - start, 0, count); }

  // Calls packed(slot, first, n) and exact(tokens, first, n) for the runs of slots that hold the keys,
  // or the values, of tokens start ... start + count; `first` counts from start.
  template <class Packed, class Exact>
  void each_key_run(int64_t start, int count, const Packed& packed, const Exact& exact) const {
    each_run_of(a.k, k_packed, 0, start, count, packed, exact);
  }
  template <class Packed, class Exact>
  void each_value_run(int64_t start, int count, const Packed& packed, const Exact& exact) const {
    each_run_of(a.v, v_packed, K::SLIDING ? shift : 0, start, count, packed, exact);
  }
  template <class X, class Packed, class Exact>
  void each_run_of(const X& x, int64_t end, int64_t by, int64_t start, int count,
                   const Packed& packed, const Exact& exact) const {
    const int64_t from = start + gone(start, count), to = start + count;
    const bool sinks = X::SINKS > 0 && start < X::SINKS;
    const int64_t border = sinks || !X::PACKED ? from : std::clamp(end, from, to);
    if constexpr (X::PACKED)
      each_run(from + by, border + by, X::SLIDING ? x.capacity : 0,
               [&](int64_t slot, int64_t first, int n) {
                 packed(slot - X::SINKS, (int)(first - by - start), n);
               });
    each_run(border + by, to + by, x.exact_ring(), [&](int64_t slot, int64_t first, int n) {
      const auto* tokens = x.exact_slot(pair, slot);
      if constexpr (X::SINKS > 0)
        if (sinks) tokens = x.sink(pair, first);
      exact(tokens, (int)(first - by - start), n);
    });
  }

  int64_t head_of(int64_t row) const {
    return pair % a.k.heads * (a.rows / a.queries) + row / a.queries;
  }

  // Calls body with a function that gives what the mask adds to the score of a token, counted from
  // token `first` on, for a query row.
  template <class Body> auto with_mask(int64_t row, int64_t first, const Body& body) const {
    int64_t place = batch * a.mask_batch + head_of(row) * a.mask_head + row % a.queries * a.mask_query;
    if constexpr (!A::SEGMENT) place += (first - oldest) * a.mask_token;
    const int64_t stride = a.mask_token;
    const auto column = [this, first, stride](int64_t t) {
      if constexpr (A::SEGMENT) return position_of(first + t) * stride;
      else return t * stride;
    };
    if (a.mask_kind == BOOL) {
      const auto* seen = (const uint8_t*)a.mask + place;
      return body([=](int64_t t) { return seen[column(t)] ? 0 : -INFINITE; });
    }
    return with_numbers(a.mask_kind, a.mask, [&](auto* bias) {
      bias += place;
      return body([=](int64_t t) { return to_float(bias[column(t)]); });
    });
  }

  // Those of a row behind the last one are empty.
  Bounds bounds(int64_t row) const {
    if (row >= a.rows) return {0, 0};
    return {first_of(row % a.queries), end_of(row % a.queries)};
  }

  // Whether a query row sees one of these tokens.
  bool sees(int64_t start, int count, int64_t row, const Bounds& seen) const {
    const int64_t first = std::max(start, seen.first), end = std::min(start + count, seen.end);
    if (first >= end || !a.mask_kind) return first < end;
    return with_mask(row, first, [&](const auto& at) {
      for (int64_t t = 0; t < end - first; t++)
        if (at(t) != -INFINITE) return true;
      return false;
    });
  }

  // Whether one of a panel's rows does, whose first one is `row`.
  template <class Panel>
  bool one_sees(int64_t start, int count, int64_t row, const Panel& panel) const {
    for (int r = 0; r < Panel::ROWS; r++)
      if (sees(start, count, row + r, panel.seen(r))) return true;
    return false;
  }

  // The channels of a query row, scaled, in whole vectors.
  void read_query(int64_t row, float* query) const {
    const auto* place = a.query + batch * a.query_batch + head_of(row) * a.query_head +
                        row % a.queries * a.query_token;
    each_vector<K::DIM>([&](auto at, auto width) {
      store<LANES>(query + at, load_numbers<width>(place + at) * (float)a.scale);
    });
  }
};

}  // namespace
