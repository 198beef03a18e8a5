// What the exported functions share: the threads of a chip and where its weights are put.
#pragma once

#include "instructions.h"
#include "operation.h"
#include "packed_matrix.h"
#include "program.h"
#include "quantized.h"
#include "thread_pool.h"

#define POLYCHIP_EXPORT extern "C" __attribute__((visibility("default")))

struct Engine {
  polychip::ThreadPool pool;
  polychip::PanelMemory memory;
  polychip::Instructions instructions;
  polychip::ActivationMemory activations = {};
  polychip::Program* recording = nullptr;  // what is asked for is added to it instead of computed
};

// One after the other, now or whenever the program runs that is being recorded.
template <typename... T>
void compute(Engine* engine, const T&... operations) {
  if (engine->recording != nullptr) {
    (engine->recording->add(operations), ...);
    return;
  }
  const polychip::Operation* list[] = {&operations...};
  engine->pool.run(list, sizeof...(operations));
}
