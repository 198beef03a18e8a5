"""A stand-in for a worker as the launcher sees it: notes its process id, then ends as told.

Usage: worker_process.py FOLDER NAME
    FOLDER/NAME.pids  gets a line for every start
    FOLDER/NAME.end   ends at once with the status in the file
"""

import os
import sys
import time
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]
with (folder / f"{name}.pids").open("a") as pids:
    pids.write(f"{os.getpid()}\n")
end = folder / f"{name}.end"
while not end.exists():
    time.sleep(0.02)
sys.exit(int(end.read_text()))
