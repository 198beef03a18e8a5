"""The examination of real chips that `polychip doctor` starts, in processes of its own."""

import pytest

from kernels.spec import OPERATIONS
from scripts.examining import Findings, examine_chips, examine_group

DEADLINE_S = 60.0
FEATURED = ("attention:window", "attention:soft_cap")


def task(backend_name, **options):
    return {
        "backend": backend_name,
        "devices": [],
        "chips_on_host": 2,
        "dtype": "auto",
        "options": options,
        "chips": [0, 1],
    }


def test_chips_are_opened_and_every_operation_is_told(backend_name, backend):
    findings = Findings()
    examine_chips(task(backend_name), DEADLINE_S, findings, lambda _: None)
    assert [probe.ok for probe in findings.probes] == [True, True], findings.probes
    assert all("GB free" in probe.detail for probe in findings.probes)
    told = {(each["operation"], each["dtype"]) for each in findings.operations}
    assert {operation for operation, _ in told} == {*OPERATIONS, *FEATURED}
    assert {dtype for _, dtype in told} == set(backend.capabilities.dtypes)
    assert findings.ok


@pytest.mark.long
def test_two_chips_sum_between_processes(backend_name):
    findings = Findings()
    examine_group(task(backend_name), 2, DEADLINE_S, findings, lambda _: None)
    assert [probe.ok for probe in findings.probes] == [True, True], findings.probes
    assert all(probe.detail.startswith("by ") for probe in findings.probes)


@pytest.mark.long
def test_a_simulated_chip_that_does_not_open_is_told_with_its_reason():
    findings = Findings()
    broken = task("sim", faults="chip0:fail@open")
    examine_chips(broken, DEADLINE_S, findings, lambda _: None)
    assert [probe.ok for probe in findings.probes] == [False, True]
    assert "fails at open" in findings.probes[0].detail
