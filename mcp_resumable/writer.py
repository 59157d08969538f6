"""The writing side: claims generations, opens streams, stores events, and keeps count of what could not be stored.

Per session there is one writer of events, the SDK's router, and it hands over one event at a time. A storage in this
process has it before the router goes on. Where the storage is shared, and so somewhere else, a task of each call stores
what was handed over meanwhile (`_deliver`), in order and at most one append at a time; see `pipeline`.

Beside them, at any await, may run: the POSTs of the session (`prime`), an operator who moves generations or streams
(`advance`, `restart`), and resuming GETs that want to know what was lost (`settle`). These take the binding's lock; an
append takes it only when it finds that something has moved, which the storage tells it by refusing the write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
from pydantic import BaseModel, RootModel, TypeAdapter

from mcp_resumable.cursor import STANDALONE, Generation, StreamId
from mcp_resumable.ledger import Ledger
from mcp_resumable.pipeline import Pipeline, Unstored
from mcp_resumable.session import SDK_STANDALONE, Call, SessionBinding, when_current_task_ends
from mcp_resumable.shared import SharedStorage, digest_of
from mcp_resumable.storage import AppendRefusedError, Storage

if TYPE_CHECKING:
    from pydantic_core import SchemaSerializer

__all__ = ["Writer", "known"]

# A row of holes says no more than one of them: so many are told at most, however long the storage was away.
_MAX_HOLES = 100

# What a generation gives to the first request's stream.
_FIRST_ORDINAL = 1


class Writer:
    """Writes sessions to a storage."""

    def __init__(self, storage: Storage, ledger: Ledger) -> None:
        self.storage = storage
        self.shared = storage if isinstance(storage, SharedStorage) else None
        self.ledger = ledger
        # Sessions that are over here and not yet in the storage; ended there by the next operation.
        self.over: deque[tuple[str, Generation | None]] = deque()

    async def attach(self, binding: SessionBinding, session_id: str) -> None:
        """Give a binding its session id and claim its first generation; a storage that fails is asked again later."""
        binding.session_id = session_id
        if self.shared is not None:
            binding.standalone.pipeline = Pipeline()  # Its frames are made from what is stored.
        try:
            await self.end_what_is_over()
            async with binding.lock:
                await self._claim(binding)
        except Exception as exc:
            self.ledger.fault(binding, exc)
        finally:
            binding.attached.set()

    async def advance(self, binding: SessionBinding) -> Generation | None:
        """Move a session to its next generation; None where the session is over."""
        for call in (binding.standalone, *binding.calls.values()):
            if call.pipeline is not None:
                await call.pipeline.until_settled()  # What was sent before belongs to the generation before.
        generation: Generation | None = None
        async with binding.lock:
            # Shielded: the storage must not be left in a generation that the session's writer does not know.
            with anyio.CancelScope(shield=True):
                # Kept where the storage fails, since it may have moved all the same.
                binding.attempted_nonce = nonce = self.storage.new_nonce()
                generation = await self.storage.advance_generation(known(binding.session_id), nonce=nonce)
                if generation is not None and binding.status not in ("live", "ended"):
                    await self._own(binding, generation)
                if generation is None or binding.status == "ended":
                    return None
                await self._advance_to(binding, generation)
        return generation

    async def restart(self, binding: SessionBinding, request_id: str) -> None:
        """Begin the stream of an unanswered request anew.

        Raises:
            LookupError: When the session has no unanswered request with this id.
        """
        # What the earlier execution has sent may have reached the SDK's router but not yet this store; the router holds
        # one message at most and gets its turn now. Twice, since a woken task may have to wake another.
        await anyio.lowlevel.cancel_shielded_checkpoint()
        await anyio.lowlevel.cancel_shielded_checkpoint()
        call = binding.calls.get(request_id)
        async with binding.lock:
            if call is None or call.has_answer:  # Perhaps since it was found.
                raise LookupError(f"no unanswered request {request_id!a} in this session")
            with anyio.CancelScope(shield=True):
                # From here on nothing of the earlier execution is stored, and nothing of this one in its stream.
                call.execution += 1
                call.lost = 0
                if call.stream is None:
                    return  # Nothing was issued yet that could be resumed, or its stream is to be begun anew already.
                self._supersede(binding, [call])
                await self._reopen(binding, [call])

    async def revive(self, binding: SessionBinding) -> None:
        """Claim a generation where none is claimed: the storage failed before, or retention has dropped the session."""
        if binding.status in ("unclaimed", "evicted"):
            async with binding.lock:
                if binding.status in ("unclaimed", "evicted"):
                    await self._claim(binding)

    async def end_what_is_over(self) -> None:
        """End in the storage what the SDK has ended."""
        while self.over:
            session_id, generation = self.over.popleft()
            try:
                await self.storage.end_session(session_id, generation=generation)
            except BaseException:
                self.over.append((session_id, generation))
                raise

    def router_is_over(self, binding: SessionBinding) -> None:
        """Note that the SDK's router has ended, and with it the session, however that came about."""
        if binding.status != "ended":
            if binding.session_id is not None and not binding.outlives_server:
                # With the generation: a session that another writer has claimed since is no longer ours to end. Also
                # where none is known: a claim that failed may have taken effect.
                self.over.append((binding.session_id, binding.generation if binding.attempted_nonce is None else None))
            binding.end()

    def has_to_settle(self, binding: SessionBinding) -> bool:
        """Tell whether storage and binding may not agree."""
        return bool(binding.unsettled or self.over or binding.attempted_nonce) or binding.status == "unclaimed"

    async def settle(self, binding: SessionBinding) -> None:
        """Tell the storage what it missed: events, which a snapshot then shows as holes, and streams begun anew."""
        if self.over:
            await self.end_what_is_over()
        if binding.attempted_nonce is not None:
            await self._look_where_it_is(binding)
        async with binding.lock:
            if binding.status == "unclaimed":
                await self._claim(binding)
            while binding.unsettled:
                call = next(iter(binding.unsettled))
                lost = call.lost
                try:
                    if call.stream is None:
                        await self._open(binding, call)
                    if lost:
                        await self.storage.append(
                            known(binding.session_id),
                            known(binding.generation),
                            known(call.stream),
                            (None,) * min(lost, _MAX_HOLES),
                            is_terminal=call.is_answer_lost,
                        )
                except AppendRefusedError as refusal:
                    if await self._has_moved(binding, refusal):
                        continue  # What was lost was lost to the earlier generation.
                call.lost -= lost
                if not call.lost:  # More may have been lost meanwhile.
                    binding.unsettled.pop(call, None)

    async def prime(self, binding: SessionBinding, stream_id: str) -> str:
        """Return the event id of the place before the first event of a request's stream; `""` where there is none."""
        call = binding.calls.get(stream_id)
        if call is None:
            # The layer could not read a request that the SDK could.
            call = binding.calls[stream_id] = Call(request_id=stream_id)
            call.served.set()
        try:
            if binding.session_id is None:
                promised = Generation(1, binding.nonce)
                call.use(promised, StreamId.of_request(_FIRST_ORDINAL, stream_id))
            else:
                async with binding.lock:
                    await self._ensure_open(binding, call)
        except AppendRefusedError:
            return ""
        except Exception as exc:
            self.ledger.fault(binding, exc)
            return ""
        return f"{call.prefix}0"

    async def record(self, binding: SessionBinding, stream_id: str, message: Any) -> str:
        """Store an event and return its id, `""` where it was not stored. In the session's router; never raises."""
        if not binding.is_router_watched:
            binding.is_router_watched = True
            when_current_task_ends(lambda: self.router_is_over(binding))
        if binding.generation is None:
            await binding.attached.wait()
        call = binding.standalone if stream_id == SDK_STANDALONE else binding.calls.get(stream_id)
        if call is None or call.is_answered:
            return ""  # After the answer: nobody can ever ask for it.
        kind = content = _kind_of(message.__class__)
        if kind.is_root_model:
            content = _kind_of(message.root.__class__)
        is_answer = call.has_answer = not content.has_method and call is not binding.standalone
        execution = call.execution
        if content.has_id and call.connection is not None and not is_answer:
            call.connection.is_interactive = True  # A request.
        try:
            if binding.status in ("ended", "superseded"):
                return ""  # Nobody can ever ask for it; but an answer is noted.
            event = self._event_of(binding, call, message, kind)
            if call.pipeline is not None:
                return await self._hand_over(binding, call, call.pipeline, event, is_answer=is_answer)
            started = self.ledger.clock() if self.ledger.clock is not None else None
            prefix, seq = await self._append(binding, call, (event,), execution, is_answer=is_answer)
            if not seq:
                return ""
            self.ledger.stored(binding, event, started)
            return f"{prefix}{seq}"
        except Exception as exc:
            # Whatever it is, the router must live.
            if call.execution == execution:
                self._lose(binding, call, 1, is_answer=is_answer)
            self.ledger.fault(binding, exc)
            return ""
        finally:
            # No await from here to where the SDK hands the message on: the id stays taken until then.
            if is_answer:
                call.is_settled = call.is_answered = True
                binding.forget_if_done(call)

    def _event_of(self, binding: SessionBinding, call: Call, message: Any, kind: _Kind) -> bytes | None:
        """Return what is to be stored of a message; None where its place is a hole."""
        try:
            data = _dump(message, kind)
        except Exception as exc:  # It has no JSON text: a lone surrogate in a text, for example.
            self.ledger.fault(binding, exc)
            return None
        if len(data) > self.storage.retention.max_bytes:
            self.ledger.too_large(binding, call.request_id, len(data))
            return None
        return data

    async def _hand_over(
        self, binding: SessionBinding, call: Call, pipeline: Pipeline, event: bytes | None, *, is_answer: bool
    ) -> str:
        """Let an event be stored, and return the event id that it will have, if that can be told before it is stored.

        Of an answer it is told afterwards: a call ends when all of it is stored, or known to be lost.
        """
        started = self.ledger.clock() if self.ledger.clock is not None else None
        execution = call.execution
        await pipeline.until_room()
        promised_id = ""
        # Invariant: an event id is promised once, so `seq` is not lowered as long as the stream is the same.
        if call.stream is not None and binding.generation is not None and not is_answer:
            call.seq += 1
            promised_id = f"{call.prefix}{call.seq}"
        unstored = Unstored(
            event=event, promised_id=promised_id, execution=execution, is_answer=is_answer, started=started
        )
        pipeline.add(unstored)
        if not pipeline.is_running:
            pipeline.is_running = True
            known(self.shared).start_soon(partial(self._deliver, binding, call, pipeline))
        return promised_id or await pipeline.until_settled(unstored)

    async def _deliver(self, binding: SessionBinding, call: Call, pipeline: Pipeline) -> None:
        """Store what is handed over, as much at a time as has come meanwhile. In a task of its own; never raises."""
        while batch := pipeline.take():
            execution, is_answer = batch[0].execution, batch[-1].is_answer
            event_ids = [""] * len(batch)
            try:
                events = [unstored.event for unstored in batch]
                prefix, seq = await self._append(binding, call, events, execution, is_answer=is_answer)
            except Exception as exc:
                if call.execution == execution:
                    self._lose(binding, call, len(batch), is_answer=is_answer)
                self.ledger.fault(binding, exc)
            else:
                if seq:
                    event_ids = [f"{prefix}{number}" for number in range(seq - len(batch) + 1, seq + 1)]
                    if prefix == call.prefix:
                        call.seq = max(call.seq, seq)  # Promises may have fallen behind, where some were not made.
                    for unstored in batch:
                        self.ledger.stored(binding, unstored.event, unstored.started)
            # No await since the storage has answered: whoever moves the session finds that this call is over.
            call.is_settled = is_answer
            pipeline.settle(batch, event_ids)
        # No await since nothing was there to take.
        pipeline.is_running = False

    async def _append(
        self, binding: SessionBinding, call: Call, events: Sequence[bytes | None], execution: int, *, is_answer: bool
    ) -> tuple[str, int]:
        """Store events; return what their event ids begin with, and the seq of the last one: 0 where none is stored."""
        session_id, generation, stream, prefix = binding.session_id, binding.generation, call.stream, call.prefix
        is_as_it_was = not call.lost and call.execution == execution
        if is_as_it_was and session_id is not None and generation is not None and stream is not None:
            try:
                seq = await self.storage.append(session_id, generation, stream, events, is_terminal=is_answer)
                if not is_answer or (call.stream == stream and binding.generation == generation):
                    return prefix, seq
                # The call went on in another generation meanwhile, and its stream there ends with its answer too.
            except AppendRefusedError:
                pass  # Moved while this was under way, or no longer ours: told apart under the lock.
        async with binding.lock:
            if call.execution != execution:
                return "", 0  # Sent by an execution that has been superseded since.
            while True:
                if binding.status == "evicted" and call.stream is not None:
                    return "", 0  # A late event does not revive a session; a call that has sent nothing yet may.
                try:
                    await self._ensure_open(binding, call)
                    seq = await self.storage.append(
                        known(binding.session_id),
                        known(binding.generation),
                        known(call.stream),
                        (*(None for _ in range(min(call.lost, _MAX_HOLES))), *events),
                        is_terminal=is_answer,
                    )
                    break
                except AppendRefusedError as refusal:
                    if not await self._has_moved(binding, refusal):
                        return "", 0
            call.lost = 0
            binding.unsettled.pop(call, None)
            return call.prefix, seq

    def _lose(self, binding: SessionBinding, call: Call, count: int, *, is_answer: bool) -> None:
        """Note that events could not be stored: holes, of which the storage learns when it answers again."""
        call.lost += count
        call.is_answer_lost = is_answer
        binding.unsettled[call] = None
        binding.changes += 1
        # A tail is served from the storage and would wait for this event for ever. The POST's own connection gets it
        # from the SDK.
        if call.stream is not None:
            tail = binding.consumers.get(call.stream)
            if tail is not None and tail is not call.connection:
                tail.close()

    async def _ensure_open(self, binding: SessionBinding, call: Call) -> None:
        """Claim a generation and open the call's stream where that is still to be done. Under the lock."""
        if binding.status in ("unclaimed", "evicted"):
            await self._claim(binding)
        while call.stream is None:
            try:
                await self._open(binding, call)
            except AppendRefusedError as refusal:
                if await self._has_moved(binding, refusal):
                    continue
                if binding.status != "evicted":
                    raise
                # Evicted without our noticing, and here is a new call: the session goes on in its next generation.
                await self._claim(binding)

    async def _claim(self, binding: SessionBinding) -> None:
        """Claim the session's first generation, or the next after retention has dropped it. Under the lock."""
        session_id = known(binding.session_id)
        is_first = binding.status == "unclaimed"
        generation = await self.storage.open_session(session_id, nonce=binding.nonce if is_first else None)
        await self._own(binding, generation)
        if binding.status == "ended":
            self.over.append((session_id, generation))
            raise AppendRefusedError(None)
        for call in binding.calls.values():
            if is_first:
                call.origin = None  # The promised one, if any; the real one comes with the stream.
            else:
                call.lost += call.stream is not None  # What it has sent so far is gone.
        await self._move_to(binding, generation)

    async def _own(self, binding: SessionBinding, generation: Generation) -> None:
        """Have other workers know who serves the session, and for whom."""
        if self.shared is not None:
            await self.shared.own_session(known(binding.session_id), generation, digest_of(binding.credential))

    async def _look_where_it_is(self, binding: SessionBinding) -> None:
        """Find out whether a move that failed took effect all the same."""
        async with binding.lock:
            if binding.status == "live" and binding.attempted_nonce is not None:
                snapshot = await self.storage.snapshot(known(binding.session_id), None)
                await self._has_moved(binding, AppendRefusedError(snapshot.generation if snapshot else None))

    async def _advance_to(self, binding: SessionBinding, generation: Generation) -> None:
        """Go on in a generation that was begun on purpose. Under the lock."""
        for call in binding.calls.values():
            call.lost = 0  # What was lost was lost to the earlier generation.
        await self._move_to(binding, generation)

    async def _move_to(self, binding: SessionBinding, generation: Generation) -> None:
        """Go on in another generation: close what is superseded, open the running calls' streams. Under the lock."""
        running = [call for call in binding.calls.values() if call.stream is not None and not call.is_settled]
        if binding.status == "unclaimed":
            # Nothing is superseded: at most a cursor of the generation that was promised is out, mostly this one.
            for call in running:
                call.stream = None
        else:
            self._supersede(binding, running)
            binding.close_consumers()
            binding.unsettled.clear()
            binding.standalone.lost = 0
        binding.generation = generation
        binding.attempted_nonce = None
        binding.status = "live"
        binding.changes += 1
        binding.carried_seq = 0
        binding.standalone.prefix = f"{generation}:{STANDALONE}:"
        await self._reopen(binding, running)

    def _supersede(self, binding: SessionBinding, calls: list[Call]) -> None:
        """Take the streams of running calls from them, and close what carries those streams."""
        binding.changes += 1
        for call in calls:
            consumer = binding.consumers.pop(call.stream, None) if call.stream is not None else None
            call.stream = None
            for connection in (consumer, call.connection):
                if connection is not None:
                    connection.close()

    async def _reopen(self, binding: SessionBinding, calls: list[Call]) -> None:
        """Open running calls' next streams at once, so that clients find them.

        A failure is left to what comes next: an append, or a claim, which is not to find the stream before.
        """
        for call in calls:
            binding.unsettled[call] = None
            try:
                while call.stream is None:
                    try:
                        await self._open(binding, call)
                    except AppendRefusedError as refusal:
                        if not await self._has_moved(binding, refusal):
                            break
                if not call.lost:
                    binding.unsettled.pop(call, None)
            except Exception as exc:
                self.ledger.fault(binding, exc)

    async def _open(self, binding: SessionBinding, call: Call) -> None:
        generation = known(binding.generation)
        stream = await self.storage.open_stream(
            known(binding.session_id), generation, known(call.request_id), origin=call.origin
        )
        call.use(generation, stream)
        if call.connection is not None and not call.connection.is_closed:
            binding.take_over(stream, call.connection)

    async def catch_up(self, binding: SessionBinding) -> None:
        """Follow a session that another worker may have moved, or given up."""
        try:
            async with binding.lock:
                if binding.status == "live":
                    found = await known(self.shared).find_owner(known(binding.session_id))
                    is_over = found is None or found.is_abandoned
                    await self._has_moved(binding, AppendRefusedError(None if is_over else known(found).generation))
        except Exception as exc:
            self.ledger.fault(binding, exc)

    async def _has_moved(self, binding: SessionBinding, refusal: AppendRefusedError) -> bool:
        """The storage refused a write: find out what we are no longer. Under the lock.

        Returns:
            Whether the session goes on here, in a generation of which nothing was known until now.
        """
        if binding.status != "live":
            return False
        if refusal.current is None:
            if await self._is_abandoned(binding):
                self._note_abandoned(binding)
            else:
                self.note_evicted(binding)
        elif refusal.current != binding.generation:
            if await self._adopt(binding, refusal.current):
                return True
            if binding.status == "live":  # It may have ended meanwhile.
                binding.end("superseded")
                self.ledger.superseded(binding, refusal.current)
        return False

    async def _adopt(self, binding: SessionBinding, current: Generation) -> bool:
        """Go on in a session's current generation, if that is this writer's after all.

        So it is where a move of its own has failed although it took effect, or where it was begun elsewhere, as may be
        where the storage is shared, and the session is still this worker's to write.
        """
        if self.shared is None:
            is_its_own = current.nonce == binding.attempted_nonce
            if is_its_own:
                await self._advance_to(binding, current)
            return is_its_own
        session_id = known(binding.session_id)
        found = await self.shared.find_owner(session_id)
        if found is None or found.worker != self.shared.worker_id or found.generation == binding.generation:
            return False
        generation, is_lost = found.generation, found.is_forked
        if generation.counter <= known(binding.generation).counter:
            # The storage is one that has not seen the later ones, and this one may have been ours: its cursors are out.
            next_one = await self.storage.advance_generation(session_id)
            if next_one is None:
                return False
            generation, is_lost = next_one, True
        if binding.status != "live":
            return False
        for call in binding.calls.values():
            # After a fork, nobody knows what is left of what it has sent so far; otherwise it is void.
            has_sent = call.stream is not None or call.lost > 0
            call.lost = 1 if is_lost and has_sent else 0
        await self._move_to(binding, generation)
        return True

    async def _is_abandoned(self, binding: SessionBinding) -> bool:
        if self.shared is None:
            return False
        found = await self.shared.find_owner(known(binding.session_id))
        return found is not None and found.is_abandoned

    def _note_abandoned(self, binding: SessionBinding) -> None:
        """Note that another worker has given up a session, and told its client so: nothing of it goes on here."""
        if binding.status != "live":
            return
        self._note_dropped(binding)
        binding.close_consumers()
        for call in binding.calls.values():
            if call.connection is not None:
                call.connection.close()
        self.ledger.abandoned(binding)

    def note_evicted(self, binding: SessionBinding) -> None:
        """Note that the storage no longer knows a session that the SDK holds."""
        if binding.status == "live":
            self._note_dropped(binding)
            binding.close_tails()
            self.ledger.evicted(binding)

    def _note_dropped(self, binding: SessionBinding) -> None:
        binding.status = "evicted"
        binding.changes += 1
        binding.unsettled.clear()


_T = TypeVar("_T")


def known(value: _T | None) -> _T:
    """Return what is known by now: the store asks only where the binding's status says so."""
    assert value is not None
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A class of messages: what it is takes a model longer to say than an append takes.

    Attributes:
        is_root_model: It is around the JSON-RPC object, as on the 1.x line; on the 2.x line it is the object.
        has_method: It is a request or a notification; what is not, is an answer.
        has_id: It is a request or an answer.
        serializer: Does what `model_dump_json` does, in half the time; None where a class does that in its own way.
    """

    is_root_model: bool
    has_method: bool
    has_id: bool
    serializer: SchemaSerializer | None


@lru_cache(maxsize=64)  # More than an SDK has; classes that a server makes up are not held for ever.
def _kind_of(of: type[Any]) -> _Kind:
    if not issubclass(of, BaseModel):
        return _Kind(is_root_model=False, has_method=hasattr(of, "method"), has_id=False, serializer=None)
    is_usual = of.model_dump_json is BaseModel.model_dump_json
    return _Kind(
        is_root_model=issubclass(of, RootModel),
        has_method="method" in of.model_fields or hasattr(of, "method"),
        has_id="id" in of.model_fields,
        serializer=TypeAdapter[BaseModel](of).serializer if is_usual else None,
    )


def _dump(message: Any, kind: _Kind) -> bytes:
    """Return the JSON text that the SDK sends for a message: the same options as its own live path."""
    if kind.serializer is not None:
        if kind.is_root_model:
            return kind.serializer.to_json(message, by_alias=True, exclude_none=True)
        return kind.serializer.to_json(message, by_alias=True, exclude_unset=True)
    if kind.is_root_model:
        text: str = message.model_dump_json(by_alias=True, exclude_none=True)
    else:
        text = message.model_dump_json(by_alias=True, exclude_unset=True)
    return text.encode()
