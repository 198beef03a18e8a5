// The kernels of attention.h for one set of instructions: compiled once for each, in the namespace
// POLYCHIP_ISA.

#include <algorithm>
#include <cstring>

#include "attention.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

#include "vectors.inl"

// Pairs of a query and a query head that share a key/value head, computed together.
constexpr int kPairsMax = POLYCHIP_ISA_PAIRS;
constexpr std::int64_t kVectorsMax = kHeadSizeMax / kLanes;
constexpr float kNever = -__builtin_inff();

struct Pair {
  std::int64_t query;  // in its row
  std::int64_t head;
};

// Softmax so far: greatest score, sum of weights relative to it, values weighted alike.
struct Softmax {
  float greatest = kNever;
  float sum = 0.0f;
  Floats values[kVectorsMax];
};

float power_of(float exponent) { return exponential(all_of(exponent))[0]; }

// Sixteen tokens and where their keys and values are; before `first` and from `stop` on there are none.
struct Group {
  std::int64_t position;
  int first, stop;
  const std::byte* keys[kLanes];
  const std::byte* values[kLanes];
};

// The sums of sixteen vectors, in order.
Floats sums_of(const Floats (&vectors)[kLanes]) {
  Floats eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const Floats a = vectors[i], b = vectors[i + 8];
    eight[i] = POLYCHIP_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               POLYCHIP_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Floats a = eight[i], b = eight[i + 4];
    four[i] = POLYCHIP_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              POLYCHIP_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Floats a = four[i], b = four[i + 2];
    two[i] = POLYCHIP_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
             POLYCHIP_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return POLYCHIP_SHUFFLE(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         POLYCHIP_SHUFFLE(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

template <typename T>
Floats product_of(const T* query, const T* key, std::int64_t size) {
  Floats sum = {};
  std::int64_t i = 0;
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      sum = _mm512_dpbf16_ps(sum, load<__m512bh>(query + i), load<__m512bh>(key + i));
    }
  }
#endif
  for (; i + kLanes <= size; i += kLanes) sum += read(query + i) * read(key + i);
  if (i < size) sum += read_some(query + i, size - i) * read_some(key + i, size - i);
  return sum;
}

// kSize: the size of a head where the compiler may know it, else 0.
template <typename T, std::int64_t kSize>
Floats scores_of(const T* query, const Group& group, std::int64_t head, std::int64_t size) {
  const std::int64_t numbers = kSize > 0 ? kSize : size;
  const auto product = [&](int token) {
    return product_of(query, reinterpret_cast<const T*>(group.keys[token]) + head * numbers, numbers);
  };
  Floats products[kLanes];
  if (group.first == 0 && group.stop == kLanes) {
#pragma GCC unroll 16
    for (int token = 0; token < kLanes; ++token) products[token] = product(token);
  } else {
    for (int token = 0; token < kLanes; ++token) {
      const bool there = token >= group.first && token < group.stop;
      products[token] = there ? product(token) : Floats{};
    }
  }
  return sums_of(products);
}

template <typename T>
Floats scores_of(const T* query, const Group& group, std::int64_t head, std::int64_t size) {
  if (size == 64) return scores_of<T, 64>(query, group, head, size);
  if (size == 128) return scores_of<T, 128>(query, group, head, size);
  return scores_of<T, 0>(query, group, head, size);
}

// The greatest of sixteen; a NaN if one is among them.
float greatest_of(Floats values) {
  const auto greater = [](Floats a, Floats b) {
    // Either comparison is false for a NaN.
    return select(a != a, a, select(b <= a, a, b));
  };
  values = greater(values, POLYCHIP_SHUFFLE(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2,
                                                   3, 4, 5, 6, 7));
  values = greater(values, POLYCHIP_SHUFFLE(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14,
                                                   15, 8, 9, 10, 11));
  values = greater(values, POLYCHIP_SHUFFLE(values, values, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9,
                                                   14, 15, 12, 13));
  values = greater(values, POLYCHIP_SHUFFLE(values, values, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10,
                                                   13, 12, 15, 14));
  return values[0];
}

// Adds weights x values of a group to some pairs' values, each vector of a value read once.
template <typename T, int kPairs>
void add_values(Softmax* softmaxes, const float (*weights)[kLanes], const Group& group,
                std::int64_t head, std::int64_t size) {
  for (std::int64_t at = 0, vector = 0; at < size; at += kLanes, ++vector) {
    const std::int64_t count = std::min<std::int64_t>(kLanes, size - at);
    Floats sums[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) sums[pair] = softmaxes[pair].values[vector];
    for (int token = group.first; token < group.stop; ++token) {
      const T* value = reinterpret_cast<const T*>(group.values[token]) + head * size + at;
      const Floats numbers = count == kLanes ? read(value) : read_some(value, count);
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) sums[pair] += numbers * weights[pair][token];
    }
    for (int pair = 0; pair < kPairs; ++pair) softmaxes[pair].values[vector] = sums[pair];
  }
}

template <typename T, int kPairs>
void add_values_of(int pairs, Softmax* softmaxes, const float (*weights)[kLanes], const Group& group,
                   std::int64_t head, std::int64_t size) {
  if (pairs == kPairs) {
    add_values<T, kPairs>(softmaxes, weights, group, head, size);
  } else if constexpr (kPairs > 1) {
    add_values_of<T, kPairs - 1>(pairs, softmaxes, weights, group, head, size);
  }
}

struct Piece {
  const AttentionPlan& plan;
  const AttentionLayer& layer;
  const AttentionPiece& piece;
  const AttentionStep& step;
  std::int64_t vectors;

  template <typename T>
  const T* query_of(const Pair& pair) const {
    const std::int64_t token = step.query_starts[piece.row] + pair.query;
    return static_cast<const T*>(layer.query.numbers) + token * layer.query.outer_stride +
           pair.head * layer.query.inner_stride;
  }

  Group group_at(std::int64_t position, std::int64_t readable, std::int64_t stop) const {
    Group group;
    group.position = position;
    group.first = static_cast<int>(std::max<std::int64_t>(0, readable - position));
    group.stop = static_cast<int>(std::min<std::int64_t>(kLanes, stop - position));
    const std::int64_t* table = step.block_tables + piece.row * step.table_width;
    const std::int64_t token_bytes =
        step.kv_heads * step.head_size * static_cast<std::int64_t>(bytes_of(step.number));
    for (int token = group.first; token < group.stop; ++token) {
      const std::int64_t place = position + token - step.table_starts[piece.row];
      const std::int64_t offset = table[place / step.block_tokens] * step.block_bytes +
                                  place % step.block_tokens * token_bytes;
      group.keys[token] = layer.keys + offset;
      group.values[token] = layer.values + offset;
    }
    return group;
  }

  // The weights of a group for one pair, its softmax brought to them. False if it sees none of it.
  template <typename T>
  bool weigh(const Pair& pair, const Group& group, std::int64_t kv_head, Softmax& softmax,
             float (&weights)[kLanes]) const {
    const std::int64_t own = step.context_starts[piece.row] + pair.query;
    const int first = static_cast<int>(std::clamp<std::int64_t>(
        oldest_seen(step, piece.row, pair.query) - group.position, group.first, kLanes));
    const int stop = static_cast<int>(
        std::clamp<std::int64_t>(own + 1 - group.position, 0, group.stop));
    if (first >= stop) return false;
    Floats scores = scores_of(query_of<T>(pair), group, kv_head, step.head_size) * step.scale;
    if (step.soft_cap > 0.0f) scores = step.soft_cap * hyperbolic_tangent(scores / step.soft_cap);
    static constexpr std::int32_t kNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
    const Ints numbers = load<Ints>(kNumbers);
    const Ints seen = (numbers >= first) & (numbers < stop);
    scores = select(seen, scores, all_of(kNever));
    const float highest = greatest_of(scores);
    // Not std::max: a NaN has to win.
    const float greatest = highest <= softmax.greatest ? softmax.greatest : highest;
    if (greatest == kNever) return false;
    const Floats powers = select(seen, exponential(scores - greatest), Floats{});
    if (greatest != softmax.greatest) {
      const float shrunk = power_of(softmax.greatest - greatest);
      softmax.sum *= shrunk;
      for (std::int64_t i = 0; i < vectors; ++i) softmax.values[i] *= shrunk;
      softmax.greatest = greatest;
    }
    softmax.sum += sum_of(powers);
    write(weights, powers);
    return true;
  }

  // The softmax of some pairs over one part, from nothing.
  template <typename T>
  void compute_part(const Pair* pairs, int count, std::int64_t kv_head, std::int64_t from,
                    std::int64_t stop, Softmax* softmaxes) const {
    for (int pair = 0; pair < count; ++pair) {
      softmaxes[pair].greatest = kNever;
      softmaxes[pair].sum = 0.0f;
      for (std::int64_t i = 0; i < vectors; ++i) softmaxes[pair].values[i] = Floats{};
    }
    // What none of the queries sees is not read: it may be anything.
    const std::int64_t readable =
        std::max(step.table_starts[piece.row], oldest_seen(step, piece.row, piece.first_query));
    float weights[kPairsMax][kLanes];
    for (std::int64_t position = from; position < stop; position += kLanes) {
      const Group group = group_at(position, readable, stop);
      if (group.first >= group.stop) continue;
      bool any = false;
      for (int pair = 0; pair < count; ++pair) {
        if (weigh<T>(pairs[pair], group, kv_head, softmaxes[pair], weights[pair])) {
          any = true;
        } else {
          std::memset(weights[pair], 0, sizeof(weights[pair]));
        }
      }
      if (any) {
        add_values_of<T, kPairsMax>(count, softmaxes, weights, group, kv_head, step.head_size);
      }
    }
  }

  template <typename T>
  void compute(const Pair* pairs, int count, std::int64_t kv_head) const;
  template <typename T>
  void put(const Pair& pair, const Softmax& softmax) const;
  void keep(const Pair& pair, const Softmax& softmax) const;
};

// Not inlined: at all places the same multiplications are to be one with their additions.
__attribute__((noinline)) void merge_into(Softmax& all, const Softmax& part, std::int64_t vectors) {
  if (part.greatest == kNever) return;
  const float greatest = part.greatest <= all.greatest ? all.greatest : part.greatest;
  const float own = power_of(all.greatest - greatest), its = power_of(part.greatest - greatest);
  all.sum = all.sum * own + part.sum * its;
  for (std::int64_t i = 0; i < vectors; ++i) {
    all.values[i] = all.values[i] * own + part.values[i] * its;
  }
  all.greatest = greatest;
}

template <typename T>
void put_output(const AttentionLayer& layer, std::int64_t token, std::int64_t head,
                std::int64_t size, const Softmax& softmax) {
  T* output = static_cast<T*>(layer.output.numbers) + token * layer.output.outer_stride +
              head * layer.output.inner_stride;
  for (std::int64_t at = 0, vector = 0; at < size; at += kLanes, ++vector) {
    const Floats numbers = softmax.values[vector] / softmax.sum;
    if (size - at >= kLanes) {
      write(output + at, numbers);
    } else {
      write_some(output + at, numbers, size - at);
    }
  }
}

template <typename T>
void Piece::put(const Pair& pair, const Softmax& softmax) const {
  put_output<T>(layer, step.query_starts[piece.row] + pair.query, pair.head, step.head_size, softmax);
}

void Piece::keep(const Pair& pair, const Softmax& softmax) const {
  float* kept = plan.partial(piece.partial) + pair.head * (2 + step.head_size);
  kept[0] = softmax.greatest;
  kept[1] = softmax.sum;
  std::memcpy(kept + 2, softmax.values, static_cast<std::size_t>(step.head_size) * sizeof(float));
}

template <typename T>
void Piece::compute(const Pair* pairs, int count, std::int64_t kv_head) const {
  Softmax parts[kPairsMax];
  if (piece.partial >= 0) {
    compute_part<T>(pairs, count, kv_head, piece.first_token, piece.stop_token, parts);
    for (int pair = 0; pair < count; ++pair) keep(pairs[pair], parts[pair]);
    return;
  }
  Softmax all[kPairsMax];
  for (int pair = 0; pair < count; ++pair) {
    for (std::int64_t i = 0; i < vectors; ++i) all[pair].values[i] = Floats{};
  }
  for (std::int64_t from = piece.first_token; from < piece.stop_token; from += kPartTokens) {
    const std::int64_t stop = std::min(from + kPartTokens, piece.stop_token);
    compute_part<T>(pairs, count, kv_head, from, stop, parts);
    for (int pair = 0; pair < count; ++pair) merge_into(all[pair], parts[pair], vectors);
  }
  for (int pair = 0; pair < count; ++pair) put<T>(pairs[pair], all[pair]);
}

template <typename T>
void compute_piece(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index) {
  const AttentionStep& step = plan.step();
  const AttentionPiece& piece = plan.pieces()[static_cast<std::size_t>(index)];
  const Piece work{plan, layer, piece, step, (step.head_size + kLanes - 1) / kLanes};
  Pair pairs[kPairsMax];
  for (std::int64_t kv_head = 0; kv_head < step.kv_heads; ++kv_head) {
    int count = 0;
    const auto flush = [&] {
      if (count > 0) work.compute<T>(pairs, count, kv_head);
      count = 0;
    };
    for (std::int64_t query = piece.first_query; query < piece.first_query + piece.queries; ++query) {
      for (const std::int64_t head : plan.heads()[static_cast<std::size_t>(kv_head)]) {
        pairs[count++] = {query, head};
        if (count == kPairsMax) flush();
      }
    }
    flush();
  }
}

template <typename T>
void merge_row(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index) {
  const AttentionStep& step = plan.step();
  const AttentionPlan::Merged& row = plan.merged()[static_cast<std::size_t>(index)];
  const std::int64_t vectors = (step.head_size + kLanes - 1) / kLanes;
  for (std::int64_t head = 0; head < step.query_heads; ++head) {
    Softmax all, part;
    for (std::int64_t i = 0; i < vectors; ++i) all.values[i] = part.values[i] = Floats{};
    for (std::int64_t number = 0; number < row.partials; ++number) {
      const float* kept = plan.partial(row.first_partial + number) + head * (2 + step.head_size);
      part.greatest = kept[0];
      part.sum = kept[1];
      std::memcpy(part.values, kept + 2, static_cast<std::size_t>(step.head_size) * sizeof(float));
      merge_into(all, part, vectors);
    }
    put_output<T>(layer, row.token, head, step.head_size, all);
  }
}

void piece(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    compute_piece<float>(plan, layer, index);
  } else {
    compute_piece<std::uint16_t>(plan, layer, index);
  }
}

void merge(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    merge_row<float>(plan, layer, index);
  } else {
    merge_row<std::uint16_t>(plan, layer, index);
  }
}

}  // namespace

const AttentionKernels kAttentionKernels = {piece, merge};

}  // namespace POLYCHIP_ISA
}  // namespace polychip
