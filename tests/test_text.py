"""Stop strings and streaming, with a tokenizer of single bytes so that texts are easy to write down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsde.engine.text import TextState


class Letters:
    """Stands in for the tokenizer: a token is a letter."""

    def stream(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def feed(text: str, stop: list[str], may_stop_from: int = 0) -> tuple[str, list[str], str | None]:
    """The final text, what was shown after every letter, and the stop string that ended it."""
    state = TextState(Letters(), stop)  # type: ignore[arg-type]
    shown, found = [], None
    for count, letter in enumerate(text, start=1):
        found = state.push(ord(letter), may_stop=count >= may_stop_from)
        if found is not None:
            break
        shown.append(state.take())
    state.finish()
    shown.append(state.take())
    return state.text, shown, found


@pytest.mark.parametrize(
    ("text", "stop", "final", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "tw"], "one ", "tw"),
        ("one two three", ["four"], "one two three", None),
        ("aaab", ["ab"], "aa", "ab"),
        ("stop", ["stop"], "", "stop"),
        ("abc", [], "abc", None),
    ],
)
def test_stop_strings(text: str, stop: list[str], final: str, found: str | None) -> None:
    got, shown, which = feed(text, stop)
    assert (got, which) == (final, found)
    assert "".join(shown) == final


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    _, shown, _ = feed("hello END", ["END"])
    assert "".join(shown) == "hello "
    assert all("E" not in part for part in shown)


def test_without_stop_strings_every_letter_is_shown_at_once() -> None:
    assert feed("abc", [])[1] == ["a", "b", "c", ""]


def test_stop_strings_wait_for_min_tokens() -> None:
    assert feed("xxab xxab", ["ab"], may_stop_from=5) == ("xxab xx", feed("xxab xxab", ["ab"], 5)[1], "ab")


def test_a_stop_string_that_went_by_does_not_count_later() -> None:
    assert feed("axyz", ["a", "bbbbbb"], may_stop_from=2)[0::2] == ("axyz", None)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_text(text: str, stop: list[str]) -> None:
    final, shown, found = feed(text, stop)
    assert "".join(shown) == final
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert (final, found) == (text, None)
    else:
        assert found is not None
        assert final == text[: text.find(found)]
        assert text.find(found) + len(found) == min(ends)
