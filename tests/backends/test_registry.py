"""Finding a backend by name: loud when it is unknown, foreign or broken, and before torch."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from typing_extensions import override

from backends import plugin
from backends.errors import BackendUnavailable, IncompatibleBackend, UnknownBackend
from backends.interface import open_runtime
from backends.plugin import Backend, BackendConfig, ChipDescription, choose_backend, find_backend


class ThirdPartyBackend(Backend):
    def device_type(self):
        return "abacus"

    @override
    def enumerate_chips(self, config):
        return [ChipDescription(index, f"abacus {index}") for index in range(8)]


class OtherVersion(ThirdPartyBackend):
    api_version = (2, 0)


class MisspeltHook(ThirdPartyBackend):
    def on_device_aquire(self, config):
        pass


@pytest.fixture
def register(monkeypatch):
    """Makes classes of this module known as installed packages would."""

    def entry_points(group):
        assert group == plugin.ENTRY_POINT_GROUP
        return entries

    entries = []
    monkeypatch.setattr(plugin.importlib.metadata, "entry_points", entry_points)

    def add(name, target, package="somewhere"):
        class Entry(EntryPoint):
            dist = SimpleNamespace(name=package)

            def load(self):
                if isinstance(target, Exception):
                    raise target
                return target

        entries.append(Entry(name, "somewhere:Something", plugin.ENTRY_POINT_GROUP))

    return add


def test_an_unknown_backend_is_refused_with_the_known_names(register):
    register("abacus", ThirdPartyBackend)
    with pytest.raises(UnknownBackend, match=r"no backend 'tpu'; known backends: cpu, sim, abacus"):
        find_backend("tpu")


def test_a_registered_package_is_found_by_its_name(register):
    register("abacus", ThirdPartyBackend)
    assert find_backend("abacus").device_type() == "abacus"


def test_a_broken_package_is_not_replaced_by_another(register):
    register("abacus", ImportError("libabacus.so is missing"))
    with pytest.raises(ImportError, match=r"libabacus\.so is missing"):
        find_backend("abacus")


@pytest.mark.parametrize("name", plugin.BUILT_IN)
def test_a_package_with_the_name_of_a_built_in_is_refused_by_name(register, name):
    register(name, ThirdPartyBackend, "polychip-impostor")
    with pytest.raises(
        IncompatibleBackend, match=rf"'{name}'.*package polychip-impostor.*built in"
    ):
        find_backend(name)
    assert plugin.backend_names() == sorted(plugin.BUILT_IN)


def test_two_packages_with_one_name_are_refused_naming_both(register):
    register("abacus", ThirdPartyBackend, "abacus-one")
    register("abacus", ThirdPartyBackend, "abacus-two")
    with pytest.raises(IncompatibleBackend, match="package abacus-one and package abacus-two"):
        find_backend("abacus")


class BrokenStart(ThirdPartyBackend):
    auto_rank = -1

    @override
    def on_init(self, config):
        raise RuntimeError("driver says 719")


class BrokenLook(ThirdPartyBackend):
    auto_rank = -1

    @override
    def enumerate_chips(self, config):
        raise KeyError("slot")


class BrokenMake(ThirdPartyBackend):
    def __init__(self, variant=""):  # noqa: ARG002
        raise ValueError


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (OSError("libabacus.so: undefined symbol"), "OSError: libabacus.so: undefined symbol"),
        (ImportError("no abacus"), "ImportError: no abacus"),
        (BrokenStart, "RuntimeError: driver says 719"),
        (BrokenLook, "KeyError: 'slot'"),
        (BrokenMake, "ValueError"),
        (MisspeltHook, "backend 'abacus' overrides unknown names ['on_device_aquire']"),
    ],
    ids=["load", "import", "on_init", "enumerate", "constructor", "incompatible"],
)
def test_auto_tells_whatever_a_package_raises_and_takes_the_next(register, target, reason):
    register("abacus", target)
    choice = choose_backend(BackendConfig(chip_indices=(0,)))
    assert choice.name == "cpu"
    ((name, told),) = choice.rejected
    assert name == "abacus"
    assert told.startswith(reason)


@pytest.mark.parametrize("error", [OSError("no such symbol"), RuntimeError("driver says 719")])
def test_by_name_a_package_fails_with_its_own_error(register, error):
    register("abacus", error)
    with pytest.raises(type(error), match=str(error)):
        find_backend("abacus")


def test_another_major_version_is_refused_naming_both(register):
    register("abacus", OtherVersion)
    with pytest.raises(IncompatibleBackend, match=r"API \(2, 0\).*has \(1, 0\)"):
        find_backend("abacus")


def test_an_override_that_nobody_calls_is_refused_with_the_names(register):
    register("abacus", MisspeltHook)
    with pytest.raises(IncompatibleBackend, match=r"on_device_aquire.*on_device_acquire"):
        find_backend("abacus")


def test_something_that_is_no_backend_is_refused(register):
    register("abacus", dict)
    with pytest.raises(IncompatibleBackend, match="not a Backend class"):
        find_backend("abacus")


def test_a_chip_that_is_not_there_means_fewer_chips():
    config = BackendConfig(chip_indices=(0, 9, 3))
    result = ThirdPartyBackend().on_device_acquire(config)
    assert [chip.index for chip in result.granted] == [0, 3]
    assert list(result.rejected) == [9]
    assert "no chip 9" in result.rejected[9]


def test_the_backend_opens_no_torch_before_its_runtime(backend_name):
    program = f"""
import sys
from backends.plugin import BackendConfig, find_backend
backend = find_backend({backend_name!r})
config = BackendConfig(chip_indices=(0,))
backend.on_init(config)
assert backend.on_device_acquire(config).granted
assert backend.capabilities.dtypes
print(sorted({{"torch", "numpy"}} & set(sys.modules)))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == "[]"


def test_an_unknown_dtype_is_refused_with_the_known_ones(backend_name):
    with pytest.raises(BackendUnavailable, match=r"int3.*float32"):
        find_backend(backend_name).on_init(BackendConfig(chip_indices=(0,), dtype="int3"))


def test_a_dtype_the_backend_does_not_declare_is_refused(backend_name):
    config = BackendConfig(chip_indices=(0,), dtype="int8")
    with pytest.raises(BackendUnavailable, match=r"int8.*float32"):
        open_runtime(find_backend(backend_name), config).dtype()
