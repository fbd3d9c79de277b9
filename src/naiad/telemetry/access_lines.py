"""What the lines of the access log say, in each of the log's formats. Pure, and on the event loop: the log writes them.

Most requests of a model differ in nothing but three durations: what stands before and behind these is kept.
"""

from collections.abc import Callable
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Final

NAMES: Final = (
    "protocol",
    "model",
    "version",
    "id",
    "status",
    "queue_us",
    "compute_us",
    "total_us",
    "bytes_in",
    "bytes_out",
    "responses",
)
#: Durations below 10 ms have their texts ready.
_READY: Final = 10_000
#: The texts of so many models are kept.
_MOST: Final = 1024


@lru_cache(maxsize=1)
def _ready() -> list[str]:
    return [str(number) for number in range(_READY)]


class _Usual:
    """The texts of a request without an id that has succeeded, and what they say. `begin` is `head` and `before`."""

    __slots__ = ("after", "before", "begin", "bytes_in", "bytes_out", "head", "version")

    def __init__(self, version: int, before: str) -> None:
        self.version = version
        self.before = before
        self.head = ""
        self.begin = before
        self.bytes_in = -1
        self.bytes_out = -1
        self.after = ""


class AccessLines:
    """Makes the lines of one protocol's requests in one of the log's formats.

    `head` makes the beginning of lines that are from a time (ns since 1970), as text or an object that is still open.
    """

    def __init__(self, protocol: str, format: str, head: Callable[[int], str]) -> None:
        self.format = format
        is_json = format == "json"
        texts = [f', "{name}": ' if is_json else f" {name}=" for name in NAMES]
        if not is_json:
            texts[0] = f"access{texts[0]}"
        self._model = f"{texts[0]}{encode_basestring(protocol)}{texts[1]}"
        self._version, self._id, self._status, self._queue = texts[2], texts[3], texts[4], texts[5]
        self._compute, self._total = texts[6], texts[7]
        self._bytes_in, self._bytes_out, self._responses = texts[8], texts[9], texts[10]
        self._end = "}\n" if is_json else "\n"
        self._numbers = _ready()
        self._usual: dict[str, _Usual] = {}
        #: A batch has one duration of its own.
        self._compute_us = -1
        self._middle = ""
        self._head_at = head
        self._second = -1
        self._before_fraction = self._after_fraction = self._head = ""
        self._pieces: list[str] = []

    def begin(self, time_ns: int) -> None:
        """Lines from here on are from this time."""
        second = time_ns // 1_000_000_000
        if second != self._second:
            self._second = second
            self._before_fraction, _, self._after_fraction = self._head_at(second * 1_000_000_000).partition(".000000")
        if self._after_fraction:
            # With a one in front it has its zeros.
            fraction = str(1_000_000 + time_ns // 1000 % 1_000_000)[1:]
            self._head = f"{self._before_fraction}.{fraction}{self._after_fraction}"
        else:
            self._head = self._before_fraction

    def add(
        self,
        model: str,
        version: int,
        id: str,
        status: str,
        queue_us: int,
        compute_us: int,
        total_us: int,
        bytes_in: int,
        bytes_out: int,
        responses: int,
    ) -> None:
        usual = self._usual.get(model)
        if usual is None or usual.version != version:
            usual = self._keep(model, version)
        head = self._head
        if id or status != "OK":
            begin = head + self._before(model, version, id, status)
        else:
            if usual.head is not head:
                usual.head = head
                usual.begin = head + usual.before
            begin = usual.begin
        if compute_us != self._compute_us:
            self._compute_us = compute_us
            self._middle = f"{self._compute}{compute_us}{self._total}"
        if responses != 1:
            after = self._after(bytes_in, bytes_out, responses)
        else:
            if bytes_in != usual.bytes_in or bytes_out != usual.bytes_out:
                usual.bytes_in, usual.bytes_out = bytes_in, bytes_out
                usual.after = self._after(bytes_in, bytes_out, 1)
            after = usual.after
        pieces = self._pieces
        pieces.append(begin)
        pieces.append(self._number(queue_us))
        pieces.append(self._middle)
        pieces.append(self._number(total_us))
        pieces.append(after)

    def take(self) -> str:
        """The lines that have been added since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _number(self, number: int) -> str:
        return self._numbers[number] if 0 <= number < _READY else str(number)

    def _keep(self, model: str, version: int) -> _Usual:
        if len(self._usual) >= _MOST:
            self._usual.clear()
        usual = self._usual[model] = _Usual(version, self._before(model, version, "", "OK"))
        return usual

    def _before(self, model: str, version: int, id: str, status: str) -> str:
        about = f"{self._model}{encode_basestring(model)}{self._version}{version}{self._id}{encode_basestring(id)}"
        return f"{about}{self._status}{encode_basestring(status)}{self._queue}"

    def _after(self, bytes_in: int, bytes_out: int, responses: int) -> str:
        sizes = f"{self._bytes_in}{bytes_in}{self._bytes_out}{bytes_out}"
        return f"{sizes}{self._responses}{responses}{self._end}"
