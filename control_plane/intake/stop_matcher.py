"""Finds stop strings in text as it comes; what may still become one is held back.

Answer --text of a token--> StopMatcher.feed --text that is certain--> pieces
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The strings that end an answer, as an automaton; shared by all choices of a call.

    A state stands for the longest end of the text that begins a stop string. Building costs the
    characters of all strings, a character of text an amortised constant.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        """strings: none of them empty."""
        self.next: list[dict[str, int]] = [{}]
        """By state: the states one character further."""
        self.fallback: list[int] = [0]
        """By state: that of the next shorter end of the text that begins a stop string."""
        self.found: list[int] = [0]
        """By state: characters of the longest stop string the text ends with; 0 if none."""
        self.held: list[int] = [0]
        """By state: characters that may still become a stop string."""
        depths = [0]
        for string in dict.fromkeys(strings):
            self._add(string, depths)
        self._link(depths)

    def __bool__(self) -> bool:
        """False if there is nothing to look for."""
        return len(self.next) > 1

    def _add(self, string: str, depths: list[int]) -> None:
        state = 0
        for character in string:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.fallback.append(0)
                self.found.append(0)
                self.held.append(0)
                depths.append(depths[state] + 1)
            state = following
        self.found[state] = len(string)

    def _link(self, depths: list[int]) -> None:
        """Fallbacks, shallow states first, so that the shorter one is always ready."""
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            shorter = self.fallback[state]
            # A whole stop string that begins no longer one can become nothing more.
            self.held[state] = depths[state] if self.next[state] else self.held[shorter]
            self.found[state] = self.found[state] or self.found[shorter]
            for character, following in self.next[state].items():
                if state:
                    self.fallback[following] = self.step(shorter, character)
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character of text."""
        while (following := self.next[state].get(character)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return following


class StopMatcher:
    """One answer's place in its text. The match completed first ends it; of several, the longest.

    So the cut never depends on how the text was split into tokens.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self.stopped = False
        """A stop string was found: the text before it has been returned, nothing more follows."""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Adds text; returns what is certain to be part of the answer.

        may_stop: False means that a match this text completes does not count.
        """
        if not self._strings:
            return text
        step, found_at, state = self._strings.step, self._strings.found, self._state
        for index, character in enumerate(text):
            state = step(state, character)
            found = found_at[state]
            if found and may_stop:
                self.stopped = True
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole[: len(whole) - found]
        self._state = state
        whole = self._held + text
        certain = len(whole) - self._strings.held[state]
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """What is held back, at the end of an answer no stop string ended."""
        held, self._held = self._held, ""
        return held
