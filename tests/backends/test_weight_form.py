"""What weights take in the forms of GGUF's blocks."""

import pytest

from backends.weight_form import WeightForm


def test_a_row_takes_whole_blocks():
    sizes = {form: form.row_bytes(64) for form in WeightForm if form is not WeightForm.PLAIN}
    assert sizes == {WeightForm.Q8_0: 2 * 34, WeightForm.Q4_0: 2 * 18, WeightForm.Q4_1: 2 * 20}
    with pytest.raises(AssertionError, match="65 columns are no whole blocks"):
        WeightForm.Q8_0.row_bytes(65)


def test_plain_weights_are_in_no_blocks():
    with pytest.raises(AssertionError, match="plain weights are in no blocks"):
        WeightForm.PLAIN.row_bytes(64)
