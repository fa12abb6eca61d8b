"""What is wrong with a job, where it stands, and the exit code that follows."""

import msgspec

from trainerd.daemon.exit_codes import ExitCode


class JobError(Exception):
    """A job that cannot be run; its text is one paragraph meant for the user."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.BAD_JOB):
        super().__init__(text)
        self.exit_code = exit_code


class Place(msgspec.Struct, frozen=True):
    """Where a value stands: a key of a job file, or a flag of the command line."""

    name: str  # "checkpoint.every", "--checkpoint-every" or "--checkpoint-keep last="
    file: str = ""  # the job file; "" for the command line

    def error(self, value: object, problem: str) -> JobError:
        """A JobError that names this place, the value found there, and the problem."""
        if self.file:
            return JobError(f"{self.file}: {self.name} = {_as_toml(value)}: {problem}")
        space = "" if self.name.endswith("=") else " "
        return JobError(f"{self.name}{space}{value}: {problem}", ExitCode.WRONG_USAGE)

    def inside(self, key: str) -> "Place":
        """The place of one key of the table that stands here."""
        return Place(f"{self.name}.{key}" if self.file else f"{self.name} {key}", self.file)


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_as_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_as_toml(item) for item in value) + "]"
    return str(value)
