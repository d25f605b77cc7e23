"""Queues a whole step on a device and looks at it again when it is over: one copy there for each pass, one copy back.

Draft, target and verdict follow each other on the device without the host, and the device does not wait for it between
steps either: a draft reads on straight behind the verdict, and where nobody drafts the next step is queued before this
one is over. A rule that stops drafts midway is applied on the device, and the host waits for its decisions alone; with
few sequences it does not even wait for those (`solo.py`).
Requests whose logits are edited by their own tokens (penalties, bias, minimum length) and a consultant, which is not
lossless, need the host to look at every token; a step with one of them goes the host's way. Knows nothing of policies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsde.core.params import LONGEST_DRAFT
from dsde.core.sequence import Sequence
from dsde.core.stops import SIGNALS
from dsde.device.backend import device_context
from dsde.device.program import ProgramError, can_run
from dsde.device.staging import Sheet
from dsde.drafting import ModelDrafter
from dsde.drafting.device import DeviceDrafter, draws_of
from dsde.drafting.draft_store import DeviceProposals, Drafts
from dsde.drafting.kernels import step_on
from dsde.drafting.sequence_table import SequenceTable, draw_sizes
from dsde.drafting.signals import SURE
from dsde.drafting.solo import SoloDraft, SoloNews, SoloRule
from dsde.drafting.solo_kernels import LONGEST_SOLO, Told
from dsde.engine.clock import Clock, Moment, Timing
from dsde.engine.executor import (
    MOST_ALONE,
    DraftWish,
    Flight,
    HostExecutor,
    Landing,
    Seconds,
    judged_sequences,
    propose,
)
from dsde.engine.scheduler import Schedule, blocks_for
from dsde.engine.solo import (
    Solo,
    SoloSetting,
    can_go_by_heart,
    expected_lengths,
    most_rows,
    solo_rule,
    told_proposals,
)
from dsde.engine.verification_sheet import Answer, logit_places, write_judged, write_tokens
from dsde.models.batch import BLOCK_SIZE
from dsde.models.buckets import MOST_GRAPH_TOKENS, power_of_2, ragged_bucket, ragged_buckets
from dsde.models.passes import Pass, PassRunner, PassShape, ragged_rows
from dsde.verification import Verdict
from dsde.verification.kernels import Findings, Judgement, judge
from dsde.verification.synthetic import table

IntArray = NDArray[np.int64]

_MOST_BY_HEART = 3
"""steps in a row that are drafted as far as a rule expects instead of by it: if there are more, no step is made alone,
and somebody has to learn what the rule takes"""
_MOST_REHEARSED = 8
"""drafted tokens of a sequence, on average, in verifications that are rehearsed"""


@dataclass(slots=True)
class _Read:
    """What a pass of the target leaves on the device."""

    logits: torch.Tensor
    findings: Findings
    moment: Moment | None
    """when the logits were there; None: nobody knows"""


@dataclass(slots=True)
class DeviceFlight:
    judged: list[Sequence]
    drafted: IntArray
    wish: DraftWish
    proposals: DeviceProposals
    num_judged_rows: int
    entry: Pass | None
    """None: it is part of a program"""
    read: _Read
    answer: Answer
    timing: Timing
    finish: Callable[[DeviceFlight], Landing]
    longest_context: int
    is_cold: bool
    """as in Landing"""
    is_padded: bool
    """likewise"""
    is_by_heart: bool = False
    """likewise"""

    is_followed: bool = False
    """another step has been queued that writes to the same places"""
    turn: int | None = None
    """in which the device tells what it has drafted alone, known when it has landed; None: the host knows"""
    rows: IntArray | None = None
    """[judged] where they are in the verdict, if it was made for others as well"""

    @property
    def num_catch_up_tokens(self) -> IntArray | None:
        return self.proposals.num_catch_up_tokens

    def land(self) -> Landing:
        return self.finish(self)


@dataclass(slots=True)
class _Prepared:
    """A pass of the target whose sheet is written."""

    lengths: IntArray
    """of the drafts it is for"""
    judged: list[Sequence]
    drafted: IntArray
    num_judged_rows: int
    entry: Pass
    sheet: Sheet
    longest_context: int
    num_moves: int
    """of the draft store, before it was prepared"""
    read: _Read | None = None
    """None: it has not been queued yet"""


class _Verification:
    """Of a step whose draft is still being made: prepared while the device is at work, and queued as soon as the draft
    is known to be over as was foreseen."""

    def __init__(
        self,
        prepare: Callable[[DeviceProposals], _Prepared],
        start: Callable[[_Prepared], None],
        drafts: Drafts,
        can_foresee: bool,
    ) -> None:
        self._prepare, self._start, self._drafts = prepare, start, drafts
        self._can_foresee = can_foresee
        self._prepared: _Prepared | None = None

    def prepare(self, proposals: DeviceProposals) -> None:
        if self._can_foresee:
            self._prepared = self._prepare(proposals)

    def begin(self, lengths: IntArray) -> None:
        if self._prepared is not None and self._is_for(self._prepared, lengths):
            self._start(self._prepared)

    def of(self, proposals: DeviceProposals) -> _Prepared:
        """For what was proposed in the end."""
        if self._prepared is None or not self._is_for(self._prepared, proposals.lengths):
            self._prepared = self._prepare(proposals)
        return self._prepared

    def _is_for(self, prepared: _Prepared, lengths: IntArray) -> bool:
        return prepared.num_moves == self._drafts.num_moves and np.array_equal(prepared.lengths, lengths)


class _Variant(NamedTuple):
    """What the kernels of a verdict are compiled for."""

    sampled: bool
    truncated: bool
    point_mass: bool
    longest: int
    """most drafted tokens of a sequence; with the one behind them mostly a power of two"""
    is_solo: bool = False
    """a part of a program, in which no moment can be recorded"""


class DeviceExecutor:
    is_asynchronous = True

    @property
    def num_ahead(self) -> int:
        return 0 if self.drafter is None else 1

    @property
    def most_whole(self) -> int:
        return MOST_ALONE if self._can_be_alone and self.makes_solos else 0

    def __init__(self, host: HostExecutor, max_num_seqs: int, max_model_len: int) -> None:
        self.host = host
        self.model = host.target.model
        self.device = self.model.device
        self.table = SequenceTable(blocks_for(max_model_len))
        tokens = torch.zeros(max_num_seqs * LONGEST_DRAFT, dtype=torch.int32, device=self.device)
        vocab_size = self.model.config.vocab_size
        self.drafter: DeviceDrafter | None = None
        if isinstance(host.drafter, ModelDrafter):
            self.drafts = Drafts(vocab_size, host.drafter.model.dtype, tokens)
            self.drafter = DeviceDrafter(host.drafter, self.table, self.drafts, max_num_seqs)
        else:
            self.drafts = Drafts(1, self.model.dtype, tokens)
        self.passes = PassRunner(self.model.heads, tokens, self._body)
        self._can_be_alone = self.drafter is not None and can_run(self.device)
        """whether the device can make steps without the host"""
        self._told = Told.blank(MOST_ALONE, pinned=self.device.type == "cuda")
        self.makes_solos = True
        self.num_solos = 0
        """steps that the device made alone, and that counted"""
        self.num_dropped = 0
        """those that did not"""
        self.num_by_heart = 0
        """steps that were drafted as far as a rule expected, without asking it"""
        self._num_by_heart = 0
        """of them, those since a step was last made alone"""
        self._solo: Solo | None = None
        self._solo_turn = 0
        self._solo_settings: dict[tuple[object, ...], SoloSetting] = {}
        """by how many sequences there are, how long drafts may be, and how tokens are drawn"""
        self._solo_changes: tuple[int, ...] = ()
        """of all that graphs point to, when these were made"""
        self.clock = Clock(self.device)
        rates = host.synthetic_acceptance
        self._rates = None if rates is None else torch.from_numpy(table(rates, LONGEST_DRAFT)).to(self.device)
        self._logits = torch.empty((0, vocab_size), dtype=self.model.dtype, device=self.device)
        # All verdicts are written to the same place, where a draft that reads ahead looks for them.
        self._findings = torch.zeros(
            Findings.num_words(power_of_2(max_num_seqs), LONGEST_DRAFT), dtype=torch.int32, device=self.device
        )
        self._answers: dict[tuple[int, int], list[Answer]] = {}
        self._num_moves = 0
        """as often as that the draft store had moved when graphs were last captured"""
        self._num_cold = 0
        """passes, of those up to the end of the last step's verification"""
        self._num_padded = [0] if self.drafter is None else [0, 0]
        """likewise, of the target and of the draft"""

    def launch(self, work: Schedule, wish: DraftWish, scored: set[Sequence]) -> Flight:
        sequences = [*work.decodes, *(s for s, _ in work.prefills)] if work.prefills else work.decodes
        slots = self.table.update(sequences)
        is_consulted = wish.consultant is not None and wish.lengths.any()
        if is_consulted or self.table.any_edited(sequences, slots):
            self._forget()
            return self.host.launch(work, wish, scored)
        solo, self._solo = self._solo, None
        if solo is not None and solo.is_wanted(work, wish, self._num_changes):
            return self._take_solo(solo, work, slots, wish)
        if solo is not None:
            self.num_dropped += 1
            self.clock.forget()  # nobody waited meanwhile
        timing = self.clock.start()

        def prepare(proposals: DeviceProposals) -> _Prepared:
            # Behind a draft that a rule has ended, or a budget has cut, the device waits for its next pass. Whoever
            # looks at signals without either has one at times, and the same graphs are to do.
            in_parts = wish.is_watched and bool(proposals.lengths.any())
            return self._prepare(work, sequences, slots, proposals, scored, in_parts)

        # Whatever is cut off or read besides is known later, or not prepared quickly.
        can_foresee = wish.budget is None and not work.prefills
        verification = _Verification(prepare, lambda prepared: self._queue(prepared, timing), self.drafts, can_foresee)
        is_by_heart = self._goes_by_heart(wish)
        proposals, known = self._draft(
            work.decodes, slots[: len(work.decodes)], wish, timing, verification, is_by_heart
        )
        flight = self._verify(work, slots, wish, proposals, known, verification.of(proposals), timing)
        # A draft that follows on a dropped one began before anybody looked at the clock.
        flight.is_padded = flight.is_padded or solo is not None or is_by_heart
        flight.is_by_heart = is_by_heart
        return flight

    def _goes_by_heart(self, wish: DraftWish) -> bool:
        """Whether to draft as far as the rule expects instead of asking it. Where a device makes steps alone, one that
        it cannot make, since somebody joins or has to read, is queued as a whole: to hear of every decision takes
        longer than it is worth."""
        is_wanted = self.makes_solos and self._can_be_alone and wish.is_steady and can_go_by_heart(wish)
        if not is_wanted or self._num_by_heart >= _MOST_BY_HEART:
            return False
        self._num_by_heart += 1
        self.num_by_heart += 1
        return True

    def _take_solo(self, solo: Solo, work: Schedule, slots: IntArray, wish: DraftWish) -> DeviceFlight:
        """The step has been made already."""
        flight, rows = solo.flight, solo.rows_of(work.decodes)
        assert self.drafter is not None
        assert rows is not None
        flight.wish, flight.finish, flight.judged, flight.rows = wish, self._finish_solo, work.decodes, rows
        # Those who have ended were in it, too, and might have drafted if the device did not know.
        flight.is_padded = flight.is_padded or len(rows) < len(solo.caps)
        self.drafter.forget_ahead()
        self.num_solos += 1
        self._num_by_heart = 0
        self._look_ahead(work, slots, flight, solo.caps[rows])
        return flight

    def _look_ahead(self, work: Schedule, slots: IntArray, flight: DeviceFlight, num_drafted: IntArray) -> None:
        """While the host looks at the verdict the device makes the next step, or the draft reads what stood. Drafts of
        this step have these lengths, at most."""
        caught_up = flight.proposals.is_caught_up
        if self.drafter is None or caught_up is None:
            return
        # Where others have ended the next step is left to the host: mostly somebody joins in it.
        is_whole = flight.rows is None or len(flight.rows) == len(caught_up)
        if not is_whole or not self._queue_solo(work, slots, flight, num_drafted):
            self._read_ahead(work.decodes, slots[: len(work.decodes)], flight, num_drafted)

    def _queue_solo(self, work: Schedule, slots: IntArray, flight: DeviceFlight, num_drafted: IntArray) -> bool:
        """The step after `flight`, whose verdict nobody has seen, if the device can make it alone."""
        drafter, decodes, wish = self.drafter, work.decodes, flight.wish
        caught_up = flight.proposals.is_caught_up
        if drafter is None or not self.makes_solos or not self._can_be_alone or caught_up is None:
            return False
        max_context = drafter.model.config.max_position_embeddings
        rule = solo_rule(work, wish, num_drafted, caught_up, max_context)
        if rule is None or drafter.needs_room(len(decodes) * (LONGEST_SOLO + 1), 0):
            return False
        context = max(len(sequence.tokens) for sequence in decodes) + int(num_drafted.max()) + 1 + rule.longest
        sampling = self.table.variant(slots)
        try:
            setting = self._solo_setting(drafter, len(decodes), sampling, rule, context)
        except (ProgramError, torch.OutOfMemoryError) as error:
            # Nothing but passes of nobody have been made.
            warnings.warn(f"The host is asked at every step: {error}", stacklevel=2)
            self._can_be_alone = False
            self._solo_settings.clear()
            return False
        blocks = [sequence.block_table[: -(-context // BLOCK_SIZE)] for sequence in decodes]
        emitted = flight.read.findings.emitted
        news = SoloNews(
            rule,
            decodes,
            slots,
            self.table.counters(decodes, sampling[0] or self._rates is not None, num_steps_later=1),
            self.table.tables(slots, max(map(len, blocks))),
            (int(emitted.storage_offset()), emitted.shape[1]),
        )
        flight.timing.go_on()
        self._solo_turn = 1 - self._solo_turn
        setting.run(news, self.table, self._solo_turn)
        drafter.have_read_ahead(decodes, caught_up)
        timing = self.clock.start()
        read: _Read = setting.result
        answer = self._fetch(read.findings, flight.answer)
        timing.judged.record()
        is_cold, is_padded = self._count_unusual(has_drafts=True)
        proposals = DeviceProposals.nothing(len(decodes))
        proposals.is_caught_up = caught_up
        following = DeviceFlight(
            decodes,
            proposals.lengths,
            wish,
            proposals,
            0,
            None,
            read,
            answer,
            timing,
            _refuse,  # until it counts: it must not hold this, which would hold it
            context,
            is_cold,
            is_padded,
            turn=self._solo_turn,
        )
        self._solo = Solo(following, rule.caps, blocks, self._num_changes)
        return True

    @property
    def _num_changes(self) -> tuple[int, ...]:
        """How often graphs, or what they point to, have been given up."""
        assert self.drafter is not None
        return self.drafts.num_moves, self.passes.num_forgotten, self.drafter.passes.num_forgotten

    def _solo_setting(
        self, drafter: DeviceDrafter, count: int, sampling: tuple[bool, bool], rule: SoloRule, context: int
    ) -> SoloSetting:
        self._make_room(most_rows())
        drafter.look_for_verdicts(self._findings)
        if self._num_changes != self._solo_changes:
            self._solo_settings.clear()
            self._solo_changes = self._num_changes
        size = power_of_2(count)
        key = (size, rule.longest, sampling)
        setting = self._solo_settings.get(key)
        if setting is None or context > setting.room:
            draft = SoloDraft(drafter, size, sampling, context)
            variant = _Variant(*sampling, False, _longest_judged(rule.longest, in_parts=True), is_solo=True)
            setting = SoloSetting(draft, self.passes, size, rule.longest, context, variant, _more_arrays_of_graph)
            setting.prepare(drafter.state, self.drafts.signals, self._told)
            self._solo_settings[key] = setting
        return setting

    def rehearse(self, most: int) -> None:
        if self.drafter is not None:
            with torch.inference_mode(), device_context(self.device):
                self.drafter.rehearse(most)
                self._rehearse_verifications(most)

    def _rehearse_verifications(self, most: int) -> None:
        variant = _Variant(False, False, False, _longest_judged(1, in_parts=True))
        most = min(most, MOST_GRAPH_TOKENS)

        def farthest(size: int) -> int:
            return ragged_bucket(min(size * (1 + _MOST_REHEARSED), MOST_GRAPH_TOKENS))

        self._make_room(farthest(power_of_2(most)))  # or graphs would be given up on the way
        for size in sorted({power_of_2(count) for count in range(1, most + 1)}):
            for num_tokens in ragged_buckets(size // 2 + 2, farthest(size)):
                count = min(size, most, num_tokens - 1)
                lengths = np.full(count, num_tokens // count)
                lengths[: num_tokens % count] += 1
                shape = self.passes.shape(ragged_rows(lengths), lengths, None, in_parts=True, variant=variant)
                self.passes.rehearse(shape, _more_arrays_of_graph(shape))

    def has_made(self, decodes: list[Sequence]) -> bool:
        return self._solo is not None and self._solo.rows_of(decodes) is not None

    def follow(self, flight: Flight) -> Flight | None:
        if not isinstance(flight, DeviceFlight) or flight.drafted.any() or flight.entry is None:
            return None
        if self._solo is not None:  # it writes to the same places
            return None
        entry = flight.entry
        has_room = flight.longest_context < entry.shape.table_width * BLOCK_SIZE
        if not has_room or not self.passes.can_repeat(entry):
            return None
        timing = self.clock.start()
        timing.begin()
        timing.drafted.record()
        step_on(entry.arrays, flight.read.findings.emitted, entry.shape.table_width)
        read: _Read = self.passes.repeat(entry)
        flight.is_followed = True
        answer = self._fetch(read.findings, flight.answer)
        timing.judged.record()
        longest = flight.longest_context + 1
        return replace(
            flight,
            read=read,
            answer=answer,
            timing=timing,
            longest_context=longest,
            is_cold=False,
            is_followed=False,
        )

    def recover(self) -> None:
        # Graphs hold much memory, and what they point to may be gone.
        self._solo_settings.clear()
        self.passes.forget()
        if self.drafter is not None:
            self.drafter.passes.forget()
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reset(self) -> None:
        self._forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget(self) -> None:
        """What comes next does not follow on the last step."""
        self._solo = None
        self.clock.forget()
        if self.drafter is not None:
            self.drafter.forget_ahead()

    def _draft(
        self,
        decodes: list[Sequence],
        slots: IntArray,
        wish: DraftWish,
        timing: Timing,
        verification: _Verification,
        is_by_heart: bool,
    ) -> tuple[DeviceProposals, IntArray | None]:
        """What is drafted, and the tokens themselves where the host knows them."""
        drafter, lengths, stop = self.host.drafter, wish.lengths, wish.stop
        if is_by_heart:
            lengths, stop = expected_lengths(wish), None
        if drafter is None or not lengths.any():
            if self.drafter is not None:
                self.drafter.forget_ahead()
            return DeviceProposals.nothing(len(decodes)), None
        if self.drafter is not None:
            # With a rule most drafts end early: there is room for what is drafted when it is drafted.
            num_rows = int(lengths.sum()) if wish.stop is None else len(decodes)
            if wish.stop is not None and len(decodes) <= MOST_ALONE:
                num_rows = len(decodes) * (LONGEST_SOLO + 1)  # in one place, however far they go
            self.drafter.make_room(num_rows, len(decodes))
            drafts = self.drafter.propose(decodes, slots, lengths, timing.begin, stop, wish.is_watched, verification)
            return self._cut(drafts, wish), None
        proposals = propose(drafter, decodes, wish)
        valid = np.arange(proposals.tokens.shape[1]) < proposals.lengths[:, None]
        rows = np.where(valid, np.cumsum(valid).reshape(valid.shape) - 1, -1)
        signals = np.tile(np.array([*SURE, 1.0], dtype=np.float32), (valid.sum(), 1)) if wish.wants_signals else None
        drafts = DeviceProposals(
            proposals.lengths, rows, point_mass=True, num_passes=proposals.num_passes, signals=signals
        )
        return drafts, proposals.tokens.cpu().numpy()[valid]

    def _cut(self, drafts: DeviceProposals, wish: DraftWish) -> DeviceProposals:
        """Without what is over the budget, for which the host must have seen the signals."""
        if wish.budget is None or not drafts.rows.shape[1]:
            return drafts
        drafts.signals = self.drafts.fetch_signals(int(drafts.rows.max()) + 1, wait=True)
        column = SIGNALS.index(wish.budget.signal)
        confidences = drafts.signals[drafts.rows, column].astype(np.float64)
        return drafts.cut(wish.budget.select(confidences, drafts.lengths, wish.chosen))

    def _prepare(
        self,
        work: Schedule,
        sequences: list[Sequence],
        slots: IntArray,
        proposals: DeviceProposals,
        scored: set[Sequence],
        in_parts: bool,
    ) -> _Prepared:
        if self._num_moves != self.drafts.num_moves:
            self.passes.forget()
            self._num_moves = self.drafts.num_moves
        judged = judged_sequences(work) if work.prefills else work.decodes
        query_lens = 1 + proposals.lengths
        drafted = proposals.lengths
        if work.prefills:
            query_lens = np.concatenate((query_lens, [chunk for _, chunk in work.prefills]))
            drafted = np.pad(drafted, (0, len(judged) - len(work.decodes)))
        rows = ragged_rows(query_lens)
        judged_rows = ragged_rows(1 + drafted) if work.prefills and judged else rows if judged else None
        contexts = np.array([s.num_computed for s in sequences], dtype=np.int64) + query_lens
        judged_slots = np.array([s.slot for s in judged], dtype=np.int64) if work.prefills else slots
        places = logit_places(work, rows, scored) if work.prefills else None
        variant = self._variant(judged_slots, drafted, proposals.point_mass, in_parts)
        num_judged_rows = judged_rows.count if judged_rows else 0
        # A captured pass judges whatever it has logits of.
        is_plain = places is None or 0 < num_judged_rows == len(places)
        num_logits = None if places is None else len(places)
        shape = self.passes.shape(rows, contexts, num_logits, is_plain, in_parts, variant=variant)
        self._make_room(shape.num_rows)

        entry, sheet = self.passes.prepare(shape, lambda: _more_arrays(shape, num_judged_rows, len(judged)))
        host = sheet.arrays
        tables = self.table.tables(slots, shape.table_width)
        self.passes.write(shape, sheet, rows, contexts, tables)
        write_tokens(host, work, rows, proposals)
        if places is not None:
            host["logit_rows"][: len(places)] = places
        if judged_rows is not None:
            write_judged(sheet, judged_rows, proposals)
            self.table.write_draws(
                sheet, judged_slots, self.table.counters(judged, variant.sampled or self._rates is not None)
            )
        longest_context = int(contexts.max())
        return _Prepared(
            proposals.lengths, judged, drafted, num_judged_rows, entry, sheet, longest_context, self._num_moves
        )

    def _queue(self, prepared: _Prepared, timing: Timing) -> None:
        """The device does it behind all that was queued before."""
        timing.begin()
        timing.drafted.record()
        prepared.read = self.passes.run(prepared.entry, prepared.sheet)

    def _verify(
        self,
        work: Schedule,
        slots: IntArray,
        wish: DraftWish,
        proposals: DeviceProposals,
        known: IntArray | None,
        prepared: _Prepared,
        timing: Timing,
    ) -> DeviceFlight:
        if known is not None:
            self.drafts.tokens[: len(known)].copy_(torch.from_numpy(known.astype(np.int32)))
        if prepared.read is None:
            self._queue(prepared, timing)
        read = prepared.read
        assert read is not None
        answer = self._fetch(read.findings, None)
        if wish.wants_signals and proposals.signals is None and proposals.rows.shape[1]:
            proposals.signals = self.drafts.fetch_signals(int(proposals.rows.max()) + 1, wait=False)
        timing.judged.record()
        # Counted before the draft reads ahead, which is part of the next step.
        is_cold, is_padded = self._count_unusual(has_drafts=proposals.num_passes > 0)
        flight = DeviceFlight(
            prepared.judged,
            prepared.drafted,
            wish,
            proposals,
            prepared.num_judged_rows,
            prepared.entry,
            read,
            answer,
            timing,
            self._finish,
            prepared.longest_context,
            is_cold,
            is_padded,
        )
        self._look_ahead(work, slots, flight, proposals.lengths)
        return flight

    def _count_unusual(self, has_drafts: bool) -> tuple[bool, bool]:
        """Whether there were cold passes since the last time, and larger ones than were asked for. A draft that read
        ahead in vain is part of no step."""
        cold, padded = self._num_cold, self._num_padded
        runners = [self.passes] if self.drafter is None else [self.passes, self.drafter.passes]
        self._num_cold = sum(runner.num_cold for runner in runners)
        self._num_padded = [runner.num_padded for runner in runners]
        added = [now > before for now, before in zip(self._num_padded, padded, strict=True)]
        return self._num_cold > cold, any(added if has_drafts else added[:1])

    def _read_ahead(self, decodes: list[Sequence], slots: IntArray, flight: DeviceFlight, most: IntArray) -> None:
        """While the host looks at the verdict, the draft reads what stood of drafts that have these lengths at most."""
        emitted, caught_up = flight.read.findings.emitted, flight.proposals.is_caught_up
        assert self.drafter is not None
        assert caught_up is not None
        rows = np.arange(len(decodes)) if flight.rows is None else flight.rows
        places = (int(emitted.storage_offset()), emitted.shape[1])
        if self.drafter.read_ahead(decodes, slots, most, caught_up[rows], self._findings, places, rows):
            flight.timing.read_ahead()

    def _variant(self, slots: IntArray, drafted: IntArray, point_mass: bool, in_parts: bool) -> _Variant:
        if len(slots) == 0:
            return _Variant(False, False, False, 0)
        return _Variant(*self.table.variant(slots), point_mass, _longest_judged(int(drafted.max()), in_parts))

    def _body(self, entry: Pass) -> Generator[None, None, _Read]:
        """Read, and judge what was read."""
        shape, arrays, variant = entry.shape, entry.arrays, _Variant(*entry.shape.variant)
        hidden = yield from self.model.read_in_parts(entry.batch, self.host.target.cache)
        logits = self._logits[: shape.num_rows]
        if shape.num_rows:
            self.model.logits(hidden, entry.batch.logit_rows, out=logits)
        moment = None
        if not variant.is_solo:
            moment = Moment(self.device)
            moment.record()
        findings = Findings.within(self._findings, len(arrays["lengths"]), variant.longest)
        if len(arrays["lengths"]):
            judgement = Judgement(
                row_sequences=arrays["row_sequences"],
                row_depths=arrays["row_depths"],
                row_drafts=arrays["row_drafts"],
                starts=arrays["judged_starts"],
                lengths=arrays["lengths"],
                draws=draws_of(arrays),
            )
            store = self.drafts.store if variant.longest else None
            judged_logits = logits[: len(arrays["row_sequences"])]
            judge(
                judged_logits,
                judgement,
                store,
                findings,
                variant.sampled,
                variant.truncated,
                variant.point_mass,
                self._rates,
            )
        return _Read(logits, findings, moment)

    def _fetch(self, findings: Findings, taken: Answer | None) -> Answer:
        """Queue the one copy back, not to where another step's answer is still waited for."""
        num_sequences, longest = findings.klds.shape
        answers = self._answers.get((num_sequences, longest))
        if answers is None:
            pinned = self.device.type == "cuda"
            answers = [Answer.blank(num_sequences, longest, pinned) for _ in range(2)]
            self._answers[num_sequences, longest] = answers
        answer = answers[answers[0] is taken]
        answer.buffer.copy_(findings.buffer[: len(answer.buffer)], non_blocking=True)
        return answer

    def _finish_solo(self, flight: DeviceFlight) -> Landing:
        assert flight.turn is not None
        assert flight.rows is not None
        flight.timing.judged.wait()
        were_caught_up, rows = flight.proposals.is_caught_up, flight.rows
        assert were_caught_up is not None
        flight.proposals, draft_s = told_proposals(self._told, flight.turn, len(were_caught_up), rows)
        if not flight.wish.lengths.any():  # nobody had room, and nothing but that is to be told of it
            flight.proposals.num_passes, flight.is_padded = 0, True
        flight.drafted = flight.proposals.lengths
        flight.num_judged_rows = int(flight.drafted.sum()) + len(flight.judged)
        for i in np.flatnonzero(were_caught_up[rows]).tolist():
            sequence, length = flight.judged[i], int(flight.drafted[i])
            sequence.num_draft_computed = len(sequence.tokens) + max(length - 1, 0)
        return self._describe(flight, flight.timing.seconds_alone(draft_s))

    def _finish(self, flight: DeviceFlight) -> Landing:
        return self._describe(flight, flight.timing.seconds(None if flight.is_followed else flight.read.moment))

    def _describe(self, flight: DeviceFlight, seconds: Seconds) -> Landing:
        drafted, answer = flight.drafted, flight.answer
        rows = slice(len(flight.judged)) if flight.rows is None else flight.rows
        accepted = answer.accepted[rows].astype(np.int64)
        emitted = answer.emitted[rows].tolist()
        klds = entropies = np.empty(0)
        if answer.klds.shape[1] and drafted.any():
            valid = np.arange(answer.klds.shape[1]) < drafted[:, None]
            klds, entropies = answer.klds[rows][valid].astype(float), answer.entropies[rows][valid].astype(float)
        verdict = Verdict(
            accepted,
            [row[: length + 1] for row, length in zip(emitted, accepted.tolist(), strict=True)],
            klds,
            entropies,
        )
        split, logits = flight.num_judged_rows, flight.read.logits
        signals, wish = flight.proposals.signals_of_drafts(), flight.wish
        return Landing(
            verdict,
            logits[:split],
            logits[split:],
            seconds,
            flight.proposals.num_passes,
            signals[:, len(SIGNALS)] if signals is not None and wish.want_token_probs else None,
            signals[:, : len(SIGNALS)] if signals is not None and wish.want_draft_signals else None,
            is_cold=flight.is_cold,
            is_padded=flight.is_padded,
            is_resumed=flight.proposals.is_resumed,
            is_by_heart=flight.is_by_heart,
        )

    def _make_room(self, num_rows: int) -> None:
        # Shared by all graphs, which never run at the same time: a copy for each would be gigabytes.
        if self._logits.shape[0] < num_rows:
            self.passes.forget()
            size = (max(num_rows, min(2 * self._logits.shape[0], MOST_GRAPH_TOKENS)), self._logits.shape[1])
            self._logits = self._logits[:0].clone()
            self._logits = self._logits.new_empty(size)


def _refuse(flight: DeviceFlight) -> Landing:
    raise RuntimeError("A step that nobody has planned cannot land.")


def _longest_judged(longest: int, in_parts: bool) -> int:
    """What verdicts on drafts of up to so many tokens are compiled for."""
    # At least so many: kernels, and graphs, for every length up to it would help nobody; less so where it changes.
    rows = power_of_2(max(longest + 1, 32 if in_parts else 8))
    return min(rows - 1, LONGEST_DRAFT) if longest else 0


def _more_arrays_of_graph(shape: PassShape) -> dict[str, int]:
    return _more_arrays(shape, shape.num_rows, shape.num_seqs)


def _more_arrays(shape: PassShape, num_rows: int, num_judged: int) -> dict[str, int]:
    """What a verification is told beside its batch, and how much room that takes."""
    if shape.is_graph:
        num_rows, num_judged = shape.num_rows, shape.num_seqs
    more = dict.fromkeys(("row_sequences", "row_depths", "row_drafts"), num_rows)
    return more | {"judged_starts": num_judged, "lengths": num_judged, **draw_sizes(num_judged)}
