"""`AsyncLLM`: one engine for many callers at once, for servers.

Steps run on a thread of their own, so that the event loop stays free; callers await chunks. The engine itself is
touched by that thread alone: requests and aborts reach it through a queue. What others may read of it at any time are
numbers, for metrics.

Whoever wants to see all of it adds a function to `AsyncLLM.listeners`: after every step the engine's thread calls it
with the `StepOutput` (chunks of all requests, those that finished) whose `records` then hold a `StepRecord` of every
sequence that decoded. The first `accepted` tokens of a chunk are the draft's, the last one is the target's own; a
chunk without a record ended a prompt. `AsyncLLM.engine.requests` may be read within the call, and whoever finished or
left is no longer in it. A listener must be quick and hand on what takes long. Records are not made while there is no
listener; it may be added and removed at any time from any thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from dsde.core.call_room import call_with_room
from dsde.core.errors import DsdeError, OutOfMemory
from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.engine import Engine, StepOutput

logger = logging.getLogger(__name__)

Event = StreamChunk | RequestOutput | BaseException
Listener = Callable[[StepOutput], None]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Caller:
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event]

    def tell(self, event: Event) -> None:
        _send(self.loop, [(self, event)])


def _send(loop: asyncio.AbstractEventLoop, events: list[tuple[_Caller, Event]]) -> None:
    def deliver() -> None:
        for caller, event in events:
            caller.events.put_nowait(event)

    with suppress(RuntimeError):  # the callers' event loop has closed: nobody is left to tell
        loop.call_soon_threadsafe(deliver)


@dataclass(slots=True)
class _Job:
    """Something the engine's thread is to do for somebody."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]
    """who is told where that is impossible"""


class EngineStopped(DsdeError):
    """The engine was shut down, or failed, while a request was under way."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt and what is wanted of it, under a name that no other request under way has."""

    prompt: str | Seq[int]
    params: SamplingParams
    request_id: str
    trace: bool = False


class AsyncLLM:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.listeners: list[Listener] = []
        self.failure: BaseException | None = None
        """what ended the engine, if it was not `shutdown`"""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._callers: dict[str, _Caller] = {}
        self._numbers = itertools.count()
        self._gate = threading.Lock()
        """held to ask for something and to stop: whoever asks is either seen by the thread or refused"""
        self._stopped = False
        self._thread = threading.Thread(target=call_with_room, args=(self._run,), name="dsde-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._stopped

    async def generate(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        trace: bool = False,
    ) -> AsyncGenerator[StreamChunk | RequestOutput]:
        """Chunks as they come, then the finished request. Leaving the loop, or being cancelled, ends the request."""
        name = request_id or f"async-{next(self._numbers)}"
        async with aclosing(self.generate_all([Submission(prompt, params, name, trace)])) as events:
            async for event in events:
                yield event

    async def generate_all(self, submissions: Seq[Submission]) -> AsyncGenerator[StreamChunk | RequestOutput]:
        """The same for several requests that belong together: all are taken or none, and they end together."""
        caller = _Caller(asyncio.get_running_loop(), asyncio.Queue())
        self._put(_Job(lambda: self._add(submissions, caller), caller.tell))
        num_open = len(submissions)
        try:
            while num_open:
                event = await caller.events.get()
                if isinstance(event, BaseException):
                    raise event
                num_open -= isinstance(event, RequestOutput)
                yield event
        finally:
            if num_open:
                self._jobs.put(_Job(lambda: self._abort(submissions, caller), caller.tell))

    async def ask(self, read: Callable[[Engine], T]) -> T:
        """What `read` finds out from the engine, between two steps and on the engine's thread."""
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(read(self.engine))

        def fail(error: BaseException) -> None:
            if not answer.cancelled():
                answer.set_exception(error)

        self._put(_Job(run, fail))
        return await asyncio.wrap_future(answer)

    def shutdown(self) -> None:
        """Stop stepping; requests under way end with an error. Returns when the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _put(self, job: _Job) -> None:
        with self._gate:
            if self._stopped:
                raise EngineStopped("The engine has been shut down.") from self.failure
            self._jobs.put(job)

    def _run(self) -> None:
        reason = EngineStopped("The engine has been shut down.")
        try:
            while self._take_jobs():
                self.engine.watched = bool(self.listeners)
                try:
                    output = self.engine.step()
                except OutOfMemory as error:  # once may be bad luck: graphs have been given back since
                    output = self._step_again(error)
                self._tell(output)
                for listener in list(self.listeners):
                    self._call(listener, output)
        except BaseException as error:  # whatever it was, nobody may be left waiting
            self.failure = error
            reason = EngineStopped(f"The engine failed: {error}")
            reason.__cause__ = error
        with self._gate:
            self._stopped = True
        self._end_all(reason)

    def _tell(self, output: StepOutput) -> None:
        """Hand out what a step gave, waking every event loop once."""
        news: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Caller, Event]]] = defaultdict(list)
        for chunk in output.chunks:
            if caller := self._callers.get(chunk.request_id):
                news[caller.loop].append((caller, chunk))
        for finished in output.finished:
            if caller := self._callers.pop(finished.request_id, None):
                news[caller.loop].append((caller, finished))
        for loop, events in news.items():
            _send(loop, events)

    def _call(self, listener: Listener, output: StepOutput) -> None:
        try:
            listener(output)
        except Exception:  # somebody who only looks on must not stop the engine
            logger.exception("A listener failed and is removed.")
            self.listeners.remove(listener)

    def _step_again(self, shortage: OutOfMemory) -> StepOutput:
        """A second attempt; if that fails as well, whoever is running is told, and the engine is ready for others."""
        try:
            return self.engine.step()
        except OutOfMemory:
            for caller in set(self._callers.values()):
                caller.tell(shortage)
            for name in self._callers:
                self.engine.abort(name)
            self._callers.clear()
            return StepOutput()

    def _take_jobs(self) -> bool:
        """Do what was asked for, waiting for it while there is nothing else to do; False at shutdown.

        A step follows in any case, so that listeners learn of those who left.
        """
        is_idle = not self.engine.has_work
        while True:
            try:
                job = self._jobs.get(block=is_idle)
            except queue.Empty:
                return True
            if job is None:
                return False
            is_idle = False
            try:
                job.run()
            except Exception as error:  # what cannot be done is its caller's trouble alone
                job.fail(error)

    def _add(self, submissions: Seq[Submission], caller: _Caller) -> None:
        try:
            for one in submissions:
                self.engine.add(one.prompt, one.params, one.request_id, one.trace)
                self._callers[one.request_id] = caller
        except Exception:
            self._abort(submissions, caller)
            raise

    def _abort(self, submissions: Seq[Submission], caller: _Caller) -> None:
        for one in submissions:
            # The name may meanwhile belong to somebody else's request.
            if self._callers.get(one.request_id) is caller:
                del self._callers[one.request_id]
                self.engine.abort(one.request_id)

    def _end_all(self, reason: EngineStopped) -> None:
        for caller in set(self._callers.values()):
            caller.tell(reason)
        for name in self._callers:
            self.engine.abort(name)
        self._callers.clear()
        while not self._jobs.empty():
            if job := self._jobs.get():
                job.fail(reason)
