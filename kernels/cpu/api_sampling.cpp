// The C interface that backends/cpu/native_sampling.py calls: draws and log-probabilities.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine.h"
#include "sampling.h"
#include "token_logprobs.h"

using namespace polychip;

namespace {

template <typename Condition>
std::vector<std::int64_t> rows_where(std::int64_t rows, Condition condition) {
  std::vector<std::int64_t> chosen;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (condition(row)) chosen.push_back(row);
  }
  return chosen;
}

}  // namespace

POLYCHIP_EXPORT void polychip_sample(Engine* engine, const Sample* call) noexcept {
  const std::int64_t rows = call->logits.rows;
  const LogitKernels kernels = logit_kernels(engine->instructions);
  const auto drawn = rows_where(rows, [&](std::int64_t row) { return call->is_drawn(row); });
  const auto summed = rows_where(rows, [&](std::int64_t row) {
    return call->is_drawn(row) && call->has_top_p(row) && !call->has_top_k(row);
  });
  const auto filtered = rows_where(rows, [&](std::int64_t row) {
    return call->is_drawn(row) &&
           (call->has_top_k(row) || call->has_top_p(row) || call->has_min_p(row));
  });
  const LikeliestOfRows likeliest(call->logits, kernels);
  const WeightsOfRows weights(call->logits, kernels, likeliest, call->temperature, summed);
  const FiltersOfRows filters(*call, kernels, likeliest, weights, filtered);
  const RacesOfRows races(*call, kernels, likeliest, filters, drawn);
  const Operation* operations[] = {&likeliest, &weights, &filters, &races};
  engine->pool.run(operations, drawn.empty() ? 1 : 4);
  for (std::int64_t row = 0; row < rows; ++row) {
    call->finite[row] = likeliest.has_softmax(row);
    const bool usable = call->finite[row];
    call->ids[row] = !usable               ? 0
                     : call->is_drawn(row) ? races.winner_of(row)
                                           : likeliest.of(row).id;
  }
}

// False, and nothing is written, if an id is not in the vocabulary.
POLYCHIP_EXPORT bool polychip_token_logprobs(Engine* engine, const TokenLogprobs* call) noexcept {
  const LogitRows& logits = call->logits;
  const auto known = [&](std::int64_t id) { return 0 <= id && id < logits.vocabulary; };
  if (!std::all_of(call->ids, call->ids + logits.rows, known)) return false;
  const LogitKernels kernels = logit_kernels(engine->instructions);
  const LikeliestOfRows likeliest(logits, kernels);
  const WeightsOfRows weights(logits, kernels, likeliest, nullptr, every_row(logits.rows));
  const LogprobsOfRows logprobs(*call, kernels, likeliest, weights);
  const Operation* operations[] = {&likeliest, &weights, &logprobs};
  engine->pool.run(operations, 3);
  return true;
}
