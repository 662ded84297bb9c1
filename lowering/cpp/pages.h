// Where the tokens of a request are in a pool of pages.
#pragma once
#include "cache.h"

namespace {

// A request in a step. A: the arguments of a kernel. Of the tokens before `past`, packed ones are in the
// pages of one table, exact ones in those of the other; new ones begin at `first_new` of the batch.
struct PagedRequest {
  const int32_t *table, *exact_table;
  int64_t past, first_new, total;

  template <class A> PagedRequest(const A& a, int64_t number) {
    const int32_t* numbers = a.requests + number * 3;
    table = a.tables + number * a.pages;
    exact_table = a.exact_tables + number * a.pages;
    past = numbers[0];
    total = numbers[1];
    first_new = numbers[2];
  }
};

}  // namespace
