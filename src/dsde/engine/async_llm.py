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
from contextlib import suppress
from dataclasses import dataclass

from dsde.core.errors import DsdeError, OutOfMemory
from dsde.core.outputs import RequestOutput, StreamChunk
from dsde.core.params import SamplingParams
from dsde.engine.engine import Engine, StepOutput

logger = logging.getLogger(__name__)

Event = StreamChunk | RequestOutput | BaseException
Listener = Callable[[StepOutput], None]


@dataclass(slots=True)
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
    """Something the engine's thread is to do for a caller."""

    caller: _Caller
    run: Callable[[], None]


class EngineStopped(DsdeError):
    """The engine was shut down, or failed, while a request was under way."""


class AsyncLLM:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.listeners: list[Listener] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._callers: dict[str, _Caller] = {}
        self._numbers = itertools.count()
        self._gate = threading.Lock()
        """held to ask for a request and to stop: a request is either seen by the thread or refused"""
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dsde-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        trace: bool = False,
    ) -> AsyncGenerator[StreamChunk | RequestOutput]:
        """Chunks as they come, then the finished request. Leaving the loop, or being cancelled, ends the request."""
        name = request_id or f"async-{next(self._numbers)}"
        caller = _Caller(asyncio.get_running_loop(), asyncio.Queue())
        with self._gate:
            if self._stopped:
                raise EngineStopped("The engine has been shut down.")
            self._jobs.put(_Job(caller, lambda: self._add(name, prompt, params, trace, caller)))
        done = False
        try:
            while not done:
                event = await caller.events.get()
                if isinstance(event, BaseException):
                    done = True
                    raise event
                done = isinstance(event, RequestOutput)
                yield event
        finally:
            if not done:
                self._jobs.put(_Job(caller, lambda: self._abort(name, caller)))

    def shutdown(self) -> None:
        """Stop stepping; requests under way end with an error. Returns when the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

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
            for name, caller in self._callers.items():
                caller.tell(shortage)
                self.engine.abort(name)
            self._callers.clear()
            return StepOutput()

    def _take_jobs(self) -> bool:
        """Do what callers asked for, waiting for it while there is nothing else to do; False at shutdown."""
        while True:
            try:
                job = self._jobs.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if job is None:
                return False
            try:
                job.run()
            except Exception as error:  # a request that cannot be taken is its caller's trouble alone
                job.caller.tell(error)

    def _add(self, name: str, prompt: str | Seq[int], params: SamplingParams, trace: bool, caller: _Caller) -> None:
        self.engine.add(prompt, params, name, trace)
        self._callers[name] = caller

    def _abort(self, name: str, caller: _Caller) -> None:
        # The name may meanwhile belong to somebody else's request.
        if self._callers.get(name) is caller:
            del self._callers[name]
            self.engine.abort(name)

    def _end_all(self, reason: EngineStopped) -> None:
        waiting = list(self._callers.values())
        while not self._jobs.empty():
            if job := self._jobs.get():
                waiting.append(job.caller)
        for caller in waiting:
            caller.tell(reason)
        for name in self._callers:
            self.engine.abort(name)
        self._callers.clear()
