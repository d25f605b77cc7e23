"""A sequence's text as it grows, and where a stop string ends it. Knows nothing of how tokens came about."""

from __future__ import annotations

from dsde.models.tokenizer import Tokenizer


class TextState:
    """Text of one completion. Without a tokenizer it stays empty, and stop strings are refused before this."""

    def __init__(self, tokenizer: Tokenizer | None, stop: list[str]) -> None:
        self.text = ""
        self._stream = tokenizer.stream() if tokenizer else None
        self._stop = stop
        self._num_shown = 0
        # The beginning of a stop string may already be in the text: as much stays unseen until it is decided.
        self._num_held = max((len(s) for s in stop), default=1) - 1

    def push(self, token: int, may_stop: bool) -> str | None:
        """Add a token; if that completes a stop string, cut the text before it and say which."""
        if self._stream is None:
            return None
        added = self._stream.push(token)
        self.text += added
        if not (may_stop and self._stop and added):
            return None
        before = len(self.text) - len(added)
        # Only what the token completes: a stop string that went by before it might stop does not count later.
        found = [(place, s) for s in self._stop if (place := self.text.find(s, max(0, before - len(s) + 1))) >= 0]
        if not found:
            return None
        place, stop = min(found)
        self.text = self.text[:place]
        self._stream = None
        return stop

    def finish(self) -> None:
        """No more tokens: show what an unfinished character has left."""
        if self._stream is not None:
            self.text += self._stream.flush()
        self._num_held = 0

    def take(self) -> str:
        """What can be shown and has not been."""
        end = max(self._num_shown, len(self.text) - self._num_held)
        shown, self._num_shown = self.text[self._num_shown : end], end
        return shown
