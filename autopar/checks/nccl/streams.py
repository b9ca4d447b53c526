"""Streams and events that record their calls, in place of ``torch.cpu``'s no-ops, so that FSDP2's streams are visible on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.checks.nccl.places import place
from autopar.checks.nccl.records import EventRecord, EventWait, HostSync, StreamWait

if TYPE_CHECKING:
    from autopar.checks.nccl.recorder import Recorder


class Stream:
    """The part of a device stream's interface that programs use."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self.number = recorder, number

    def wait_stream(self, other: Stream) -> None:
        self._recorder.events.append(StreamWait(self.number, other.number))

    def wait_event(self, event: StreamEvent) -> None:
        self._recorder.events.append(EventWait(event.number, self.number, place()))

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        event = event or StreamEvent(self._recorder, self._recorder.new_event())
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._recorder.events.append(HostSync(self.number, place()))


class StreamEvent:
    """The part of a device event's interface that programs use."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self.number = recorder, number

    def record(self, stream: Stream | None = None) -> None:
        number = self._recorder.streams[-1] if stream is None else stream.number
        self._recorder.events.append(EventRecord(self.number, number))

    def wait(self, stream: Stream | None = None) -> None:
        number = self._recorder.streams[-1] if stream is None else stream.number
        self._recorder.events.append(EventWait(self.number, number, place()))

    def synchronize(self) -> None:
        self._recorder.events.append(EventWait(self.number, -1, place()))

    def query(self) -> bool:
        return not self._recorder.late
