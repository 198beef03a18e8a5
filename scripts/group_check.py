"""Whether groups can share a model, by the worker's own rules: `python -m ... MODEL POLICY SIZE...`

Ends with MODEL_FAILED if they cannot, and prints why. A process of its own: the rules need torch,
which the launcher does without.
"""

import sys

from chip_worker.errors import ModelError
from chip_worker.exit_code import ExitCode
from chip_worker.shard_loader import ShardLoader


def main() -> None:
    """Prints the first reason there is."""
    model, kv_policy, *sizes = sys.argv[1:]
    try:
        loader = ShardLoader(model)
        for size in map(int, sizes):
            loader.plan(size - 1, size, kv_policy)
    except ModelError as error:
        print(error)
        sys.exit(ExitCode.MODEL_FAILED)


if __name__ == "__main__":
    main()
