"""One exception tree. Every error a user can cause or meet names its cause, the numbers and what to do next."""


def reason(error: BaseException) -> str:
    """What another library's exception says, in one line of 500 characters at most, with its kind where it says a word
    alone."""
    text = " ".join(str(error).split())[:500]
    return text if " " in text else f"{type(error).__name__} {text}".strip()


class TiermoeError(Exception):
    """Base of all errors that tiermoe raises on purpose; the commands print it in one line and exit with 2."""


class ConfigError(TiermoeError):
    """An option or setting that is unknown, malformed or contradicts another."""


class ModelError(TiermoeError):
    """A checkpoint that cannot be used: not MoE, unsupported family, missing or truncated files."""


class BudgetError(TiermoeError):
    """A memory budget that cannot be kept; the message holds the nearest setting that would work."""


class PromptError(TiermoeError):
    """A prompt that cannot be answered: empty, or longer than the context."""


class StoreError(TiermoeError):
    """An expert store that cannot be used: other format version, other checkpoint, other machine layout, torn."""


class PackError(StoreError):
    """Packing could not finish; what is already packed is kept and the next run resumes."""


class LoadError(StoreError):
    """Reading an expert failed: short read, I/O error or wrong checksum. Names layer, expert and file."""


class ProfileError(TiermoeError):
    """A calibration profile that is missing, damaged, or another checkpoint's; says the command that makes it."""


class TraceError(TiermoeError):
    """A routing trace that cannot be used: another schema version, cut short, or without what a preset needs."""
