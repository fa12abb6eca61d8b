"""How long a storage is waited for: a deadline for every request, and more tries for those that may yet succeed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import stamina

Answer = TypeVar("Answer")

_logger = logging.getLogger("trainerd.checkpoint")
# Its own line would come beside ours, on standard error, in programs that configure no logging.
logging.getLogger("stamina").addHandler(logging.NullHandler())

# No second try would end in another way. FileExistsError and FileNotFoundError are answers, not failures.
_FINAL: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    ValueError,
    TypeError,
    KeyError,
    ImportError,
    NotImplementedError,
)
_FINAL_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "ClientAuthenticationError",
        "AuthenticationException",
        "BadHostKeyException",
        "ParamValidationError",
        "ResourceNotFoundError",
    }
)
# Timeout, conflict, precondition, range, too early, too many.
_OF_THE_MOMENT = frozenset({408, 409, 412, 416, 425, 429})


@dataclass(frozen=True)
class Patience:
    """Bounds, in seconds. A request's deadline grows with the bytes that it carries."""

    request_seconds: float = 30.0
    slowest_bytes_per_second: float = 256 * 1024
    tries: int = 5
    total_seconds: float = 300.0
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 15.0

    def deadline(self, carried: int) -> float:
        """Seconds that a request with so many bytes may take."""
        return self.request_seconds + carried / self.slowest_bytes_per_second

    def call(self, what: str, request: Callable[[], Answer], on_failure: Callable[[], None]) -> Answer:
        """The answer to a request that is made again, after growing waits with jitter, while that may help."""
        tries = stamina.retry_context(
            on=may_pass,
            attempts=self.tries,
            timeout=self.total_seconds,
            wait_initial=self.first_wait_seconds,
            wait_max=self.longest_wait_seconds,
            wait_jitter=self.first_wait_seconds,
        )
        for attempt in tries:
            with attempt:
                try:
                    return request()
                except Exception as error:
                    if may_pass(error):
                        on_failure()
                        if attempt.num < self.tries:
                            text = "%s: %s; trying again (%d of %d)"
                            _logger.warning(text, what, reason(error), attempt.num + 1, self.tries)
                    raise
        raise AssertionError("stamina raises the last error")


def may_pass(error: Exception) -> bool:
    """Whether a request that failed in this way may succeed when it is made again."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return not isinstance(error, _FINAL) and not kinds & _FINAL_NAMES and not _is_refusal(error)


def _is_refusal(error: Exception) -> bool:
    """Whether a server said by its HTTP status that the request itself is wrong, and not the moment."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _OF_THE_MOMENT


def reason(error: BaseException) -> str:
    """An error of any library in one line, with its kind where the text alone says little."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if kind == "FSTimeoutError":
        return "no answer in time"
    return text if " " in text and isinstance(error, OSError) else f"{kind}: {text}".rstrip(": ")
