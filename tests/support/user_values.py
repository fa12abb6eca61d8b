"""Classes of the kinds that users put into a state."""

import collections
import dataclasses
import enum
import typing


class Color(enum.Enum):
    RED = "red"
    BLUE = 2
    NOT_A_NUMBER = float("nan")


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2**70


class Mode(enum.StrEnum):
    TRAIN = "train"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag, boundary=enum.KEEP):
    ONE = 1
    FOUR = 4


class Outer:
    class Inner(enum.Enum):
        DEEP = (1, 2)


class Point(typing.NamedTuple):
    x: object
    y: object = 0


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 (the other way to make one)


@dataclasses.dataclass
class Plain:
    value: object
    derived: int = dataclasses.field(init=False, default=3)
    hidden: object = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object


@dataclasses.dataclass(kw_only=True)
class Child(Plain):
    more: object = None


@dataclasses.dataclass
class WithInitVar:
    value: object
    scale: dataclasses.InitVar[int] = 2
    count: typing.ClassVar[int] = 0

    def __post_init__(self, scale):
        self.value = (self.value, scale)
