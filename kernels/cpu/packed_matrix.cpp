#include "packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "quantized.h"

namespace polychip {
namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kLargePageBytes = std::size_t{2} << 20;
constexpr std::size_t kSlabBytes = std::size_t{32} << 20;

std::size_t rounded_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

Slab::Slab(std::size_t bytes) {
  // A large page more: only what begins at a multiple of one can be one.
  const std::size_t asked = rounded_up(bytes, kLargePageBytes) + kLargePageBytes;
  void* mapped = mmap(nullptr, asked, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return;
  memory_ = static_cast<std::byte*>(mapped);
  bytes_ = asked;
  // Advice: without large pages it is slower, not wrong.
  madvise(memory_, bytes_, MADV_HUGEPAGE);
  used_ = rounded_up(reinterpret_cast<std::uintptr_t>(memory_), kLargePageBytes) -
          reinterpret_cast<std::uintptr_t>(memory_);
}

Slab::~Slab() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

std::byte* Slab::take(std::size_t bytes) {
  const std::size_t wanted = rounded_up(bytes, kLineBytes);
  if (memory_ == nullptr || bytes_ - used_ < wanted) return nullptr;
  std::byte* taken = memory_ + used_;
  used_ += wanted;
  return taken;
}

std::byte* PanelMemory::take(int thread, std::size_t bytes, std::shared_ptr<Slab>& keeper) {
  std::shared_ptr<Slab> slab = slabs_[static_cast<std::size_t>(thread)].lock();
  std::byte* taken = slab ? slab->take(bytes) : nullptr;
  if (taken == nullptr) {
    slab = std::make_shared<Slab>(std::max(bytes, kSlabBytes));
    taken = slab->take(bytes);
    slabs_[static_cast<std::size_t>(thread)] = slab;
  }
  keeper = slab;
  return taken;
}

std::unique_ptr<PackedMatrix> PackedMatrix::make(PanelMemory& memory, Number number, Form form,
                                                 std::int64_t rows, std::int64_t columns) {
  std::unique_ptr<PackedMatrix> made(new PackedMatrix());
  made->number_ = number;
  made->form_ = form;
  made->rows_ = rows;
  made->columns_ = columns;
  made->padded_columns_ = (columns + kColumnTile - 1) / kColumnTile * kColumnTile;
  made->panels_ = static_cast<std::int32_t>((rows + kPanelRows - 1) / kPanelRows);
  static_assert(kColumnTile == kGroupColumns, "columns are padded to whole tiles and groups alike");
  made->panel_bytes_ =
      static_cast<std::size_t>(made->padded_columns_ / kColumnTile) *
      (form == Form::kPlain ? kColumnTile * kPanelRows * bytes_of(number) : group_bytes(form));
  made->panels_at_.resize(static_cast<std::size_t>(made->panels_));
  made->keepers_.resize(static_cast<std::size_t>(memory.threads()));
  for (int thread = 0; thread < memory.threads(); ++thread) {
    const Range own = made->panels_of(thread);
    const auto count = static_cast<std::size_t>(own.end - own.begin);
    if (count == 0) continue;
    std::byte* start = memory.take(thread, count * made->panel_bytes_,
                                   made->keepers_[static_cast<std::size_t>(thread)]);
    if (start == nullptr) return nullptr;
    for (std::size_t i = 0; i < count; ++i) {
      made->panels_at_[static_cast<std::size_t>(own.begin) + i] = start + i * made->panel_bytes_;
    }
  }
  return made;
}

namespace {

// To the nearest, ties to even; for numbers that are finite.
std::uint16_t rounded_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

// As the kind of number that a panel holds.
template <typename T>
T rounded_to(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return rounded_to_bfloat16(value);
  }
}

// Numbers of one row that lie side by side.
template <typename T>
constexpr std::int64_t kTogether = sizeof(T) == 2 ? 2 : 1;

// Visits every number of a row where it is in its panel, in the order of the columns.
template <typename T, typename Visit>
void visit_row(T* panel, std::int64_t row_in_panel, std::int64_t columns, Visit visit) {
  T* place = panel + row_in_panel * kTogether<T>;
  for (std::int64_t column = 0; column < columns; column += kTogether<T>) {
    for (std::int64_t i = 0; i < std::min(kTogether<T>, columns - column); ++i) {
      visit(column + i, place[i]);
    }
    place += kPanelRows * kTogether<T>;
  }
}

}  // namespace

void PackedMatrix::write(std::int64_t first, std::int64_t count, const void* source,
                         std::int64_t stride) {
  if (form_ != Form::kPlain) {
    const auto* numbers = static_cast<const float*>(source);
    for (std::int64_t row = first; row < first + count; ++row, numbers += stride) {
      for (std::int64_t column = 0; column < columns_; column += kGroupColumns) {
        float padded[kGroupColumns] = {};
        std::copy_n(numbers + column, std::min(kGroupColumns, columns_ - column), padded);
        write_group(group(row, column / kGroupColumns), row % kPanelRows, padded);
      }
    }
    return;
  }
  const auto write_as = [&](const auto* numbers) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>;
    for (std::int64_t row = first; row < first + count; ++row, numbers += stride) {
      auto* panel = reinterpret_cast<T*>(panels_at_[static_cast<std::size_t>(row / kPanelRows)]);
      visit_row(panel, row % kPanelRows, columns_,
                [&](std::int64_t column, T& number) { number = numbers[column]; });
    }
  };
  if (number_ == Number::kFloat32) {
    write_as(static_cast<const float*>(source));
  } else {
    write_as(static_cast<const std::uint16_t*>(source));
  }
}

template <typename T>
void PackedMatrix::write_numbers_of(Form type, std::int64_t first, std::int64_t count,
                                    const std::byte* blocks) {
  const std::size_t row_bytes =
      static_cast<std::size_t>(columns_ / kGroupColumns) * block_bytes(type);
  for (std::int64_t begin = first, end; begin < first + count; begin = end) {
    end = std::min(first + count, (begin / kPanelRows + 1) * kPanelRows);
    auto* panel = reinterpret_cast<T*>(panels_at_[static_cast<std::size_t>(begin / kPanelRows)]);
    // All rows of a group before the next one: in the panel they lie together.
    for (std::int64_t column = 0; column < columns_; column += kGroupColumns) {
      const std::byte* block = blocks;
      T* group = panel + column * kPanelRows + begin % kPanelRows * kTogether<T>;
      for (std::int64_t row = begin; row < end; ++row, block += row_bytes) {
        float numbers[kGroupColumns];
        read_block(type, block, numbers);
        T rounded[kGroupColumns];
        for (std::int64_t i = 0; i < kGroupColumns; ++i) rounded[i] = rounded_to<T>(numbers[i]);
        for (std::int64_t i = 0; i < kGroupColumns; i += kTogether<T>) {
          std::memcpy(group + i * kPanelRows, rounded + i, kTogether<T> * sizeof(T));
        }
        group += kTogether<T>;
      }
      blocks += block_bytes(type);
    }
    // One row is behind; the others of the panel follow.
    blocks += static_cast<std::size_t>(end - begin - 1) * row_bytes;
  }
}

void PackedMatrix::write_blocks(Form type, std::int64_t first, std::int64_t count,
                                const std::byte* blocks) {
  if (form_ == Form::kPlain) {
    if (number_ == Number::kFloat32) {
      write_numbers_of<float>(type, first, count, blocks);
    } else {
      write_numbers_of<std::uint16_t>(type, first, count, blocks);
    }
    return;
  }
  for (std::int64_t row = first; row < first + count; ++row) {
    for (std::int64_t place = 0; place < columns_ / kGroupColumns; ++place) {
      write_block(form_, group(row, place), row % kPanelRows, blocks);
      blocks += block_bytes(form_);
    }
  }
}

std::byte* PackedMatrix::group(std::int64_t row, std::int64_t place) const {
  return panels_at_[static_cast<std::size_t>(row / kPanelRows)] +
         static_cast<std::size_t>(place) * group_bytes(form_);
}

void PackedMatrix::read(std::int64_t row, void* target) const {
  if (form_ != Form::kPlain) {
    for (std::int64_t column = 0; column < columns_; column += kGroupColumns) {
      float numbers[kGroupColumns];
      read_group(form_, group(row, column / kGroupColumns), row % kPanelRows, numbers);
      for (std::int64_t i = 0; i < std::min(kGroupColumns, columns_ - column); ++i) {
        if (number_ == Number::kFloat32) {
          static_cast<float*>(target)[column + i] = numbers[i];
        } else {
          static_cast<std::uint16_t*>(target)[column + i] = rounded_to_bfloat16(numbers[i]);
        }
      }
    }
    return;
  }
  const auto read_as = [&](auto* numbers) {
    using T = std::remove_pointer_t<decltype(numbers)>;
    const auto* panel =
        reinterpret_cast<const T*>(panels_at_[static_cast<std::size_t>(row / kPanelRows)]);
    visit_row(panel, row % kPanelRows, columns_,
              [&](std::int64_t column, const T& number) { numbers[column] = number; });
  };
  if (number_ == Number::kFloat32) {
    read_as(static_cast<float*>(target));
  } else {
    read_as(static_cast<std::uint16_t*>(target));
  }
}

}  // namespace polychip
