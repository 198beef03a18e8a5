"""The native kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.library import BUILD_VARIABLE

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
TESTS = (
    "tests/backends/test_cpu_attention.py",
    "tests/backends/test_cpu_kernels.py",
    "tests/backends/test_cpu_programs.py",
    "tests/backends/test_cpu_quantized.py",
    "tests/backends/test_native_calls.py",
    "tests/backends/test_native_sampling.py",
    "tests/chip_worker/test_step_programs.py",
)
BUILD_S, TESTS_S = 1200.0, 3600.0


def run(command, limit_s, **environment):
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.long
def test_native_code_is_clean(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("there is no cmake or no C++ compiler")
    # The second too: the sanitizer must find what throws in a library that is loaded later.
    preloaded = [
        run([compiler, f"-print-file-name={name}"], BUILD_S).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(path).is_absolute() for path in preloaded):
        pytest.skip("the compiler has no AddressSanitizer")
    build = tmp_path / "build"
    configure = [
        "cmake",
        "-S",
        "kernels/cpu",
        "-B",
        str(build),
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ]
    run([*configure, f"-DCMAKE_CXX_FLAGS={SANITIZERS}"], BUILD_S)
    run(["cmake", "--build", str(build), "--parallel", "2"], BUILD_S)
    run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS],
        TESTS_S,
        LD_PRELOAD=" ".join(preloaded),
        # Python itself keeps much at its end.
        ASAN_OPTIONS="detect_leaks=0",
        **{BUILD_VARIABLE: str(build)},
    )
