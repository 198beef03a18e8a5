"""The examples of README and docs, run as they stand: what a user pastes must work.

Every command of a shell block and every python block is run against a service, only with its ports
in place of the default ones, or is listed in NOT_RUN with the reason.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.end_to_end.cluster import ORDINARY, ROOT, Cluster, Clusters

OPTIONS = ORDINARY
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DEADLINE_S = 180.0
SHELLS = ("bash", "sh", "shell", "console")
NOT_RUN = {
    "scripts/serve": "starts a service of its own",
    "polychip serve": "starts a service of its own",
    "polychip worker": "is one of the processes of a service",
    "polychip control-plane": "is one of the processes of a service",
    "scripts/setup": "installs packages",
    "scripts/check": "runs every test there is",
    "scripts/cluster": "needs Docker; see test_compose_cluster.py",
    "docker": "needs Docker",
    "COMPOSE_PROFILES=tensor-parallel": "needs Docker",
    "python3 -m venv": "makes an environment",
    "pip install": "installs packages",
    "polychip bench compare": "measures for minutes; test_bench_of_a_service runs its short form",
    "polychip calibrate": "measures for minutes; test_calibrate runs it small",
    "polychip bench startup": "starts services of its own; test_bench_startup does so once",
    "polychip bench step": "measures for a minute; test_bench_step runs it small",
    "kill": "ends a process that the reader picks",
    "polychip doctor --backend NAME": "names a backend of the reader's",
    "polychip doctor --backend abacus": "needs the package of the example",
    "python3 -c": "needs a report of the reader's",
    "pytest": "runs tests",
    "python -m pytest": "runs tests",
}
"""How a command begins that is not run, with or without the path of .venv/bin."""
WITHOUT_SERVICE = ("doctor", "bench", "plan")
"""Commands that look at this machine and know no ports."""
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LOOKS_RUNNABLE = re.compile(
    r"^\s*(\$ |curl |\S*polychip |import \w|from \w+(\.\w+)* import )", re.M
)


@dataclass(frozen=True)
class Example:
    """One command, or a whole python block; place: page and line, for people."""

    place: str
    language: str
    text: str

    @property
    def reason_not_run(self) -> str | None:
        """Why it cannot run in a test, if it is listed."""
        start = self.text.replace(".venv/bin/", "")
        for beginning, reason in NOT_RUN.items():
            if self.language != "python" and re.match(rf"{re.escape(beginning)}(\s|$)", start):
                return reason
        return None


def examples() -> Iterator[Example]:
    """Of every page, in order."""
    for page in PAGES:
        content = page.read_text()
        for fence in FENCE.finditer(content):
            language, block = fence[1].lower(), fence[2]
            first_line = content.count("\n", 0, fence.start()) + 2
            page_name = page.relative_to(ROOT)
            if language in SHELLS:
                for line, command in commands(block, prompted=language == "console"):
                    yield Example(f"{page_name}:{first_line + line}", "bash", command)
            elif language in ("python", "py") or LOOKS_RUNNABLE.search(block):
                known = "python" if language == "py" else language
                yield Example(f"{page_name}:{first_line}", known, block)


def commands(block: str, *, prompted: bool) -> Iterator[tuple[int, str]]:
    """Complete commands with the line they begin in, from 0; with `prompted` only what stands
    behind a `$`: the rest is output.
    """
    command, first_line = "", 0
    for number, line in enumerate(block.splitlines()):
        if not command:
            if prompted and not line.startswith("$ "):
                continue
            first_line = number
            line = line.removeprefix("$ ")
        command += line + "\n"
        if is_complete(command):
            if shlex.split(command, comments=True):
                yield first_line, command.strip()
            command = ""
    assert not command, f"a command without end: {command}"


def is_complete(command: str) -> bool:
    """Quotes are closed, a here-document is, and no line goes on."""
    if command.endswith("\\\n"):
        return False
    document = re.search(r"<<-?\s*['\"]?(\w+)", command)
    if document is not None and not re.search(rf"^{document[1]}$", command, re.M):
        return False
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


EXAMPLES = list(examples())
RUN = [each for each in EXAMPLES if each.reason_not_run is None]


def test_the_pages_have_examples_of_every_kind() -> None:
    texts = "\n".join(example.text for example in RUN)
    for what in ("curl ", "polychip chat", "OpenAI(", "PolychipClient("):
        assert what in texts
    assert len(EXAMPLES) > len(RUN)


@pytest.mark.end_to_end
@pytest.mark.parametrize("example", RUN, ids=lambda example: example.place)
def test_an_example(example: Example, clusters: Clusters, tmp_path: Path) -> None:
    assert example.language in ("bash", "python"), (
        f"{example.place}: say in which language this block is, or list it in NOT_RUN"
    )
    clusters.client(*OPTIONS)
    check_runs(example, clusters.cluster(*OPTIONS), tmp_path)


@pytest.mark.end_to_end
@pytest.mark.parametrize("beginning", ["curl ", ".venv/bin/polychip "])
def test_what_serve_prints_can_be_pasted(
    beginning: str, clusters: Clusters, tmp_path: Path
) -> None:
    cluster = clusters.cluster(*OPTIONS)
    (line,) = [line for line in cluster.output().splitlines() if line.startswith(beginning)]
    check_runs(Example("serve", "bash", line), cluster, tmp_path)


# ---------------------------------------------------------------- running


def check_runs(example: Example, cluster: Cluster, folder: Path) -> None:
    """It ends with status 0, says something, and what it says is no error."""
    text = with_ports(example, cluster)
    path = folder / "example"
    path.write_text(text)
    program = [sys.executable] if example.language == "python" else ["bash", "-euo", "pipefail"]
    result = subprocess.run(
        [*program, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1,localhost"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    shown = f"{example.place}:\n{text}\n--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}"
    assert result.returncode == 0, shown
    # A block that only defines things has nothing to say.
    defines = example.language == "python" and "print(" not in text
    assert defines or result.stdout.strip(), f"it says nothing: {shown}"
    assert "Traceback" not in result.stderr, shown
    if text.startswith("curl ") and "|" not in text:
        check_response(result.stdout, shown)


def check_response(output: str, shown: str) -> None:
    """JSON or a stream of it, without an error in it; other texts are taken as they are."""
    if output.startswith("data: "):
        assert output.rstrip().endswith("data: [DONE]"), shown
        chunks = [line.removeprefix("data: ") for line in output.splitlines() if line]
        documents = [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"]
    elif output.startswith("{"):
        documents = [json.loads(output)]
    else:
        return
    for document in documents:
        assert "error" not in document, shown


def with_ports(example: Example, cluster: Cluster) -> str:
    """The example with the service's ports instead of the default ones; refusals of HTTP fail."""
    http_port = str(urlsplit(cluster.http).port)
    grpc_port = cluster.grpc.rpartition(":")[2]
    text = re.sub(r"\b8000\b", http_port, example.text)
    text = re.sub(r"\b50051\b", grpc_port, text)
    if example.language == "python":
        return text
    ports = f"--http-port {http_port} --grpc-port {grpc_port}"
    text = re.sub(r"--(http|grpc)-port[ =]\d+", "", text)
    text = re.sub(
        r"(?<!\S)(?:\.venv/bin/)?polychip ((?:cache )?[a-z-]+)",
        lambda found: (
            f"{sys.executable} -m scripts.cli.main {found[1]} "
            + ("" if found[1] in WITHOUT_SERVICE else ports)
        ),
        text,
    )
    return re.sub(r"(?<!\S)curl ", "curl --fail ", text)
