// Where a cache tensor keeps its tokens.
//
// A kernel is made for one plan: a generated struct holds the tensors of its state and their sizes,
// and, as constants, what the plan says (lowering/cpp/constants.py). These headers are templates over
// it.
#pragma once
#include "numbers.h"
#include "planes.h"

namespace {

template <class State> struct Cache : State {
  using Number = typename State::Number;
  using Element = typename State::Element;
  using Pair = typename Number::Pair;
  using Code = Planes<typename State::Words, State::DIM, State::RUN, State::PERIOD>;
  static constexpr int DIM = State::DIM;
  // Slots of tokens one behind the other need not be so.
  static constexpr bool SCATTERED = State::SLIDING || State::PAGED;
  // Codes are read as they lie in their words; others are decoded, a block of tokens at a time.
  static constexpr bool DIRECT = State::PACKED && !State::DEQUANT_FIRST;
  // The first tokens are stored as they are and have no slots among the packed ones.
  static constexpr int64_t SINKS = State::SINKS;
  // Tokens that can only be encoded together.
  static constexpr int TOKEN_GROUP = State::BY_TOKEN || !State::GROUP ? 1 : State::GROUP;
  // Of one sequence: of the sinks, if there are any, of packed tokens, of all.
  static constexpr int ENDS = State::PACKED ? State::SINKS ? 3 : 2 : State::SEGMENTS;

  int32_t& end(int64_t batch) const { return this->segment_ends[batch * ENDS + ENDS - 1]; }
  int64_t packed_end(int64_t batch) const {
    return State::PACKED ? this->segment_ends[batch * ENDS + ENDS - 2] : 0;
  }
  // Writes the ends of all sequences.
  void set_ends(int64_t sinks, int64_t packed, int64_t all) const {
    for (int64_t b = 0; b < this->batch; b++) {
      if (State::SINKS) this->segment_ends[b * ENDS] = sinks;
      if (State::PACKED) this->segment_ends[b * ENDS + ENDS - 2] = packed;
      end(b) = all;
    }
  }

  // Of `exact` tokens behind `packed` others, those that are to be packed now.
  static int64_t due(int64_t packed, int64_t exact) {
    int64_t stay = State::WINDOW;
    if constexpr (State::RATIO_DIVISOR > 0) {
      const int64_t counted = State::PIVOTAL ? exact : exact + packed - SINKS;
      stay = std::max<int64_t>(stay, counted * State::RATIO / State::RATIO_DIVISOR);
    }
    return std::max<int64_t>(exact - stay, 0) / State::PACK_EVERY * State::PACK_EVERY;
  }
  // Where packed tokens end in the step of a token behind so many, if each had a step of its own.
  static int64_t packed_before(int64_t tokens) {
    const int64_t packed = due(SINKS, std::max<int64_t>(tokens - SINKS, 0));
    return packed ? SINKS + packed : 0;
  }

  // The slot of a packed token. Slots of pages are counted through: each page has `capacity` of them.
  int64_t slot_of(int64_t token) const {
    if constexpr (State::PAGED) return slot_in(this->table, token);
    else return State::SLIDING ? token % this->capacity : token - SINKS;
  }
  // The same of the pages of a table.
  int64_t slot_in(const int32_t* table, int64_t token) const {
    return table[token / this->capacity] * this->capacity + token % this->capacity;
  }
  // The page of a slot, the one of its rows of slots that is the head's, and the slot's place there;
  // without pages, all is one.
  struct Place {
    int64_t page, row, slot;
  };
  Place place_of(int64_t pair, int64_t slot) const {
    if constexpr (!State::PAGED) return {0, pair, slot};
    else return {slot / this->capacity, pair % this->heads, slot % this->capacity};
  }
  template <class Number> Number* page_of(Number* first, int64_t page) const {
    if constexpr (!State::PAGED) return first;
    else return (Number*)((char*)first + page * this->page_bytes);
  }
  uint16_t* codes_at(int64_t pair, int64_t slot) const {
    const Place at = place_of(pair, slot);
    return page_of(this->codes, at.page) + (at.row * this->capacity + at.slot) * Code::WORDS;
  }
  // Those of the first group of channels. Where groups span several heads, they share what is stored
  // of a group of tokens; without groups of tokens, all tokens do.
  Pair* qparams_at(int64_t pair, int64_t slot) const {
    const Place at = place_of(pair, slot);
    Pair* page = page_of(this->qparams, at.page);
    if constexpr (State::BY_TOKEN)
      return page + at.row / State::HEADS_PER_GROUP * this->capacity * Code::GROUPS + at.slot;
    else if constexpr (!State::GROUP) return page + at.row * DIM;
    else return page + (at.row * (this->capacity / TOKEN_GROUP) + at.slot / TOKEN_GROUP) * DIM;
  }

  int32_t* outliers_of(int64_t batch, int64_t slot) const {
    return this->outliers + (batch * this->capacity + slot) * State::OUTLIERS;
  }

  // Slots of the ring of tokens that are stored as they are; 0: they lie one after the other.
  int64_t exact_ring() const {
    if constexpr (!State::PACKED) return State::SLIDING ? this->capacity : 0;
    else return State::RATIO_DIVISOR ? this->ring : State::RING;
  }
  // The token in a slot among those.
  Element* exact_slot(int64_t pair, int64_t slot) const {
    const Place at = place_of(pair, slot);
    if constexpr (State::PAGED)
      return this->window + ((at.page * this->heads + at.row) * this->capacity + at.slot) * DIM;
    else if constexpr (State::PACKED) return this->window + (pair * exact_ring() + slot) * DIM;
    else return unpacked_slot(pair, slot);
  }
  // The same where codes are tokens.
  Element* unpacked_slot(int64_t pair, int64_t slot) const {
    const Place at = place_of(pair, slot);
    return page_of(this->codes, at.page) + (at.row * this->capacity + at.slot) * DIM;
  }
  Element* exact(int64_t pair, int64_t token) const {
    return exact_slot(pair, exact_ring() ? token % exact_ring() : token);
  }
  Element* sink(int64_t pair, int64_t token) const {
    return this->sinks + (pair * SINKS + token) * DIM;
  }
};

// Scale and minimum of every channel of a token, as they are stored.
template <class X> struct Scales {
  // Vectors are read beyond the last channel.
  static constexpr int SIZE = round_up(X::DIM, LANES) + LANES;

  alignas(64) float scale[SIZE]{}, minimum[SIZE]{};

  void read(const typename X::Pair* qparams) {
    each_vector<X::DIM>([&](auto at, auto width) {
      const Affine affine = load_affine<typename X::Number, width>(qparams + at);
      store<LANES>(scale + at, affine.scale);
      store<LANES>(minimum + at, affine.minimum);
    });
  }
};

// Tokens [batch, heads, tokens, channels] with a dense last dimension. Strides count elements.
template <class Fields> struct Tokens : Fields {
  auto at(int64_t batch, int64_t head, int64_t token) const {
    return this->data + batch * this->batch_stride + head * this->head_stride +
           token * this->token_stride;
  }
  auto row(int64_t pair, int64_t heads, int64_t token) const {
    return at(pair / heads, pair % heads, token);
  }
};

template <class Scalar> inline void copy_token(Scalar* to, const Scalar* from, int dim) {
  std::memcpy(to, from, dim * sizeof(Scalar));
}

}  // namespace
