"""Sampling and verification on the device, against the same written out in double precision and against statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

from dsde.core.rng import Purpose
from dsde.drafting.signals import measure_all, token_probs
from dsde.sampling.kernels import DraftStore, DrawMode, Draws, exponentials, sample_drafts, truncation_thresholds
from dsde.sampling.truncation import _edge
from dsde.verification.divergence import kl_divergence, point_mass_divergence
from dsde.verification.kernels import Findings, Judgement, judge
from dsde.verification.synthetic import kind_of

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
CHUNK = 512
NUM_KEYS = 20_000 if HAS_CUDA else 80
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

GREEDY, RATIO, MATCH, PADDING = DrawMode.GREEDY, DrawMode.RATIO, DrawMode.MATCH, DrawMode.PADDING
SHARED = 0


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def make_draws(
    modes: Sequence[int],
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Draws:
    rng = np.random.default_rng(seed)
    count = len(modes)
    floats = [torch.full((count,), value, device=DEVICE) for value in (1 / temperature, top_p, min_p)]
    keys = rng.integers(-(2**31), 2**31, (count, 2))
    return Draws(ints(keys), ints(100 * np.arange(count)), ints(modes), floats[0], ints([top_k] * count), *floats[1:])


def make_logits(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Peaked rows with ties, some of them for the maximum, and tokens that cannot be."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * 3
    logits[:, rng.integers(0, vocab, vocab // 8)] = -np.inf
    logits[:, rng.integers(0, vocab, vocab // 8)] = 2.5
    logits[::2, [vocab // 3, vocab // 2, vocab - 1]] = 14.0
    return torch.from_numpy(logits).to(DEVICE, dtype)


def noise_words(low: int, high: int, c0: np.ndarray, c1: int, c2: int) -> np.ndarray:
    """Philox4x32-10, as its authors give it: [4, len(c0)]."""
    mask = np.uint64(0xFFFFFFFF)
    x = [c0.astype(np.uint64), *(np.full(len(c0), c & 0xFFFFFFFF, np.uint64) for c in (c1, c2, 0))]
    key = [low & 0xFFFFFFFF, high & 0xFFFFFFFF]
    for _ in range(10):
        even, odd = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        low_key, high_key = np.uint64(key[0]), np.uint64(key[1])
        x = [
            (odd >> np.uint64(32)) ^ x[1] ^ low_key,
            odd & mask,
            (even >> np.uint64(32)) ^ x[3] ^ high_key,
            even & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(x)


def test_noise_words_are_those_of_the_literature() -> None:
    assert noise_words(0, 0, np.zeros(1), 0, 0)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("vocab", [70, 1000, 5000])
def test_noise_depends_on_key_counter_purpose_and_entry_alone(vocab: int) -> None:
    keys = [(0, 0, 0, 0), (-5, 7, 3, 1), (2**31 - 1, -(2**31), -1, 3)]
    noise = exponentials(ints([k[:2] for k in keys]), ints([k[2] for k in keys]), ints([k[3] for k in keys]), vocab)
    entries = np.arange(vocab)
    counters = entries // 512 * 128 + entries % 128
    for row, (low, high, counter, purpose) in zip(noise.cpu().double().numpy(), keys, strict=True):
        words = noise_words(low, high, counters, counter, purpose)[entries // 128 % 4, entries]
        np.testing.assert_allclose(row, -np.log1p(-(words / 2.0**32)), rtol=1e-4)


def test_noise_is_exponential() -> None:
    noise = exponentials(ints([[3, 4], [3, 5]]), ints([9, 9]), ints([1, 1]), 20_000).cpu().double().numpy()
    assert (noise > 0).all()
    assert stats.kstest(noise[0], "expon").pvalue > 1e-4
    assert abs(np.corrcoef(noise)[0, 1]) < 0.03
    assert abs(np.corrcoef(noise[0, :-128], noise[0, 128:])[0, 1]) < 0.03


def distribution(logits: torch.Tensor, draws: Draws, owner: int) -> torch.Tensor:
    """What a row's request samples from, in double precision."""
    probs = torch.softmax(logits.cpu().double() * float(draws.inv_temperatures[owner]), -1)
    k, p, m = int(draws.top_ks[owner]), float(draws.top_ps[owner]), float(draws.min_ps[owner])
    edge = _edge(probs.numpy(), m, k if 0 < k < len(probs) else len(probs), p)
    probs[probs < edge] = 0.0
    return probs / probs.sum()


def noise_at(draws: Draws, owner: int, depth: int, purpose: int, vocab: int) -> torch.Tensor:
    counter = draws.counters[owner : owner + 1] + depth
    return exponentials(draws.seeds[owner : owner + 1], counter, ints([purpose]), vocab)[0].cpu().double()


def raced(logits: torch.Tensor, draws: Draws, owner: int, depth: int, own_purpose: Purpose) -> int:
    """The token that the row's request draws: its maximum, or the winner of the race."""
    if draws.modes[owner] == GREEDY:
        return int(logits.float().cpu().numpy().argmax())
    purpose = own_purpose if draws.modes[owner] == RATIO else SHARED
    noise = noise_at(draws, owner, depth, purpose, len(logits))
    return int((distribution(logits, draws, owner) / noise).argmax())


@pytest.mark.parametrize(
    ("columns", "vocab", "dtype", "truncated"),
    [
        (64, 64, torch.float32, False),
        (1000, 1000, torch.bfloat16, False),
        (600, 700, torch.float16, True),
        (700, 600, torch.float32, True),
    ],
)
def test_drafts(columns: int, vocab: int, dtype: torch.dtype, truncated: bool) -> None:
    modes = [GREEDY, RATIO, PADDING, MATCH, GREEDY, RATIO]
    logits = make_logits(len(modes), columns, columns, dtype)
    draws = make_draws(modes, temperature=0.7, top_p=0.95 if truncated else 1.0, top_k=50 if truncated else 0)
    store = DraftStore.allocate(9, vocab, dtype, DEVICE)
    store.logits.fill_(7.0)
    sample_drafts(logits, draws, ints([2]), ints([3]), store, True, truncated, chunk=CHUNK)
    seen = torch.full((len(modes), vocab), -torch.inf, dtype=dtype, device=DEVICE)
    seen[:, : min(columns, vocab)] = logits[:, :vocab]
    for row, mode in enumerate(modes):
        if mode == PADDING:
            assert (store.logits[3 + row] == 7.0).all()
            assert not store.stats[3 + row].any()
            continue
        assert torch.equal(store.logits[3 + row], seen[row])
        assert int(store.tokens[3 + row]) == raced(seen[row], draws, row, 2, Purpose.DRAFT)
        exact = seen[row].cpu().double()
        log_probs = torch.log_softmax(exact, -1)
        entropy = -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum()
        kept = exact * float(draws.inv_temperatures[row])
        if mode == GREEDY:
            kept = exact
        elif truncated:
            assert float(store.thresholds[3 + row]) == exact[distribution(seen[row], draws, row) > 0].min()
            kept = kept[distribution(seen[row], draws, row) > 0]
        expected = [exact.max(), exact.logsumexp(0), kept.logsumexp(0), entropy]
        torch.testing.assert_close(store.stats[3 + row].cpu().double(), torch.stack(expected), atol=1e-4, rtol=1e-5)
    assert not store.stats[:3].any()
    assert not store.signals.any()


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("columns", "vocab"), [(64, 64), (1300, 1300), (600, 700), (700, 600), (2, 2)])
def test_signals_of_drafts(columns: int, vocab: int, sampled: bool) -> None:
    """As the host measures them; also where the two likeliest are equal, in one chunk or in two."""
    modes = [GREEDY, RATIO, PADDING, MATCH, GREEDY, RATIO] if sampled else [GREEDY, GREEDY, PADDING, GREEDY]
    rng = np.random.default_rng(columns)
    logits = torch.from_numpy(rng.normal(size=(len(modes), columns)) * 3).float().to(DEVICE)
    logits[0, [columns // 3, columns - 1]] = 9.0
    logits[1, :] = 1.0
    draws = make_draws(modes, temperature=0.7)
    store = DraftStore.allocate(9, vocab, torch.float32, DEVICE)
    sample_drafts(logits, draws, ints([2]), ints([3]), store, sampled, False, True, chunk=CHUNK)
    for row, mode in enumerate(modes):
        if mode == PADDING:
            assert not store.signals[3 + row].any()
            continue
        seen = store.logits[3 + row : 4 + row].cpu()
        probs = token_probs(seen, store.tokens[3 + row : 4 + row].cpu().long())
        expected = [*measure_all(seen)[0], *probs]
        np.testing.assert_allclose(store.signals[3 + row].cpu().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert not store.signals[:3].any()


def test_greedy_drafts_need_no_draws() -> None:
    logits = make_logits(3, 300, 1)
    store = DraftStore.allocate(3, 300, torch.float32, DEVICE)
    sample_drafts(logits, make_draws([GREEDY] * 3), ints([0]), ints([0]), store, False, False, chunk=CHUNK)
    assert store.tokens.tolist() == logits.cpu().numpy().argmax(-1).tolist()
    assert (store.thresholds == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_rows_without_a_number_still_give_a_token() -> None:
    logits = torch.full((2, 600), -torch.inf, device=DEVICE)
    logits[1] = torch.nan
    store = DraftStore.allocate(2, 600, torch.float32, DEVICE)
    draws = make_draws([RATIO, MATCH], top_k=3, top_p=0.9)
    sample_drafts(logits, draws, ints([0]), ints([0]), store, True, True, chunk=CHUNK)
    assert ((store.tokens >= 0) & (store.tokens < 600)).all()


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0.0, 0, 1.0),
        (0.05, 0, 1.0),
        (0.0, 1, 1.0),
        (0.0, 40, 1.0),
        (0.0, 700, 1.0),
        (0.0, 0, 0.9),
        (0.0, 0, 0.999),
        (0.0, 0, 1e-6),
        (0.01, 30, 0.8),
        (1e-6, 2000, 0.5),
    ],
)
def test_truncation(min_p: float, top_k: int, top_p: float) -> None:
    vocab = 1000
    spread = torch.tensor([[0.0], [0.3], [3.0], [20.0]], device=DEVICE)
    logits = make_logits(4, vocab, 5).nan_to_num(neginf=-30.0) * spread + make_logits(4, vocab, 6)
    draws = make_draws([MATCH, RATIO, PADDING, MATCH, RATIO], temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    owners = [4, 0, 1, 3]
    thresholds = truncation_thresholds(logits, draws, ints(owners))
    for row, owner in enumerate(owners):
        kept = logits[row] >= thresholds[row]
        wanted = (distribution(logits[row], draws, owner) > 0).to(DEVICE)
        assert torch.equal(kept & (logits[row] > -torch.inf), wanted), row


def test_truncation_of_rows_with_many_candidates() -> None:
    """More candidates than are copied out: the row itself is searched."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 20_000))).float().to(DEVICE)
    draws = make_draws([RATIO], top_p=0.9, temperature=2.0)
    kept = logits[0] >= truncation_thresholds(logits, draws)
    expected = distribution(logits[0], draws, 0) > 0
    assert abs(int(kept.sum()) - int(expected.sum())) <= 2  # a sum that lands on the edge may fall either way


@dataclass
class Round:
    """A batch that is drafted and judged: ragged lengths, padding among sequences and rows."""

    lengths: list[int]
    draws: Draws
    target: torch.Tensor
    store: DraftStore
    judgement: Judgement
    findings: Findings

    def row(self, sequence: int, depth: int) -> int:
        return int(self.judgement.starts[sequence]) + depth

    def draft(self, sequence: int, depth: int) -> int:
        return int(self.judgement.row_drafts[self.row(sequence, depth)])


def play(
    lengths: list[int],
    draws: Draws,
    target: torch.Tensor,
    draft: torch.Tensor,
    *,
    sampled: bool = True,
    truncated: bool = False,
    point_mass: bool = False,
    rates: list[list[float]] | None = None,
) -> Round:
    """`target` [sequences * (longest + 1), vocab] and `draft` [sequences * longest, vocab] hold enough rows."""
    count, longest = len(lengths), max(lengths)
    store = DraftStore.allocate(count * longest, target.shape[1], target.dtype, DEVICE)
    for depth in range(longest):
        part = draft[depth * count : (depth + 1) * count]
        sample_drafts(part, draws, ints([depth]), ints([depth * count]), store, sampled, truncated, chunk=CHUNK)
    if point_mass:
        store.logits = store.logits[:, :0]
        store.stats.fill_(torch.nan)
    rows, starts = [(-1, 0, -1)], []
    for sequence, length in enumerate(lengths):
        starts.append(len(rows))
        rows += [(sequence, depth, depth * count + sequence) for depth in range(length)] + [(sequence, length, -1)]
    rows += [(-1, 0, -1)]
    target = target[: len(rows)]
    columns = [ints(column) for column in zip(*rows, strict=True)]
    judgement = Judgement(*columns, ints(starts), ints(lengths), draws)
    findings = Findings.allocate(count, longest, DEVICE)
    findings.buffer.fill_(-9)
    coins = None if rates is None else torch.tensor(rates, device=DEVICE)
    judge(target, judgement, store, findings, sampled, truncated, point_mass, coins, chunk=CHUNK)
    return Round(lengths, draws, target, store, judgement, findings)


def coin(draws: Draws, sequence: int, depth: int) -> float:
    low, high = draws.seeds[sequence].tolist()
    word = noise_words(low, high, np.zeros(1), int(draws.counters[sequence]) + depth, Purpose.ACCEPT)[0, 0]
    return float(word) / 2**32


def check(played: Round, *, point_mass: bool = False, rates: list[list[float]] | None = None) -> None:
    """Everything that was found, against the rules written out."""
    draws, found, store = played.draws, played.findings, played.store
    for sequence, length in enumerate(played.lengths):
        mode = int(draws.modes[sequence])
        if mode == PADDING:
            assert int(found.accepted[sequence]) == -9
            assert (found.emitted[sequence] == -9).all()
            continue
        by_ratio = mode == RATIO and not point_mass
        expected = []
        for depth in range(length + 1):
            x = played.target[played.row(sequence, depth)]
            own = raced(x, draws, sequence, depth, Purpose.EMIT)
            if depth == length:
                expected.append(own)
                break
            drafted = int(store.tokens[played.draft(sequence, depth)])
            stands = own == drafted
            if by_ratio:
                p = distribution(x, draws, sequence)
                q = distribution(store.logits[played.draft(sequence, depth)], draws, sequence)
                rest = (p - q).clamp(min=0)
                noise = noise_at(draws, sequence, depth, Purpose.EMIT, len(p))
                own = int(((rest if rest.sum() > 1e-9 else p) / noise).argmax())
                stands = bool(coin(draws, sequence, depth) * q[drafted] < p[drafted])
            if rates is not None:
                kind = kind_of(int(draws.seeds[sequence, 0]), len(rates))
                stands = coin(draws, sequence, depth) < rates[kind][depth]
            expected.append(drafted if stands else own)
            if not stands:
                break
        assert int(found.accepted[sequence]) == len(expected) - 1
        width = found.emitted.shape[1]
        assert found.emitted[sequence].tolist() == expected + [-1] * (width - len(expected))
        for depth in range(length):
            x = played.target[played.row(sequence, depth)].unsqueeze(0).cpu().double()
            slot = played.draft(sequence, depth)
            if point_mass:
                kld = point_mass_divergence(x, store.tokens[slot : slot + 1].cpu().long())
                assert found.entropies[sequence, depth] == 0
            else:
                y = store.logits[slot : slot + 1].cpu().double()
                kld = kl_divergence(x, torch.tensor([0]), y)
                assert found.entropies[sequence, depth] == store.stats[slot, 3]
            torch.testing.assert_close(found.klds[sequence, depth].cpu().double(), kld[0], atol=2e-5, rtol=1e-5)


def make_pair(count: int, longest: int, vocab: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft that agree often enough for drafts to stand and to fall."""
    target = make_logits(count * (longest + 1) + 2, vocab, seed, dtype)
    draft = target[1:].float() + torch.from_numpy(np.random.default_rng(seed).normal(size=(len(target) - 1, vocab))).to(
        DEVICE, torch.float32
    )
    # Sequence s at depth d is drafted from row d * count + s and judged by row 1 + s * (longest + 1) + d.
    order = [s * (longest + 1) + d for d in range(longest) for s in range(count)]
    return target, draft[order].to(dtype)


@pytest.mark.parametrize(
    ("mode", "vocab", "dtype", "truncated", "point_mass"),
    [
        (GREEDY, 1000, torch.bfloat16, False, False),
        (GREEDY, 64, torch.float32, False, True),
        (RATIO, 700, torch.float32, False, False),
        (RATIO, 64, torch.bfloat16, True, False),
        (RATIO, 64, torch.float32, False, True),
        (MATCH, 64, torch.float16, True, False),
        (MATCH, 600, torch.float32, False, True),
    ],
)
def test_judgement(mode: int, vocab: int, dtype: torch.dtype, truncated: bool, point_mass: bool) -> None:
    lengths = [2, 2, 2]
    modes = [mode] * 3
    target, draft = make_pair(3, 2, vocab, dtype, 40 + vocab + mode)
    options = {"top_p": 0.9, "min_p": 0.01} if truncated else {}
    draws = make_draws(modes, temperature=0.9, **options)  # type: ignore[arg-type]
    played = play(lengths, draws, target, draft, sampled=mode != GREEDY, truncated=truncated, point_mass=point_mass)
    check(played, point_mass=point_mass)


def test_ragged_batch_of_all_modes() -> None:
    lengths = [1, 0, 3, 0, 1, 2]
    modes = [RATIO, RATIO, MATCH, GREEDY, PADDING, RATIO]
    target, draft = make_pair(6, 3, 64, torch.float32, 8)
    played = play(lengths, make_draws(modes, seed=3), target, draft)
    check(played)
    host = Findings.within(played.findings.buffer.cpu(), 6, 3)
    assert torch.equal(host.emitted, played.findings.emitted.cpu())
    written = [modes.index(mode) for mode in (RATIO, MATCH)]
    assert torch.equal(host.klds[written], played.findings.klds.cpu()[written])
    assert torch.equal(host.entropies[written], played.findings.entropies.cpu()[written])


@pytest.mark.parametrize("mode", [GREEDY, RATIO, MATCH])
@pytest.mark.parametrize("rates", [[[0.7, 0.3]], [[0.0, 0.0], [1.0, 1.0], [0.7, 0.3]]])
def test_synthetic_acceptance(mode: int, rates: list[list[float]]) -> None:
    target, draft = make_pair(3, 2, 64, torch.float32, 9)
    played = play([2, 1, 2], make_draws([mode] * 3, seed=4), target, draft, sampled=mode != GREEDY, rates=rates)
    check(played, rates=rates)


def test_nothing_drafted() -> None:
    target = make_logits(3, 600, 10)
    draws = make_draws([GREEDY, RATIO, MATCH], temperature=0.8)
    findings = Findings.allocate(3, 0, DEVICE)
    rows = ints([0, 1, 2])
    judgement = Judgement(rows, rows * 0, rows * 0 - 1, rows, rows * 0, draws)
    judge(target, judgement, None, findings, True, False, False, chunk=CHUNK)
    assert findings.accepted.tolist() == [0, 0, 0]
    expected = [raced(target[row], draws, row, 0, Purpose.EMIT) for row in range(3)]
    assert findings.emitted[:, 0].tolist() == expected


def test_where_nothing_is_left_of_p_minus_q_p_is_drawn_from() -> None:
    target, _ = make_pair(2, 1, 64, torch.float32, 11)
    draws = make_draws([RATIO, RATIO])
    played = play([1, 1], draws, target, target[[1, 3]], rates=[[0.0]])
    assert played.findings.accepted.tolist() == [0, 0]
    assert not played.findings.klds.any()
    for sequence in range(2):
        own = raced(target[played.row(sequence, 0)], draws, sequence, 0, Purpose.EMIT)
        assert int(played.findings.emitted[sequence, 0]) == own


def test_matched_tokens_do_not_depend_on_the_draft() -> None:
    target, draft = make_pair(3, 2, 64, torch.float32, 12)
    draws = make_draws([MATCH] * 3, seed=5)
    emitted = [play([2, 2, 2], draws, target, d).findings for d in (draft, draft.flip(-1))]
    for one, other, first, second in zip(
        emitted[0].emitted.tolist(), emitted[1].emitted.tolist(), *(e.accepted.tolist() for e in emitted), strict=True
    ):
        shared = min(first, second) + 1
        assert one[:shared] == other[:shared]


@pytest.mark.parametrize(
    ("mode", "truncated", "point_mass"),
    [
        (RATIO, False, False),
        pytest.param(RATIO, True, False, marks=needs_gpu),
        pytest.param(MATCH, False, False, marks=needs_gpu),
        pytest.param(MATCH, True, False, marks=needs_gpu),
        pytest.param(RATIO, False, True, marks=needs_gpu),
        pytest.param(MATCH, True, True, marks=needs_gpu),
    ],
)
def test_emitted_tokens_have_the_distribution_of_the_target(mode: int, truncated: bool, point_mass: bool) -> None:
    """Drafts have that of the draft; the first and, where a draft stood, the second token that of the target."""
    target = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, -torch.inf], [0.0, 1.0, 2.0, 0.5, -1.0, 1.0]], device=DEVICE)
    draft = torch.tensor([[1.0, 2.0, 0.5, 0.0, -torch.inf, 0.0]], device=DEVICE)
    draws = make_draws([mode] * NUM_KEYS, seed=6, temperature=0.8, top_p=0.85 if truncated else 1.0)
    rows = target.repeat(NUM_KEYS, 1)
    rows = torch.cat((rows[:1], rows, rows[:1]))
    played = play([1] * NUM_KEYS, draws, rows, draft.repeat(NUM_KEYS, 1), truncated=truncated, point_mass=point_mass)
    p, following = (distribution(row, draws, 0).numpy() for row in target)
    q = distribution(draft[0], draws, 0).numpy()
    emitted = played.findings.emitted.cpu().numpy()
    stood = played.findings.accepted.cpu().numpy() == 1
    check_counts(played.store.tokens.cpu().numpy(), q)
    check_counts(emitted[:, 0], p)
    check_counts(emitted[stood, 1], following)
    for token in range(6):
        assert (emitted[~stood, 1] == -1).all()
        if HAS_CUDA and p[token] > 0.05:
            check_counts(emitted[stood & (emitted[:, 0] == token), 1], following)
    if mode == RATIO and not point_mass:
        expected = np.minimum(p, q).sum()
        assert abs(stood.mean() - expected) < 5 * (expected * (1 - expected) / NUM_KEYS) ** 0.5


def check_counts(drawn: np.ndarray, probs: np.ndarray) -> None:
    if len(drawn) < 50:
        return
    counts = np.bincount(drawn, minlength=len(probs))
    assert not counts[probs == 0].any()
    some = probs > 0
    if some.sum() > 1:
        assert stats.chisquare(counts[some], probs[some] / probs.sum() * len(drawn)).pvalue > 1e-4


def test_result_does_not_depend_on_the_batch() -> None:
    target, draft = make_pair(3, 1, 700, torch.float32, 13)
    draws = make_draws([RATIO, MATCH, RATIO], seed=7)
    together = play([1, 1, 1], draws, target, draft).findings
    fields = ("seeds", "counters", "modes", "inv_temperatures", "top_ks", "top_ps", "min_ps")
    for sequence in range(3):
        alone = replace(draws, **{name: getattr(draws, name)[sequence : sequence + 1].clone() for name in fields})
        rows = target[[0, 1 + 2 * sequence, 2 + 2 * sequence, 0]]
        found = play([1], alone, rows, draft[sequence : sequence + 1]).findings
        assert torch.equal(found.emitted[0], together.emitted[sequence])
        assert torch.equal(found.klds[0], together.klds[sequence])
