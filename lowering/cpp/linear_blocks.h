// Which outputs of linear layers are computed together.
#pragma once
#include <algorithm>
#include <cstdint>

namespace {

template <int ROWS, class Layer> inline int64_t blocks_of(const Layer& layer) {
  return (layer.outputs + ROWS - 1) / ROWS;
}

// Calls body(layer, block) for all blocks of ROWS outputs of all layers, which threads share: one that is
// done with its own need not wait in between. While a thread works it has a Setup.
template <int ROWS, class Setup, class A, class Body>
void each_block(const A& a, const Body& body) {
  int64_t count = 0;
  for (int64_t i = 0; i < a.count; i++) count += blocks_of<ROWS>(a.layers[i]);
#pragma omp parallel num_threads(a.threads)
  {
    [[maybe_unused]] const Setup setup;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < count; n++) {
      const auto* layer = a.layers;
      int64_t block = n;
      for (; block >= blocks_of<ROWS>(*layer); layer++) block -= blocks_of<ROWS>(*layer);
      body(*layer, block);
    }
  }
}

}  // namespace
