// Where the tokens of one (batch, KV head) lie, and what its query rows see of them.
#pragma once
#include "basis.h"
#include "pages.h"

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

enum Kind { NONE, BOOL, FLOAT, BFLOAT16, HALF };

// Calls body with the numbers at p.
template <class Body> auto with_numbers(int64_t kind, const void* p, const Body& body) {
  if (kind == FLOAT) return body((const float*)p);
  if (kind == BFLOAT16) return body((const BFloat16*)p);
  return body((const Float16*)p);
}

// The same for tokens in the pages of a table.
template <class X, class Body>
inline void each_page_run(const X& x, const int32_t* table, int64_t from, int64_t to, const Body& body) {
  while (from < to) {
    const int64_t count = std::min(to - from, x.capacity - from % x.capacity);
    body(x.slot_in(table, from), from, (int)count);
    from += count;
  }
}

// The keys or the values of a pair: those before `packed_end` are packed. Tokens are known by their
// position among the keys; it is `shift` less than that among the values.
template <class X> struct Stored {
  const X& x;
  int64_t packed_end = 0, shift = 0;
};

// A: the arguments of a kernel.
template <class A> struct Pair {
  using K = typename A::K;
  using V = typename A::V;
  // First tokens, which are stored as they are.
  static constexpr int64_t SINKS = std::max(K::SINKS, V::SINKS);

  const A& a;
  int64_t pair, batch, tokens;
  Stored<K> keys{a.k};
  Stored<V> values{a.v};
  // The oldest token that is retained; its mask is column 0.
  int64_t oldest = 0;
  // Of a segment: where its tokens are, and the position of one whose place is -1, less its slot.
  const int32_t* positions = nullptr;
  int64_t behind = 0;
  // Of pages: those of packed and of exact tokens. New tokens, from `past` on, are in none.
  const int32_t *table = nullptr, *exact_table = nullptr;
  int64_t past = 0, first_new = 0;
  // Of a query in a batch of requests: its sequence and its token there.
  int64_t sequence, token = 0;

  Pair(const A& arguments, int64_t p) : a(arguments), pair(p), batch(p / arguments.k.heads), sequence(batch) {
    if constexpr (A::SEGMENT) {
      const int32_t* ends = a.k.segment_ends + batch * a.segments;
      tokens = ends[a.segment];
      keys.packed_end = values.packed_end = K::PACKED ? tokens : 0;
      for (int64_t s = 0; s < a.segments; s++) behind += ends[s];
      behind -= tokens;
      positions = a.positions + batch * a.positions_count;
    } else if constexpr (A::PAGED) {
      // A single query: its token sees those before it, packed as in a step of its own.
      const int64_t request = a.single[2 * batch], position = a.single[2 * batch + 1];
      const PagedRequest of(a, request);
      tokens = position + 1;
      if (a.window) oldest = std::max<int64_t>(0, tokens - a.window);
      keys.packed_end = K::packed_before(position);
      values.packed_end = V::packed_before(position);
      table = of.table;
      exact_table = of.exact_table;
      past = of.past;
      first_new = of.first_new;
      sequence = 0;
      token = first_new + position - past;
    } else {
      tokens = a.k.end(batch);
      keys.packed_end = a.k.packed_end(batch);
      values.packed_end = a.v.packed_end(batch);
      if constexpr (K::SLIDING) {
        values.shift = a.v.end(batch) - tokens;
        values.packed_end -= values.shift;
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

  // Calls packed(slot, first, n) and exact(tokens, first, n) for the runs of slots that hold tokens
  // start ... start + count; `first` counts from start.
  template <class X, class Packed, class Exact>
  void each_run_of(const Stored<X>& stored, int64_t start, int count, const Packed& packed,
                   const Exact& exact) const {
    const int64_t from = start + gone(start, count), to = start + count;
    if constexpr (A::PAGED) each_run_of_pages(stored, start, from, to, packed, exact);
    else each_run_of_slots(stored, start, from, to, packed, exact);
  }
  template <class X, class Packed, class Exact>
  void each_run_of_slots(const Stored<X>& stored, int64_t start, int64_t from, int64_t to,
                         const Packed& packed, const Exact& exact) const {
    const X& x = stored.x;
    const int64_t by = X::SLIDING ? stored.shift : 0;
    const bool sinks = X::SINKS > 0 && start < X::SINKS;
    const int64_t border = sinks || !X::PACKED ? from : std::clamp(stored.packed_end, from, to);
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

  template <class X, class Packed, class Exact>
  void each_run_of_pages(const Stored<X>& stored, int64_t start, int64_t from, int64_t to,
                         const Packed& packed, const Exact& exact) const {
    const X& x = stored.x;
    const int64_t border = from < X::SINKS ? from : std::clamp(stored.packed_end, from, to);
    const int64_t stored_end = std::clamp(past, border, to);
    each_page_run(x, table, from, border, [&](int64_t slot, int64_t first, int n) {
      if constexpr (X::PACKED) packed(slot, (int)(first - start), n);
      else exact(x.unpacked_slot(pair, slot), (int)(first - start), n);
    });
    each_page_run(x, exact_table, border, stored_end, [&](int64_t slot, int64_t first, int n) {
      exact(x.exact_slot(pair, slot), (int)(first - start), n);
    });
    for (int64_t t = stored_end; t < to; t++)
      exact(x.new_tokens.at(0, pair % x.heads, first_new + t - past), (int)(t - start), 1);
  }

  int64_t head_of(int64_t row) const {
    return pair % a.k.heads * (a.rows / a.queries) + row / a.queries;
  }

  // The number of a query row in the output.
  int64_t output_of(int64_t row) const {
    return ((A::PAGED ? token : batch) * a.k.heads + pair % a.k.heads) * a.rows + row;
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

  // Whether a query row sees one of these tokens; none does behind the last row.
  bool sees(int64_t start, int count, int64_t row) const {
    if (row >= a.rows) return false;
    const int64_t first = std::max(start, first_of(row % a.queries));
    const int64_t end = std::min(start + count, end_of(row % a.queries));
    if (first >= end || !a.mask_kind) return first < end;
    return with_mask(row, first, [&](const auto& at) {
      for (int64_t t = 0; t < end - first; t++)
        if (at(t) != -INFINITE) return true;
      return false;
    });
  }

  // Whether one of a panel's ROWS rows does, whose first one is `row`.
  template <int ROWS> bool one_sees(int64_t start, int count, int64_t row) const {
    for (int r = 0; r < ROWS; r++)
      if (sees(start, count, row + r)) return true;
    return false;
  }

  // Masks a row's scores of these tokens, STEP numbers apart; what it does not see gets -inf.
  template <int STEP> void mask_scores(int64_t start, int count, int64_t row, float* scores) const {
    const int lost = gone(start, count);
    int64_t first = 0, end = 0;
    if (row < a.rows) {
      first = first_of(row % a.queries);
      end = end_of(row % a.queries);
      if (a.mask_kind)
        with_mask(row, start + lost, [&](const auto& at) {
          for (int t = lost; t < count; t++) scores[t * STEP] += at(t - lost);
        });
    }
    const int unseen = std::clamp<int64_t>(first - start, 0, count);
    for (int t = 0; t < unseen; t++) scores[t * STEP] = -INFINITE;
    for (int t = std::clamp<int64_t>(end - start, 0, count); t < count; t++)
      scores[t * STEP] = -INFINITE;
  }

  // The channels of a query row, in the basis of the keys, times `scale`, in whole vectors.
  void read_query(int64_t row, float scale, float* query) const {
    const auto* place = a.query.at(sequence, head_of(row), token + row % a.queries);
    typename A::Element rotated[K::DIM];
    if (a.basis.data) {
      rotate_channels<K::DIM>(place, a.basis, pair % a.k.heads, rotated);
      place = rotated;
    }
    each_vector<K::DIM>([&](auto at, auto width) {
      store<LANES>(query + at, load_numbers<width>(place + at) * scale);
    });
  }
};

}  // namespace
