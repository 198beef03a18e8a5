// The kernels of rows.h for one set of instructions: compiled once for each, in the namespace
// POLYCHIP_ISA.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

#include "vectors.inl"

// Calls `body` with a pointer type to the kind of number.
template <typename Body>
void with_kind(Number number, Body body) {
  if (number == Number::kFloat32) {
    body(static_cast<float*>(nullptr));
  } else {
    body(static_cast<std::uint16_t*>(nullptr));
  }
}

template <typename T>
T* row_of(const Rows& rows, std::int64_t outer, std::int64_t inner = 0) {
  return static_cast<T*>(rows.numbers) + outer * rows.outer_stride + inner * rows.inner_stride;
}

// Calls `whole(i)` for each sixteen of `size` numbers and `rest(i, count)` for what is left.
template <typename Whole, typename Rest>
void each_vector(std::int64_t size, Whole whole, Rest rest) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) whole(i);
  if (i < size) rest(i, size - i);
}

float scale_of(float squares, std::int64_t size, float epsilon) {
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
}

template <typename In, typename Weight, typename Out>
void normalize(const In* input, const Weight* weight, float scale, Out* output, std::int64_t size) {
  each_vector(
      size, [&](std::int64_t i) { write(output + i, read(input + i) * scale * read(weight + i)); },
      [&](std::int64_t i, std::int64_t count) {
        const Floats x = read_some(input + i, count) * scale * read_some(weight + i, count);
        write_some(output + i, x, count);
      });
}

void lookup(const Lookup& call, std::int64_t first, std::int64_t stop) {
  with_kind(call.number, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    for (std::int64_t outer = first; outer < stop; ++outer) {
      T* output = row_of<T>(call.output, outer);
      const std::int64_t id = call.ids[outer], row = id - call.first_row;
      if (id < call.first_row || row >= call.table_rows) {
        std::fill_n(output, call.size, T{0});
        continue;
      }
      if (call.weight != nullptr) {
        call.weight->read(row, output);
      } else {
        std::copy_n(row_of<T>(call.table, row), call.size, output);
      }
      if (call.scale == 1.0f) continue;
      each_vector(
          call.size, [&](std::int64_t i) { write(output + i, read(output + i) * call.scale); },
          [&](std::int64_t i, std::int64_t count) {
            write_some(output + i, read_some(output + i, count) * call.scale, count);
          });
    }
  });
}

void rms_norm(const RmsNorm& call, std::int64_t first, std::int64_t stop) {
  with_kind(call.number, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    for (std::int64_t outer = first; outer < stop; ++outer) {
      for (std::int64_t inner = 0; inner < call.inner; ++inner) {
        const T* input = row_of<T>(call.input, outer, inner);
        Floats squares = {};
        each_vector(
            call.size,
            [&](std::int64_t i) {
              const Floats x = read(input + i);
              squares += x * x;
            },
            [&](std::int64_t i, std::int64_t count) {
              const Floats x = read_some(input + i, count);
              squares += x * x;
            });
        normalize(input, static_cast<const T*>(call.weight),
                  scale_of(sum_of(squares), call.size, call.epsilon),
                  row_of<T>(call.output, outer, inner), call.size);
      }
    }
  });
}

void add_rms_norm(const AddRmsNorm& call, std::int64_t first, std::int64_t stop) {
  with_kind(call.number, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    with_kind(call.residual_number, [&](auto* residual_kind) {
      using R = std::remove_pointer_t<decltype(residual_kind)>;
      for (std::int64_t outer = first; outer < stop; ++outer) {
        const T* input = row_of<T>(call.input, outer);
        const R* residual = row_of<R>(call.residual, outer);
        float* total = row_of<float>(call.total, outer);
        Floats squares = {};
        each_vector(
            call.size,
            [&](std::int64_t i) {
              const Floats x = read(residual + i) + read(input + i);
              squares += x * x;
              write(total + i, x);
            },
            [&](std::int64_t i, std::int64_t count) {
              const Floats x = read_some(residual + i, count) + read_some(input + i, count);
              squares += x * x;
              write_some(total + i, x, count);
            });
        normalize(total, static_cast<const T*>(call.weight),
                  scale_of(sum_of(squares), call.size, call.epsilon),
                  row_of<T>(call.output, outer), call.size);
      }
    });
  });
}

void rotary(const Rotary& call, std::int64_t first, std::int64_t stop) {
  with_kind(call.number, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const std::int64_t half = call.size / 2;
    for (std::int64_t outer = first; outer < stop; ++outer) {
      const float* cosines = call.angles + call.positions[outer] * call.size;
      const float* sines = cosines + half;
      for (std::int64_t inner = 0; inner < call.inner; ++inner) {
        const T* input = row_of<T>(call.input, outer, inner);
        T* output = row_of<T>(call.output, outer, inner);
        each_vector(
            half,
            [&](std::int64_t i) {
              const Floats x = read(input + i), y = read(input + half + i);
              const Floats cosine = read(cosines + i), sine = read(sines + i);
              write(output + i, x * cosine - y * sine);
              write(output + half + i, y * cosine + x * sine);
            },
            [&](std::int64_t i, std::int64_t count) {
              const Floats x = read_some(input + i, count);
              const Floats y = read_some(input + half + i, count);
              const Floats cosine = read_some(cosines + i, count);
              const Floats sine = read_some(sines + i, count);
              write_some(output + i, x * cosine - y * sine, count);
              write_some(output + half + i, y * cosine + x * sine, count);
            });
      }
    }
  });
}

RegisterFloats silu(RegisterFloats x) { return x / (1.0f + exponential(-x)); }

RegisterFloats gelu(RegisterFloats x) {
  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
}

template <typename T, typename Function>
void activate(const T* gate, const T* up, T* output, std::int64_t size, Function function) {
  each_vector(
      size,
      [&](std::int64_t i) {
        write(output + i, by_register(read(gate + i), function) * read(up + i));
      },
      [&](std::int64_t i, std::int64_t count) {
        const Floats x = by_register(read_some(gate + i, count), function);
        write_some(output + i, x * read_some(up + i, count), count);
      });
}

void gated_activation(const GatedActivation& call, std::int64_t first, std::int64_t stop) {
  with_kind(call.number, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    for (std::int64_t outer = first; outer < stop; ++outer) {
      const T* gate = row_of<T>(call.input, outer);
      T* output = row_of<T>(call.output, outer);
      if (call.activation == Activation::kSilu) {
        activate(gate, gate + call.size, output, call.size, silu);
      } else {
        activate(gate, gate + call.size, output, call.size, gelu);
      }
    }
  });
}

void write_kv(const WriteKV& call, std::int64_t first, std::int64_t stop) {
  const auto row_bytes = static_cast<std::size_t>(call.size) * bytes_of(call.number);
  const auto heads = static_cast<std::size_t>(call.inner);
  const auto put = [&](const Rows& rows, std::byte* cached, std::int64_t outer) {
    std::byte* target = cached + call.blocks[outer] * call.block_bytes +
                        static_cast<std::size_t>(call.places[outer]) * heads * row_bytes;
    for (std::int64_t inner = 0; inner < call.inner; ++inner, target += row_bytes) {
      const std::int64_t at = outer * rows.outer_stride + inner * rows.inner_stride;
      std::memcpy(target,
                  static_cast<const std::byte*>(rows.numbers) +
                      static_cast<std::size_t>(at) * bytes_of(call.number),
                  row_bytes);
    }
  };
  for (std::int64_t outer = first; outer < stop; ++outer) {
    put(call.keys, call.cached_keys, outer);
    put(call.values, call.cached_values, outer);
  }
}

}  // namespace

const RowKernels kRowKernels = {lookup, rms_norm, add_rms_norm, rotary, gated_activation, write_kv};

}  // namespace POLYCHIP_ISA
}  // namespace polychip
