"""Other programs in the same run, where they are installed: the same pair, the same prompts, the same clock.

A peer that cannot take part is left out, and the results say why.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dsde.bench.results import Results
from dsde.bench.setting import Setting
from dsde.core.errors import InvalidInput

if TYPE_CHECKING:
    from dsde.bench.contender import Contender
    from dsde.engine.llm import LLM

PEERS = ("transformers", "vllm")


def choose_peers(wish: str, setting: Setting) -> tuple[str, ...]:
    """`auto`: all that are installed and can do the setting; `none`; or names between commas."""
    if wish == "none":
        return ()
    if wish == "auto":
        # transformers speculates for one request at a time.
        able = {"transformers": 1 in setting.batch_sizes and setting.preset is None, "vllm": setting.preset is None}
        return tuple(name for name in PEERS if able[name] and find_spec(name) is not None)
    names = tuple(dict.fromkeys(name.strip() for name in wish.split(",")))
    for name in names:
        if name not in PEERS:
            raise InvalidInput(f"peers must be auto, none or some of {', '.join(PEERS)}, not {name!r}")
        if find_spec(name) is None:
            raise InvalidInput(f"{name} is not installed, so it cannot be a peer")
    return names


def make_peers(results: Results, llm: LLM, longest: int) -> list[Contender]:
    peers: list[Contender] = []
    if "transformers" in results.setting.peers:
        from dsde.bench.peers.transformers import make_transformers

        peers += make_transformers(results, llm)
    if "vllm" in results.setting.peers:
        from dsde.bench.peers.vllm import make_vllm

        peers += make_vllm(results, llm, longest)
    return peers
