// How sums of a panel become output. Included by each set of kernels inside its own namespace.

#include "vectors.inl"

// The sums of one row of the activations with the panel's 32 rows.
struct Sums {
  Floats low;
  Floats high;
};

void store(const Product& product, std::int64_t row, std::int64_t column, const Sums& sums) {
  const Number bias_number = product.weight->number();
  const std::int64_t count = std::min<std::int64_t>(kPanelRows, product.weight->rows() - column);
  alignas(64) float values[kPanelRows];
  std::memcpy(values, &sums.low, sizeof(Floats));
  std::memcpy(values + kLanes, &sums.high, sizeof(Floats));
  if (product.bias != nullptr) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (bias_number == Number::kFloat32) {
        values[i] += static_cast<const float*>(product.bias)[column + i];
      } else {
        const std::uint32_t bits =
            std::uint32_t{static_cast<const std::uint16_t*>(product.bias)[column + i]} << 16;
        float bias;
        std::memcpy(&bias, &bits, sizeof(bias));
        values[i] += bias;
      }
    }
  }
  const auto size = static_cast<std::size_t>(count);
  if (product.output_number == Number::kFloat32) {
    std::memcpy(static_cast<float*>(product.output) + row * product.output_stride + column, values,
                size * sizeof(float));
    return;
  }
  alignas(64) std::uint16_t halves[kPanelRows];
  const Halves low = narrowed(load<Floats>(values));
  const Halves high = narrowed(load<Floats>(values + kLanes));
  std::memcpy(halves, &low, sizeof(low));
  std::memcpy(halves + kLanes, &high, sizeof(high));
  std::memcpy(static_cast<std::uint16_t*>(product.output) + row * product.output_stride + column,
              halves, size * sizeof(std::uint16_t));
}
