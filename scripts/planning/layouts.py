"""Which ways there are to divide chips into groups of one size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """`groups` groups of `size` chips each; the chips left over serve nothing."""

    groups: int
    size: int
    left_over: int

    @property
    def chips_used(self) -> int:
        """Chips that serve."""
        return self.groups * self.size


def layouts(chips_count: int) -> tuple[Layout, ...]:
    """Every size that divides the chips without a rest, and every power of two below."""
    sizes = {size for size in range(1, chips_count + 1) if chips_count % size == 0}
    sizes.update(powers_of_two(1, chips_count))
    return tuple(Layout(chips_count // size, size, chips_count % size) for size in sorted(sizes))


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Those from `least` to `most`."""
    return tuple(1 << n for n in range(most.bit_length()) if least <= 1 << n <= most)
