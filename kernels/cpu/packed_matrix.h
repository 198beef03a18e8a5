// A weight [rows, columns] laid out for products with few rows of activations.
//
//   rows of the weight, in panels of 32        a panel, bfloat16            a panel, float32
//   | panel 0 | panel 1 | ... | last, padded   [columns / 2][32 rows][2]    [columns][32 rows]
//
// One step along the columns is two cache lines of weights and one broadcast of the activation. The
// columns are padded with zeros to whole tiles of 32. Each thread's panels are one stretch of memory,
// and matrices packed one after the other follow each other there in the order of use, so that reading
// runs on from matrix to matrix. Numbers of fewer bits, in groups: see quantized.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "operation.h"

namespace polychip {

constexpr std::int32_t kPanelRows = 32;
constexpr std::int32_t kColumnTile = 32;

enum class Number : std::int32_t { kFloat32 = 0, kBfloat16 = 1 };

inline std::size_t bytes_of(Number number) { return number == Number::kFloat32 ? 4 : 2; }

// How the numbers of a weight are held: as they are, or in one of GGUF's types.
enum class Form : std::int32_t { kPlain = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3 };

// Memory in large pages; who holds a piece holds its slab.
class Slab {
 public:
  explicit Slab(std::size_t bytes);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // The next `bytes`, aligned to a cache line; null if they do not fit, or there is no memory.
  std::byte* take(std::size_t bytes);

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t used_ = 0;
};

// Where the panels of each thread are put, matrix after matrix.
class PanelMemory {
 public:
  explicit PanelMemory(int threads) : slabs_(static_cast<std::size_t>(threads)) {}
  int threads() const { return static_cast<int>(slabs_.size()); }
  // Memory of `thread`, and what keeps it; null if there is none.
  std::byte* take(int thread, std::size_t bytes, std::shared_ptr<Slab>& keeper);

 private:
  // The last slab of each thread, if any matrix in it is left.
  std::vector<std::weak_ptr<Slab>> slabs_;
};

class PackedMatrix {
 public:
  // Null if there is no memory. All numbers are zero.
  static std::unique_ptr<PackedMatrix> make(PanelMemory& memory, Number number, Form form,
                                            std::int64_t rows, std::int64_t columns);

  // Of the rows that are read, and of what the weight is multiplied with.
  Number number() const { return number_; }
  Form form() const { return form_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::int64_t padded_columns() const { return padded_columns_; }
  std::int32_t panels() const { return panels_; }
  // What one takes; those of a thread follow each other.
  std::ptrdiff_t panel_bytes() const { return static_cast<std::ptrdiff_t>(panel_bytes_); }
  Range panels_of(int thread) const { return equal_share(panels_, thread, threads()); }
  const std::byte* panel(std::int32_t index) const {
    return panels_at_[static_cast<std::size_t>(index)];
  }

  // `count` rows from `first` on, each `stride` numbers after the last: of the same kind of number or,
  // if they are not held as they are, float32, for which the form must be kQ8_0.
  void write(std::int64_t first, std::int64_t count, const void* source, std::int64_t stride);
  // Rows of GGUF's blocks, one after the other; columns are whole blocks. type: the form they are of,
  // the matrix's unless that is kPlain, which takes the numbers of any.
  void write_blocks(Form type, std::int64_t first, std::int64_t count, const std::byte* blocks);
  // One row as it was written, or what is left of it in fewer bits.
  void read(std::int64_t row, void* target) const;

 private:
  PackedMatrix() = default;
  int threads() const { return static_cast<int>(keepers_.size()); }
  template <typename T>
  void write_numbers_of(Form type, std::int64_t first, std::int64_t count, const std::byte* blocks);
  // Where a group of 32 columns of a row's panel is.
  std::byte* group(std::int64_t row, std::int64_t place) const;

  Number number_ = Number::kFloat32;
  Form form_ = Form::kPlain;
  std::int64_t rows_ = 0;
  std::int64_t columns_ = 0;
  std::int64_t padded_columns_ = 0;
  std::int32_t panels_ = 0;
  std::size_t panel_bytes_ = 0;
  std::vector<std::byte*> panels_at_;
  std::vector<std::shared_ptr<Slab>> keepers_;
};

// Rows from `first` on, for `write(first row, its end)`, which is called for those of one panel at a
// time.
template <typename Write>
class PanelByPanel final : public Operation {
 public:
  PanelByPanel(std::int64_t first, std::int64_t count, Write write)
      : first_(first), stop_(first + count), write_(write) {}
  std::int32_t items() const override {
    return static_cast<std::int32_t>((stop_ + kPanelRows - 1) / kPanelRows - first_ / kPanelRows);
  }
  void compute(std::int32_t item) const override {
    const std::int64_t panel = first_ / kPanelRows + item;
    const std::int64_t start = panel * kPanelRows, end = start + kPanelRows;
    write_(start < first_ ? first_ : start, end < stop_ ? end : stop_);
  }

 private:
  std::int64_t first_;
  std::int64_t stop_;
  Write write_;
};

}  // namespace polychip
