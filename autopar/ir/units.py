"""Numbers with units, for people."""

_GIB = 2**30


def seconds_text(seconds: float) -> str:
    """``1.23 s``, or ``12.3 ms`` below a second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def bytes_text(num: int) -> str:
    """``1.23 GiB``, or ``12.34 MiB`` below a tenth of one."""
    return f"{num / _GIB:.2f} GiB" if num >= _GIB / 10 else f"{num / 2**20:.2f} MiB"


def counted(num: int, things: str) -> str:
    """``1 block``, ``2 blocks``, ``1 batch``; ``things`` is the regular plural."""
    ending = "es" if things.endswith("ches") else "s"
    return f"{num:,} {things if num != 1 else things.removesuffix(ending)}"
