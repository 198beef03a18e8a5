// What all forms of attention.h have in common. Included by each set of kernels inside its own
// namespace, behind vectors.inl and definitions of
//
//   POLYCHIP_ISA_WIDTH  numbers in a register
//   kTileTokens         of a tile
//   kPairsAtOnce        whose scores of a tile are computed together; at most kGroupPairs
//
// A form says how operands are packed, and multiplies them:
//
//   Source      of the cache, and of a right operand: keys, values
//   Left        of a left operand: queries, weights
//   kDepth      of a right operand [depth / kDepth][columns][kDepth]
//   kDepthStep  what it multiplies at a time: depths are padded to multiples of it
//   Registers   what it needs to have while it multiplies

#include "attention_softmax.inl"

// Columns of packed keys from one depth to the next: not a power of two, for a cache has few places for
// lines whose addresses end alike.
constexpr std::int64_t kKeyColumns = kTileTokens + 16;

// sums [rows][columns] = left [rows][depth] . right [depth][columns]
template <typename Left, typename Source>
struct Factors {
  const Left* left;
  std::int64_t left_stride;
  const Source* right;
  std::int64_t right_columns;  // from one depth to the next
  std::int64_t rows, depth, columns;
  float* sums;
  std::int64_t sums_stride;
};

template <typename Left, typename Source>
struct alignas(64) Scratch {
  Left query[kPieceNumbersMax];
  Source keys[kHeadSizeMax * kKeyColumns];
  Source values[kTileTokens * kHeadSizeMax];
  Left weights[kPairsAtOnce * kTileTokens];
  // Of all tiles so far.
  float greatest[kPiecePairsMax];
  float sums[kPiecePairsMax * kSumParts];
  float output[kPieceNumbersMax];
  // Of one tile and a group; what is in two places is needed while it is computed for the next group.
  float scores[2][kPairsAtOnce * kTileTokens];
  float tile_greatest[2][kPairsAtOnce];
  float tile_sums[2][kPairsAtOnce * kSumParts];
  float tile_output[kPairsAtOnce * kHeadSizeMax];
};

typedef std::uint32_t Four __attribute__((vector_size(16)));

inline void transpose(Four (&lines)[4]) {
#if defined(__clang__)
#define POLYCHIP_SHUFFLE_FOUR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define POLYCHIP_SHUFFLE_FOUR(a, b, ...) __builtin_shuffle(a, b, Four{__VA_ARGS__})
#endif
  const Four a = POLYCHIP_SHUFFLE_FOUR(lines[0], lines[1], 0, 4, 1, 5);
  const Four b = POLYCHIP_SHUFFLE_FOUR(lines[2], lines[3], 0, 4, 1, 5);
  const Four c = POLYCHIP_SHUFFLE_FOUR(lines[0], lines[1], 2, 6, 3, 7);
  const Four d = POLYCHIP_SHUFFLE_FOUR(lines[2], lines[3], 2, 6, 3, 7);
  lines[0] = POLYCHIP_SHUFFLE_FOUR(a, b, 0, 1, 4, 5);
  lines[1] = POLYCHIP_SHUFFLE_FOUR(a, b, 2, 3, 6, 7);
  lines[2] = POLYCHIP_SHUFFLE_FOUR(c, d, 0, 1, 4, 5);
  lines[3] = POLYCHIP_SHUFFLE_FOUR(c, d, 2, 3, 6, 7);
#undef POLYCHIP_SHUFFLE_FOUR
}

// The cache's bfloat16, a word of which is a pair of one column.
struct PairedSource {
  using Source = std::uint16_t;
  static constexpr std::int64_t kDepth = 2;

  // Two tokens': a number of the one, then that of the other.
  static void pack_values(const Source* const* values, std::int64_t size, Source* to) {
    std::int64_t at = 0;
    for (; at + kWidth <= size; at += kWidth) {
      const RegisterBits both = in_words(values[0] + at) | in_words(values[1] + at) << 16;
      std::memcpy(to + 2 * at, &both, sizeof(both));
    }
    for (; at < size; ++at) {
      to[2 * at] = values[0][at];
      to[2 * at + 1] = values[1][at];
    }
  }
};

// One in its thread's scratch. Queries and outputs are `columns` numbers apart, scores and weights
// kTileTokens.
template <typename Form>
class Piece {
 public:
  using Source = typename Form::Source;
  using Left = typename Form::Left;

  Piece(const AttentionPlan& plan, const AttentionLayer& layer, const AttentionPiece& piece)
      : plan_(plan),
        step_(plan.step()),
        layer_(layer),
        piece_(piece),
        heads_(plan.heads()[static_cast<std::size_t>(piece.kv_head)]),
        columns_(plan.columns()),
        scratch_(*new (scratch_of_thread(sizeof(Operands))) Operands) {}

  // following: what this thread will most likely compute next, or null.
  void compute(const AttentionPiece* following) {
    [[maybe_unused]] const typename Form::Registers registers{};
    begin();
    if (piece_.partial < 0) take_up();
    Tokens located[2];
    locate(piece_, piece_.first_token, located[0]);
    int place = 0;
    for (std::int64_t tile = piece_.first_token; tile < piece_.stop_token; tile += kTileTokens) {
      const Tokens* next = &located[1 - place];
      if (tile + kTileTokens < piece_.stop_token) {
        locate(piece_, tile + kTileTokens, located[1 - place]);
      } else if (following != nullptr) {
        locate(*following, following->first_token, located[1 - place]);
      } else {
        next = nullptr;
      }
      pack(located[place], next);
      attend(tile);
      place = 1 - place;
    }
    if (piece_.partial < 0) put_result();
  }

  // What its parts kept becomes the result.
  void merge() {
    clear();
    take_up();
    const std::int64_t tokens = piece_.stop_token - piece_.first_token;
    for (std::int64_t tile = 0; tile * kTileTokens < tokens; ++tile) {
      for (std::int64_t pair = 0; pair < piece_.pairs; pair += kPairsAtOnce) {
        const std::int64_t pairs = std::min(kPairsAtOnce, piece_.pairs - pair);
        merge_into(so_far(pair), kept(tile, pair), pairs, columns_);
      }
    }
    put_result();
  }

 private:
  using Operands = Scratch<Left, Source>;

  // Pairs whose scores of a tile are computed together, and the steps of its tokens that they see.
  struct Group {
    std::int64_t first, pairs;
    Span span;
    std::int64_t place;
  };

  // Where keys and values of a tile's tokens are, and which of them a piece sees.
  struct Tokens {
    Span seen;
    const Source* keys[kTileTokens];
    const Source* values[kTileTokens];
  };

  std::int64_t query_of(const AttentionPiece& piece, std::int64_t pair) const {
    const auto& heads = plan_.heads()[static_cast<std::size_t>(piece.kv_head)];
    return (piece.first_pair + pair) / static_cast<std::int64_t>(heads.size());
  }
  // Tokens of a tile that pairs see, the last ones none before those of the first ones.
  Span seen_by(const AttentionPiece& piece, std::int64_t tile, std::int64_t first_pair,
               std::int64_t last_pair) const {
    return {seen_by_query(piece.row, tile, query_of(piece, first_pair)).first,
            seen_by_query(piece.row, tile, query_of(piece, last_pair)).stop};
  }
  // What rows share each of their queries sees whole, so any number is right for it.
  Span seen_by_query(std::int64_t row, std::int64_t tile, std::int64_t query) const {
    const std::int64_t stop = step_.context_starts[row] + query + 1;
    return {std::clamp<std::int64_t>(oldest_seen(step_, row, query) - tile, 0, kTileTokens),
            std::clamp<std::int64_t>(stop - tile, 0, kTileTokens)};
  }
  static Span in_steps(Span span) {
    return {span.first / kTileStep * kTileStep, rounded_up(span.stop, kTileStep)};
  }
  std::int64_t head_of(std::int64_t pair) const {
    const auto number = static_cast<std::size_t>(piece_.first_pair + pair) % heads_.size();
    return heads_[number];
  }
  template <typename T>
  T* numbers_of(const Rows& rows, std::int64_t pair) const {
    const std::int64_t token = plan_.token_of(piece_, query_of(piece_, pair));
    return static_cast<T*>(rows.numbers) + token * rows.outer_stride +
           head_of(pair) * rows.inner_stride;
  }

  Softmaxes so_far(std::int64_t pair) {
    return {scratch_.greatest + pair, scratch_.sums + pair * kSumParts,
            scratch_.output + pair * columns_};
  }
  Softmaxes kept(std::int64_t tile, std::int64_t pair) const {
    float* greatest = plan_.partial(piece_, tile);
    float* sums = greatest + kGroupPairs;
    float* values = sums + piece_.pairs * kSumParts;
    return {greatest + pair, sums + pair * kSumParts, values + pair * columns_};
  }

  void keep(const Softmaxes& from, const Softmaxes& to, std::int64_t count) const {
    const auto pairs = static_cast<std::size_t>(count);
    std::memcpy(to.greatest, from.greatest, kPairsAtOnce * sizeof(float));
    std::memcpy(to.sums, from.sums, pairs * kSumParts * sizeof(float));
    std::memcpy(to.values, from.values, pairs * static_cast<std::size_t>(columns_) * sizeof(float));
  }

  void clear() {
    const auto pairs = static_cast<std::size_t>(rounded_up(piece_.pairs, kGroupPairs));
    std::fill_n(scratch_.greatest, pairs, kNever);
    std::memset(scratch_.sums, 0, pairs * kSumParts * sizeof(float));
    std::memset(scratch_.output, 0, pairs * static_cast<std::size_t>(columns_) * sizeof(float));
  }

  // Goes on from what rows shared, if they did.
  void take_up() {
    if (piece_.prefix < 0 && plan_.behind_prefix(piece_.row, 0) != nullptr) {
      each_behind([](float* behind, float* own, std::int64_t count) { copy(behind, own, count); });
    }
  }

  // The piece's softmaxes, which are over all that its pairs see or over what rows share.
  void put_result() {
    if (piece_.prefix < 0) {
      put_output();
    } else {
      each_behind([](float* behind, float* own, std::int64_t count) { copy(own, behind, count); });
    }
  }

  static void copy(const float* from, float* to, std::int64_t count) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }

  // Calls `move` for what is behind a prefix of each pair, and for the pair's own.
  template <typename Move>
  void each_behind(Move move) {
    for (std::int64_t pair = 0; pair < piece_.pairs; ++pair) {
      float* behind =
          plan_.behind_prefix(plan_.row_of(piece_, query_of(piece_, pair)), head_of(pair));
      const Softmaxes own = so_far(pair);
      move(behind, own.greatest, 1);
      move(behind + 1, own.sums, kSumParts);
      move(behind + 1 + kSumParts, own.values, columns_);
    }
  }

  void begin() {
    clear();
    const auto pairs = static_cast<std::size_t>(rounded_up(piece_.pairs, kTilePairs));
    std::memset(scratch_.query, 0, pairs * static_cast<std::size_t>(columns_) * sizeof(Left));
    // Packing leaves as it is what keys are padded with. What values are padded with is not looked at.
    const std::int64_t whole = step_.head_size / Form::kDepth * Form::kDepth;
    const std::int64_t padding = rounded_up(step_.head_size, Form::kDepthStep) - whole;
    std::memset(scratch_.keys + whole * kKeyColumns, 0,
                static_cast<std::size_t>(padding * kKeyColumns) * sizeof(Source));
    for (std::int64_t pair = 0; pair < piece_.pairs; ++pair) {
      Form::pack_query(numbers_of<const Source>(layer_.query, pair), step_.head_size,
                       scratch_.query + pair * columns_);
    }
  }

  // Where keys and values are of those tokens of a tile that a piece sees; zeros beside them.
  void locate(const AttentionPiece& piece, std::int64_t tile, Tokens& found) const {
    alignas(64) static constexpr Source kNothing[kHeadSizeMax] = {};
    found.seen = seen_by(piece, tile, 0, piece.pairs - 1);
    for (const Source** lines : {found.keys, found.values}) {
      std::fill(lines, lines + found.seen.first, kNothing);
      std::fill(lines + found.seen.stop, lines + kTileTokens, kNothing);
    }
    const std::int64_t* table = step_.block_tables + piece.row * step_.table_width;
    const std::int64_t first = tile + found.seen.first - step_.table_starts[piece.row];
    std::int64_t block = first / step_.block_tokens, place = first % step_.block_tokens;
    for (std::int64_t token = found.seen.first; token < found.seen.stop; ++token, ++place) {
      if (place == step_.block_tokens) {
        ++block;
        place = 0;
      }
      const std::int64_t offset = table[block] * step_.block_bytes;
      const std::int64_t number = (place * step_.kv_heads + piece.kv_head) * step_.head_size;
      found.keys[token] = reinterpret_cast<const Source*>(layer_.keys + offset) + number;
      found.values[token] = reinterpret_cast<const Source*>(layer_.values + offset) + number;
    }
  }

  // Asks for what is packed next while it packs, bit by bit: a core waits when it has asked for much.
  // Behind a short tile it asks for more at a time, which is better than not to have asked.
  void pack(const Tokens& tokens, const Tokens* next) {
    const Span span = in_steps(tokens.seen);
    Span ahead = next == nullptr ? Span{0, 0} : next->seen;
    const std::int64_t packs = std::max<std::int64_t>((span.stop - span.first) / 4, 1);
    const std::int64_t each = (ahead.stop - ahead.first + packs - 1) / packs;
    for (std::int64_t token = span.first; token < span.stop; token += 4) {
      const std::int64_t stop = std::min(ahead.first + each, ahead.stop);
      for (; ahead.first < stop; ++ahead.first) prefetch(*next, ahead.first);
      pack_keys(tokens.keys + token, scratch_.keys + token * Form::kDepth);
      for (std::int64_t at = token; at < token + 4; at += Form::kDepth) {
        Form::pack_values(tokens.values + at, step_.head_size, scratch_.values + at * columns_);
      }
    }
  }

  void prefetch(const Tokens& tokens, std::int64_t token) const {
    constexpr std::int64_t kLineNumbers = 64 / sizeof(Source);
    for (std::int64_t number = 0; number < step_.head_size; number += kLineNumbers) {
      __builtin_prefetch(tokens.keys[token] + number, 0, 2);
      __builtin_prefetch(tokens.values[token] + number, 0, 2);
    }
  }

  // Of four tokens, in words of 32 bits, four by four: columns become rows.
  void pack_keys(const Source* const* keys, Source* packed) {
    constexpr std::int64_t kWord = sizeof(std::uint32_t) / sizeof(Source);
    constexpr std::int64_t kDepth = Form::kDepth;
    std::int64_t number = 0;
    for (; number + 4 * kWord <= step_.head_size; number += 4 * kWord) {
      Four lines[4];
      for (int i = 0; i < 4; ++i) lines[i] = load<Four>(keys[i] + number);
      transpose(lines);
      for (int i = 0; i < 4; ++i) {
        std::memcpy(packed + (number + i * kWord) * kKeyColumns, &lines[i], sizeof(lines[i]));
      }
    }
    for (; number < step_.head_size; ++number) {
      for (int i = 0; i < 4; ++i) {
        packed[number / kDepth * kDepth * kKeyColumns + i * kDepth + number % kDepth] = keys[i][number];
      }
    }
  }

  // The softmaxes of all groups that see some of a tile. Between a store and a product that reads it,
  // and between a product and what reads its sums, something else is computed: tile registers wait for
  // a store to leave the core.
  void attend(std::int64_t tile) {
    Group groups[kPiecePairsMax / kPairsAtOnce];
    std::int64_t count = 0;
    for (std::int64_t first = 0; first < piece_.pairs; first += kPairsAtOnce) {
      const std::int64_t pairs = std::min(kPairsAtOnce, piece_.pairs - first);
      const Span span = in_steps(seen_by(piece_, tile, first, first + pairs - 1));
      if (span.first < span.stop) groups[count++] = {first, pairs, span, count % 2};
    }
    for (std::int64_t i = 0; i <= count; ++i) {
      if (i == 0 && count > 0) score(groups[0]);
      if (i < count) weigh(tile, groups[i]);
      if (i + 1 < count) score(groups[i + 1]);
      if (i > 0) settle(tile, groups[i - 1]);
      if (i < count) sum_values(groups[i]);
    }
  }

  void score(const Group& group) {
    const Span span = group.span;
    Form::multiply({scratch_.query + group.first * columns_, columns_,
                    scratch_.keys + span.first * Form::kDepth, kKeyColumns, group.pairs,
                    rounded_up(step_.head_size, Form::kDepthStep), span.stop - span.first,
                    scratch_.scores[group.place] + span.first, kTileTokens});
    if (step_.soft_cap > 0.0f) cap(group);
  }

  void cap(const Group& group) {
    const float factor = step_.scale / step_.soft_cap;
    for (std::int64_t pair = 0; pair < group.pairs; ++pair) {
      float* scores = scratch_.scores[group.place] + pair * kTileTokens;
      for (std::int64_t token = group.span.first; token < group.span.stop; token += kWidth) {
        put(hyperbolic_tangent(load<Vector>(scores + token) * factor), scores + token);
      }
    }
  }

  void weigh(std::int64_t tile, const Group& group) {
    constexpr float kLog2E = 1.44269504f;
    const float factor = (step_.soft_cap > 0.0f ? step_.soft_cap : step_.scale) * kLog2E;
    const float* scores = scratch_.scores[group.place];
    float* greatest = scratch_.tile_greatest[group.place];
    float* sums = scratch_.tile_sums[group.place];
    std::fill_n(greatest, kPairsAtOnce, kNever);
    // All rows' greatest scores before any weight: what waits for one would keep others from beginning.
    each_pair(tile, group, [&](std::int64_t i, Span seen, auto masked) {
      greatest[i] = greatest_score<masked.value>(scores + i * kTileTokens, factor, group.span, seen);
    });
    each_pair(tile, group, [&](std::int64_t i, Span seen, auto masked) {
      // Of a pair that sees nothing all weights are 0, not NaN.
      const float base = greatest[i] == kNever ? 0.0f : greatest[i];
      const Vector sum =
          weigh_scores<Form, masked.value>(scores + i * kTileTokens, factor, base, group.span, seen,
                                           scratch_.weights + i * kTileTokens);
      put(sum, sums + i * kSumParts);
    });
  }

  // Calls `function` for each pair of a group with what it sees of a tile, and whether that is not all.
  template <typename Function>
  void each_pair(std::int64_t tile, const Group& group, Function function) const {
    const auto heads = static_cast<std::int64_t>(heads_.size());
    std::int64_t query = query_of(piece_, group.first), stop = (query + 1) * heads - piece_.first_pair;
    Span seen = seen_by_query(piece_.row, tile, query);
    for (std::int64_t i = 0; i < group.pairs; ++i) {
      if (group.first + i == stop) {
        seen = seen_by_query(piece_.row, tile, ++query);
        stop += heads;
      }
      if (seen.first > 0 || seen.stop < kTileTokens) {
        function(i, seen, std::true_type{});
      } else {
        function(i, seen, std::false_type{});
      }
    }
  }

  void sum_values(const Group& group) {
    const Span span = group.span;
    Form::multiply({scratch_.weights + span.first, kTileTokens, scratch_.values + span.first * columns_,
                    columns_, group.pairs, span.stop - span.first, columns_, scratch_.tile_output,
                    columns_});
  }

  // A group's softmax over a tile joins those before it, or is kept for it.
  void settle(std::int64_t tile, const Group& group) {
    const Softmaxes of_tile{scratch_.tile_greatest[group.place], scratch_.tile_sums[group.place],
                            scratch_.tile_output};
    if (piece_.partial < 0) {
      merge_into(so_far(group.first), of_tile, group.pairs, columns_);
    } else {
      keep(of_tile, kept((tile - piece_.first_token) / kTileTokens, group.first), group.pairs);
    }
  }

  void put_output() const {
    for (std::int64_t pair = 0; pair < piece_.pairs; ++pair) {
      const float* parts = scratch_.sums + pair * kSumParts;
      float sum = 0.0f;
      for (int part = 0; part < kWidth; ++part) sum += parts[part];
      const float* numbers = scratch_.output + pair * columns_;
      Source* output = numbers_of<Source>(layer_.output, pair);
      for (std::int64_t at = 0; at < step_.head_size; at += kLanes) {
        const Floats quotients = read(numbers + at) / sum;
        if (step_.head_size - at >= kLanes) {
          write(output + at, quotients);
        } else {
          write_some(output + at, quotients, step_.head_size - at);
        }
      }
    }
  }

  const AttentionPlan& plan_;
  const AttentionStep& step_;
  const AttentionLayer& layer_;
  const AttentionPiece& piece_;
  const std::vector<std::int64_t>& heads_;
  const std::int64_t columns_;
  Operands& scratch_;
};

template <typename Form>
void compute_piece(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                   std::int64_t index) {
  const AttentionPiece* pieces = pass.pieces.data();
  const bool last = index + 1 == static_cast<std::int64_t>(pass.pieces.size());
  Piece<Form>(plan, layer, pieces[index]).compute(last ? nullptr : &pieces[index + 1]);
}

template <typename Form>
void merge_parts(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                 std::int64_t index) {
  Piece<Form>(plan, layer, pass.merged[static_cast<std::size_t>(index)]).merge();
}
