"""One class per kind of mistake or violation.

Every message answers four questions, in this order: what is wrong, where it was found, what would have been allowed, and
what to do next.  The classes build the text, so that no call site can leave one of the four out.
"""

from __future__ import annotations


class Dsv4Error(Exception):
    """Base of every error that dsv4c raises on purpose.

    ``what`` is a sentence without its full stop; ``where`` a file, line, key, layer or tensor; ``allowed`` the values that
    would have been accepted; ``do`` an instruction.  Empty parts are left out of the message.
    """

    exit_status = 2

    def __init__(self, what: str, *, where: str = "", allowed: str = "", do: str = "") -> None:
        self.what, self.where, self.allowed, self.do = what, where, allowed, do
        parts = [what]
        if where:
            parts.append(f"  where:   {where}")
        if allowed:
            parts.append(f"  allowed: {allowed}")
        if do:
            parts.append(f"  do:      {do}")
        super().__init__("\n".join(parts))


class ConfigError(Dsv4Error, ValueError):
    """A model or training setting that cannot be meant, or that contradicts another."""


class DataError(Dsv4Error, ValueError):
    """A training text, token cache or batch that cannot be used."""


class WeightsError(Dsv4Error, ValueError):
    """A weight file or tensor that does not fit the model it is read for."""


class CheckpointError(Dsv4Error, RuntimeError):
    """A training checkpoint that is missing, damaged or belongs to another run."""


class NonFiniteError(Dsv4Error, ArithmeticError):
    """A loss, gradient or parameter that is NaN or infinite; training stops at once."""

    exit_status = 1


class BuildError(Dsv4Error, RuntimeError):
    """Native code that the system's compiler could not build, or whose result could not be loaded."""


class VerifyError(Dsv4Error):
    """A rule of the verifier that a graph violates."""

    exit_status = 1


class FusionError(Dsv4Error):
    """A fusion that should have matched and did not."""

    exit_status = 1


class LowerError(Dsv4Error):
    """A kernel that cannot be lowered for the target asked for."""
