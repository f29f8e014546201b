"""Exceptions of tiermoe. Messages name the cause, the numbers and what to do next."""


def reason(error: BaseException) -> str:
    """Message of another library's exception in one line of at most 500 characters, with the exception's type where the
    message is a single word or empty."""
    text = " ".join(str(error).split())[:500]
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class TiermoeError(Exception):
    """Base of all errors that tiermoe raises on purpose; commands print the message in one line and exit with 2."""


class ConfigError(TiermoeError):
    """An option or setting that is unknown, malformed, or contradicts another."""


class ModelError(TiermoeError):
    """A checkpoint that cannot be used: not MoE, unsupported family, missing or truncated files."""


class BudgetError(TiermoeError):
    """A memory budget that cannot be kept; the message has the nearest setting that works."""


class DeviceError(TiermoeError):
    """A GPU that fails or is gone while a model runs on it."""


class PromptError(TiermoeError):
    """A prompt that cannot be answered: empty, or longer than the context."""


class StoreError(TiermoeError):
    """An expert store that cannot be used: of another format version or checkpoint, or torn."""


class PackError(StoreError):
    """Packing that could not finish; what is packed is kept and the next run resumes."""


class LoadError(StoreError):
    """A read of an expert that failed: short read, I/O error or wrong checksum. Names layer, expert and file."""


class ProfileError(TiermoeError):
    """A calibration profile that is missing, damaged, or another checkpoint's; names the command that makes it."""


class TraceError(TiermoeError):
    """A routing trace that cannot be used: another schema version, cut short, or without what a preset needs."""
