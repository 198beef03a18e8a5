// How sums of a panel become output. Included by each set of kernels inside its own namespace.

#include "vectors.inl"

// The sums of one row of the activations with the panel's 32 rows.
struct Sums {
  Floats low;
  Floats high;
};

template <typename T>
void store_as(const Product& product, std::int64_t row, std::int64_t column, const Sums& sums) {
  T* output = static_cast<T*>(product.output) + row * product.output_stride + column;
  const std::int64_t count = std::min<std::int64_t>(kPanelRows, product.weight->rows() - column);
  // Whole panels without a bias, as most are, go straight from the registers.
  if (product.bias == nullptr && count == kPanelRows) {
    write(output, sums.low);
    write(output + kLanes, sums.high);
    return;
  }
  alignas(64) float values[kPanelRows];
  write(values, sums.low);
  write(values + kLanes, sums.high);
  if (product.bias != nullptr) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (product.weight->number() == Number::kFloat32) {
        values[i] += static_cast<const float*>(product.bias)[column + i];
      } else {
        values[i] += widened(static_cast<const std::uint16_t*>(product.bias)[column + i]);
      }
    }
  }
  alignas(64) T numbers[kPanelRows];
  write(numbers, load<Floats>(values));
  write(numbers + kLanes, load<Floats>(values + kLanes));
  std::memcpy(output, numbers, static_cast<std::size_t>(count) * sizeof(T));
}

void store(const Product& product, std::int64_t row, std::int64_t column, const Sums& sums) {
  if (product.output_number == Number::kFloat32) {
    store_as<float>(product, row, column, sums);
  } else {
    store_as<std::uint16_t>(product, row, column, sums);
  }
}
