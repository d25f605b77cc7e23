"""At temperature 1 what is sampled under the plugin has the target's distribution, by exact enumeration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

from conftest import MakeEngine, asking, speculation
from mending import mend_temperatures
from pairs import write_pair

VOCAB_SIZE = 8
PROMPT = [3, 5, 4]
NUM_SAMPLES = 6000


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_distribution(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from vllm import SamplingParams

    mend_temperatures(monkeypatch)

    target, draft = write_pair(tmp_path, noise=0.6, vocab_size=VOCAB_SIZE, sharpness=1.0)
    engine = make_engine(
        model=target,
        max_num_seqs=128,
        skip_tokenizer_init=True,
        speculative_config=speculation(draft, 4, draft_sample_method=method),
        additional_config=asking("dsde:max=4"),
    )

    def probabilities(prefixes: list[list[int]]) -> np.ndarray:
        """[prefix, token] by the target alone: a first token follows from no draft."""
        prompts = [{"prompt_token_ids": PROMPT + prefix} for prefix in prefixes]
        params = SamplingParams(temperature=1, max_tokens=1, logprobs=VOCAB_SIZE, detokenize=False)
        rows = []
        for output in engine.llm.generate(prompts, params, use_tqdm=False):
            found = output.outputs[0].logprobs[0]
            rows.append([np.exp(found[token].logprob) for token in range(VOCAB_SIZE)])
        return np.array(rows)

    tokens = range(VOCAB_SIZE)
    first = probabilities([[]])[0]
    second = probabilities([[a] for a in tokens])
    third = probabilities([[a, b] for a in tokens for b in tokens]).reshape(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    expected = (first[:, None, None] * second[:, :, None] * third).ravel() * NUM_SAMPLES

    params = SamplingParams(temperature=1, max_tokens=5, ignore_eos=True, detokenize=False)
    sampled = engine.generate([{"prompt_token_ids": PROMPT}] * NUM_SAMPLES, params)
    places = [(a * VOCAB_SIZE + b) * VOCAB_SIZE + c for a, b, c, *_ in sampled]
    observed = np.bincount(places, minlength=VOCAB_SIZE**3).astype(float)
    meter = engine.controller.meter
    assert 500 < meter["num_accepted_tokens"] < 0.9 * meter["num_draft_tokens"]

    is_likely = expected >= 5
    cells = np.append(expected[is_likely], expected[~is_likely].sum())
    found = np.append(observed[is_likely], observed[~is_likely].sum())
    statistic = float(((found - cells) ** 2 / cells).sum())
    assert chi2.sf(statistic, len(cells) - 1) > 1e-4
    # That the test can fail: the draft's own distribution, or a token moved, is far off.
    assert chi2.sf(float(((np.roll(found, 1) - cells) ** 2 / cells).sum()), len(cells) - 1) < 1e-4
