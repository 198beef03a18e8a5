"""The seam itself: outside `backends/` and `kernels/` nobody asks what make of chip it has.

No `torch.cuda`, `torch.xpu` or `torch.distributed`, and no comparison, lookup or branch on the name
of a backend or the type of a device.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("control_plane", "chip_worker", "scripts")
TORCH_PARTS = ("cuda", "xpu", "distributed", "mps", "npu", "accelerator")
MAKES = frozenset(
    ("cpu", "cuda", "xpu", "kunlun", "sim", "gpu", "mps", "npu", "hpu", "tpu", "rocm", "intel")
)
DEVICE_TYPES = ("device_type", "is_cuda", "is_cpu", "is_xpu")


def violations(source: str) -> Iterator[str]:
    """Each use of a chip's make in a module, as line and reason."""
    for node in ast.walk(ast.parse(source)):
        for found in (_torch_part(node), _decides_by_make(node)):
            if found:
                yield f"line {getattr(node, 'lineno', 0)}: {found}"


def _torch_part(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name("torch"), attr=attr) if attr in TORCH_PARTS:
            return f"torch.{attr}"
        case ast.Import(names=names):
            used = [each.name for each in names]
        case ast.ImportFrom(module="torch", names=names):
            used = [f"torch.{each.name}" for each in names]
        case ast.ImportFrom(module=str(module)):
            used = [module]
        case _:
            return None
    parts = [name for name in used if name.split(".")[:1] == ["torch"]]
    banned = [name for name in parts if name.split(".")[1:2] and name.split(".")[1] in TORCH_PARTS]
    return f"imports {banned[0]}" if banned else None


def _decides_by_make(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(left=left, comparators=others):
            asked = [left, *others]
        case ast.Match(subject=subject, cases=cases):
            asked = [subject, *(each.pattern for each in cases)]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            asked = [test] if isinstance(test, ast.Attribute | ast.Call) else []
        case ast.Dict(keys=keys):
            asked = [key for key in keys if key is not None]
        case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "get"), args=args):
            asked = list(args)
        case ast.Subscript(slice=index):
            asked = [index]
        case _:
            return None
    for part in asked:
        for inner in ast.walk(part):
            if isinstance(inner, ast.Constant) and inner.value in MAKES:
                return f"decides by the name {inner.value!r}"
            if isinstance(inner, ast.Attribute) and _is_device_type(inner):
                return f"decides by {ast.unparse(inner)}"
    return None


def _is_device_type(node: ast.Attribute) -> bool:
    of_device = isinstance(node.value, ast.Attribute) and node.value.attr == "device"
    return node.attr in DEVICE_TYPES or (node.attr == "type" and of_device)


@pytest.mark.parametrize("folder", SOURCES)
def test_nobody_above_the_backends_knows_a_make(folder):
    found = [
        f"{path.relative_to(ROOT)} {violation}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
        for violation in violations(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "import torch.distributed as dist",
        "from torch import xpu",
        "from torch.distributed import all_reduce",
        "x = 1 if backend == 'cpu' else 2",
        "if name in ('sim', 'other'): pass",
        "fast = device_name != 'cuda'",
        "if tensor.is_cuda: pass",
        "if tensor.device.type == kind: pass",
        "if backend.device_type() == kind: pass",
        "size = {'cpu': 1, 'sim': 2}[name]",
        "if name.startswith('cpu'): pass",
        "match name:\n    case 'sim':\n        pass",
    ],
)
def test_each_way_to_ask_is_found(line):
    assert list(violations(line))


@pytest.mark.parametrize(
    "line",
    [
        "backend: str = 'cpu'",
        "option('--backend', default='cpu')",
        "if a.group_id == b.group_id: pass",
        "import torch",
        "from torch import nn",
        "record(backend=worker.backend)",
    ],
)
def test_what_only_passes_a_name_on_is_allowed(line):
    assert not list(violations(line))
