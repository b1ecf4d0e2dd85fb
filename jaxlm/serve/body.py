"""Takes the keys of a JSON body one by one, and refuses what is of the wrong type, out of range or unknown, as OpenAI does."""

import difflib
import math
import typing
from collections.abc import Collection, Mapping

_SAY = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_HUGE = 2**53
_KINDS = {401: "authentication_error", 408: "timeout", 429: "rate_limit_error"}  # of an error, by HTTP's status


class Refused(Exception):
    """The refusal of a request.

    Args:
      status: HTTP's status code.
      param: the key of the body that is wrong.
      code: a word for programs, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, typing.Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The keys of a body. `null` is the same as a missing key."""

    def __init__(self, body: Mapping[str, typing.Any]):
        self._left = {key: value for key, value in body.items() if value is not None}
        self._known: set[str] = set()

    def take(self, name: str, kind: type, default: typing.Any = None) -> typing.Any:
        """Returns the value of a key; `default` if it is missing. Raises Refused if it is of another type."""
        value = self.any(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(min(max(value, -_HUGE), _HUGE))  # a float can't hold every integer
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise Refused(f"{name} must be {_SAY[kind]}, not {shown(value)}", param=name)
        return value

    def number(self, name: str, kind: type, default: float | None, least: float, most: float = math.inf) -> typing.Any:
        """Returns the number of a key. Raises Refused if it is not between `least` and `most`."""
        value = self.take(name, kind, default)
        if value is not None and not least <= value <= most:
            to = f" and at most {most:g}" if most < math.inf else ""
            raise Refused(f"{name} must be at least {least:g}{to}, not {value}", param=name)
        return value

    def any(self, name: str) -> typing.Any:
        self._known.add(name)
        return self._left.pop(name, None)

    def required(self, name: str, what: str) -> typing.Any:
        """Returns the value of a key. Raises Refused if the key is missing; the message names a similar unused key."""
        value = self.any(name)
        if value is None:
            near = difflib.get_close_matches(name, self._left, n=1)
            hint = f"; {shown(near[0])} is no key" if near else ""
            raise Refused(f"{name} is missing: {what}{hint}", param=name)
        return value

    def ignore(self, names: Collection[str]) -> None:
        for name in names:
            self.any(name)

    def unsupported(self, names: Mapping[str, tuple], mend: str = "leave it out") -> None:
        """Raises Refused for a key that asks for an unsupported feature. `names`: name -> values that ask for nothing."""
        for name, harmless in names.items():
            value = self.any(name)
            if value is not None and value not in harmless:
                raise Refused(f"{name} is not supported: {mend}", param=name)

    def end(self) -> None:
        """Raises Refused if an unknown key is left."""
        for name in self._left:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(f"unknown key {shown(name)}{hint}", param=name, code="unknown_parameter")


def shown(value: typing.Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
