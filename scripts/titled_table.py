"""Tables of figures as commands print them: a title, what a row is of, its numbers."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


def titled_table(title: str, words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table without rows. numbers: columns behind the words, their figures below each other."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
