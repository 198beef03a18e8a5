"""The ranks of a group as real processes that run a scenario of communicator_rank.py."""

import json
import subprocess
import sys
from pathlib import Path

RANK_PROGRAM = Path(__file__).with_name("communicator_rank.py")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90.0


class RankProcesses:
    """One process a rank; `options` is JSON, `folder` is where they find each other."""

    def __init__(
        self, backend_name: str, options: str, scenario: str, world_size: int, folder: Path
    ) -> None:
        program = [sys.executable, str(RANK_PROGRAM), backend_name, options, scenario]
        self.processes = [
            subprocess.Popen(
                [*program, str(rank), str(world_size), str(folder)],
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def wait_until_working(self) -> bool:
        """Until every rank has said that it works; False if that it cannot, as no backend must."""
        lines = set()
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line in ("working\n", "not applicable\n"), self._errors(process)
            lines.add(line)
        assert len(lines) == 1, lines
        return lines == {"working\n"}

    def record(self, rank: int) -> dict:
        """What a rank came to; it must end well."""
        process = self.processes[rank]
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        return json.loads(output.splitlines()[-1])

    def kill(self) -> None:
        """Ends those that still run."""
        for process in self.processes:
            process.kill()
            process.communicate()

    @staticmethod
    def _errors(process: subprocess.Popen) -> str:
        process.kill()
        return process.communicate()[1]
