"""What is raised when an ownership rule is broken. Always a bug of ours, never adversity: nothing below a process's
top frame catches these."""

from __future__ import annotations


class OwnershipError(RuntimeError):
    """Somebody freed, used or released what was not theirs (any more)."""


class UseAfterMoveError(OwnershipError):
    """A record was used after it had moved to another owner, or after it had been released."""


class InvariantViolation(OwnershipError):
    """The pool's books do not add up. The message names the rule, the pages, and what last happened to them."""
