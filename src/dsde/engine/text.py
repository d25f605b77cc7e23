"""A sequence's text as it grows, and where a stop string ends it. Knows nothing of how tokens came about."""

from __future__ import annotations

from dsde.models.tokenizer import Tokenizer


class TextState:
    """Text of one completion. Without a tokenizer it stays empty, and stop strings are refused before this."""

    def __init__(self, tokenizer: Tokenizer | None, stop: list[str]) -> None:
        self._text = ""
        self._pending: list[int] = []
        """tokens nobody has asked the text of yet: without stop strings it can wait until the next step is under way"""
        self._stream = tokenizer.stream() if tokenizer else None
        self._stop = stop
        self._num_shown = 0
        # The beginning of a stop string may already be in the text: as much stays unseen until it is decided.
        self._num_held = max((len(s) for s in stop), default=1) - 1

    @property
    def text(self) -> str:
        if self._stream is not None:
            for token in self._pending:
                self._text += self._stream.push(token)
        self._pending.clear()
        return self._text

    @property
    def looks_for_stops(self) -> bool:
        return bool(self._stop)

    def wait(self, tokens: list[int]) -> None:
        """Tokens that cannot complete a stop string: there are none."""
        if self._stream is not None:
            self._pending += tokens

    def push(self, token: int, may_stop: bool) -> str | None:
        """Add a token; if that completes a stop string, cut the text before it and say which."""
        if self._stream is None:
            return None
        if not self._stop:
            self._pending.append(token)
            return None
        added = self._stream.push(token)
        self._text += added
        if not (may_stop and added):
            return None
        before = len(self._text) - len(added)
        # Only what the token completes: a stop string that went by before it might stop does not count later.
        found = [(place, s) for s in self._stop if (place := self._text.find(s, max(0, before - len(s) + 1))) >= 0]
        if not found:
            return None
        place, stop = min(found)
        self._text = self._text[:place]
        self._stream = None
        return stop

    def finish(self) -> None:
        """No more tokens: show what an unfinished character has left."""
        if self._stream is not None:
            self._text = self.text + self._stream.flush()
        self._num_held = 0

    def take(self) -> str:
        """What can be shown and has not been."""
        text = self.text
        end = max(self._num_shown, len(text) - self._num_held)
        shown, self._num_shown = text[self._num_shown : end], end
        return shown
