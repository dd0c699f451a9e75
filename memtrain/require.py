"""One sentence for a value that breaks a rule (rule 12)."""

from __future__ import annotations


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse ``value`` where the condition does not hold.

    Raises:
        ValueError: ``NAME is VALUE, and it must be RULE.``
    """
    if not condition:
        raise ValueError(f"{name} is {value!r}, and it must be {rule}.")
