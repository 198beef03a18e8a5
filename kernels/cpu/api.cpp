// The C interface that backends/cpu calls; see kernels/library.py. Whoever gets a pointer frees it.
#include <cstddef>
#include <exception>
#include <memory>
#include <new>

#include "attention.h"
#include "engine.h"
#include "linear.h"
#include "probe.h"
#include "quantized.h"
#include "rows.h"

using namespace polychip;

// Changes with this interface.
constexpr std::int32_t kVersion = 6;

POLYCHIP_EXPORT std::int32_t polychip_kernels_version() noexcept { return kVersion; }

// An Instructions.
POLYCHIP_EXPORT std::int32_t polychip_best_instructions() noexcept {
  return static_cast<std::int32_t>(best_instructions());
}

// False if there is no memory or there are no threads for it.
POLYCHIP_EXPORT bool polychip_probe_machine(Probe* probe) noexcept {
  try {
    *probe = probe_machine();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Null if there are no threads to be had. instructions: an Instructions, not above the best.
POLYCHIP_EXPORT Engine* polychip_engine_open(std::int32_t threads, std::int64_t spin_ns,
                                             std::int32_t instructions) noexcept {
  try {
    return new Engine{{threads, spin_ns}, PanelMemory(threads),
                      static_cast<Instructions>(instructions)};
  } catch (const std::exception&) {
    return nullptr;
  }
}

POLYCHIP_EXPORT void polychip_engine_free(Engine* engine) noexcept { delete engine; }

POLYCHIP_EXPORT Program* polychip_program_make() noexcept { return new Program(); }

POLYCHIP_EXPORT void polychip_program_free(Program* program) noexcept { delete program; }

// From now on operations are added to `program`, and not computed, until it is null. What they read and
// write must stay as long as the program.
POLYCHIP_EXPORT void polychip_record(Engine* engine, Program* program) noexcept {
  engine->recording = program;
}

// See Program::add_call. `context` must stay as long as the program; `function` may throw nothing.
POLYCHIP_EXPORT void polychip_program_call(Program* program, CallFunction function,
                                           void* context) noexcept {
  program->add_call(function, context);
}

// See Program::run.
POLYCHIP_EXPORT std::int32_t polychip_program_run(Engine* engine, const Program* program,
                                                  std::int32_t calls_done) noexcept {
  return program->run(engine->pool, calls_done);
}

// Null if there is no memory. number: a Number. form: a Form.
POLYCHIP_EXPORT PackedMatrix* polychip_matrix_make(Engine* engine, std::int32_t number,
                                                   std::int32_t form, std::int64_t rows,
                                                   std::int64_t columns) noexcept {
  try {
    return PackedMatrix::make(engine->memory, static_cast<Number>(number), static_cast<Form>(form),
                              rows, columns)
        .release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

POLYCHIP_EXPORT void polychip_matrix_free(PackedMatrix* matrix) noexcept { delete matrix; }

// At once, whether or not a program is being recorded; so does whatever writes a matrix.
template <typename Write>
static void write_panels(Engine* engine, std::int64_t first, std::int64_t count, Write write) {
  const PanelByPanel operation(first, count, write);
  const Operation* list[] = {&operation};
  engine->pool.run(list, 1);
}

// source: of rows one after the other, of the matrix's kind of number; float32 for one of kQ8_0.
POLYCHIP_EXPORT void polychip_matrix_write(Engine* engine, PackedMatrix* matrix, std::int64_t first,
                                           std::int64_t count, const std::byte* source) noexcept {
  const Number number = matrix->form() == Form::kPlain ? matrix->number() : Number::kFloat32;
  const auto row_bytes = matrix->columns() * static_cast<std::int64_t>(bytes_of(number));
  write_panels(engine, first, count, [=](std::int64_t row, std::int64_t end) {
    matrix->write(row, end - row, source + (row - first) * row_bytes, matrix->columns());
  });
}

// type: a Form, whose blocks they are.
POLYCHIP_EXPORT void polychip_matrix_write_blocks(Engine* engine, PackedMatrix* matrix,
                                                  std::int32_t type, std::int64_t first,
                                                  std::int64_t count,
                                                  const std::byte* blocks) noexcept {
  const auto form = static_cast<Form>(type);
  const std::int64_t row_bytes =
      matrix->columns() / kGroupColumns * static_cast<std::int64_t>(block_bytes(form));
  write_panels(engine, first, count, [=](std::int64_t row, std::int64_t end) {
    matrix->write_blocks(form, row, end - row, blocks + (row - first) * row_bytes);
  });
}

// Rows by their numbers, one after the other into `target`.
POLYCHIP_EXPORT void polychip_matrix_read(const PackedMatrix* matrix, const std::int64_t* rows,
                                          std::int64_t count, void* target) noexcept {
  auto* next = static_cast<std::byte*>(target);
  const std::size_t row_bytes =
      static_cast<std::size_t>(matrix->columns()) * bytes_of(matrix->number());
  for (std::int64_t i = 0; i < count; ++i, next += row_bytes) matrix->read(rows[i], next);
}

POLYCHIP_EXPORT void polychip_linear(Engine* engine, const Product* product) noexcept {
  if (product->weight->form() != Form::kPlain) {
    engine->activations.reserve(product->rows, product->weight->padded_columns() / kGroupColumns);
    const QuantizedKernels kernels = quantized_kernels(engine->instructions);
    compute(engine, QuantizeRows(*product, engine->activations, kernels),
            QuantizedLinear(*product, engine->activations, kernels));
    return;
  }
  compute(engine, Linear(*product, panel_kernel(product->weight->number(), engine->instructions)));
}

POLYCHIP_EXPORT void polychip_lookup(Engine* engine, const Lookup* call) noexcept {
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).lookup));
}

POLYCHIP_EXPORT void polychip_rms_norm(Engine* engine, const RmsNorm* call) noexcept {
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).rms_norm));
}

POLYCHIP_EXPORT void polychip_add_rms_norm(Engine* engine, const AddRmsNorm* call) noexcept {
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).add_rms_norm));
}

POLYCHIP_EXPORT void polychip_rotary(Engine* engine, const Rotary* call) noexcept {
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).rotary));
}

POLYCHIP_EXPORT void polychip_gated_activation(Engine* engine,
                                               const GatedActivation* call) noexcept {
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).gated_activation));
}

// False, and nothing is written, if a token's place is not in the cache.
POLYCHIP_EXPORT bool polychip_write_kv(Engine* engine, const WriteKV* call) noexcept {
  for (std::int64_t token = 0; token < call->outer; ++token) {
    const std::int64_t block = call->blocks[token], place = call->places[token];
    if (block < 0 || block >= call->blocks_count) return false;
    if (place < 0 || place >= call->block_tokens) return false;
  }
  compute(engine, RowOperation(*call, row_kernels(engine->instructions).write_kv));
  return true;
}

static AttentionPlan planned(const Engine& engine, const AttentionStep& step) {
  const auto tile_tokens = attention_kernels(engine.instructions, step.number).tile_tokens;
  return {step, tile_tokens, engine.pool.threads()};
}

// What `step` points to must stay until the plan is freed. Null if it names a block that is not there.
POLYCHIP_EXPORT AttentionPlan* polychip_attention_plan(const Engine* engine,
                                                       const AttentionStep* step) noexcept {
  auto plan = std::make_unique<AttentionPlan>(planned(*engine, *step));
  return plan->within_blocks() ? plan.release() : nullptr;
}

// The same plan for another step, whose layers differ in nothing; programs go on using it. False if the
// step names a block that is not there: the plan must then not be used.
POLYCHIP_EXPORT bool polychip_attention_plan_renew(const Engine* engine, AttentionPlan* plan,
                                                   const AttentionStep* step) noexcept {
  *plan = planned(*engine, *step);
  return plan->within_blocks();
}

POLYCHIP_EXPORT std::int64_t polychip_attention_plan_tokens_spared(
    const AttentionPlan* plan) noexcept {
  return plan->tokens_spared();
}

POLYCHIP_EXPORT void polychip_attention_plan_free(AttentionPlan* plan) noexcept { delete plan; }

POLYCHIP_EXPORT void polychip_attention(Engine* engine, const AttentionPlan* plan,
                                        const AttentionLayer* layer) noexcept {
  const AttentionKernels kernels = attention_kernels(engine->instructions, plan->step().number);
  const AttentionPass &shared = plan->shared(), &own = plan->own();
  compute(engine, AttentionPieces(*plan, shared, *layer, kernels),
          AttentionMerge(*plan, shared, *layer, kernels),
          AttentionPieces(*plan, own, *layer, kernels), AttentionMerge(*plan, own, *layer, kernels));
}
