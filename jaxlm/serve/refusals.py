"""What the server says no to, in the shape of OpenAI's errors."""

import typing


class Refused(Exception):
    """A request that is not answered.

    Args:
      message: what is wrong and how to mend it.
      status: of HTTP.
      param: the key of the body that is wrong.
      code: a word for programs, such as `context_length_exceeded`.
      headers: further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, typing.Any]:
        """Returns the body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


_KINDS = {401: "authentication_error", 408: "timeout", 429: "rate_limit_error"}
