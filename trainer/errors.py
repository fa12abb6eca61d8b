"""What can go wrong when a trainer's state is taken or put back; every text is one paragraph for the user."""


class StateError(Exception):
    """A trainer's state could not be taken or put back."""


class StateMismatch(StateError, ValueError):
    """The saved state and the code that should take it do not fit each other."""


class HookStateError(StateError):
    """A hook failed while it gave or took its state; the hook's own exception is the cause."""
