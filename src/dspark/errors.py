"""Everything that `dspark` raises on purpose.

    DSparkError
    ├── InvalidRequestError   a prompt or a sampling parameter that cannot be served
    ├── ConfigError           an option, a name or a combination of options that makes no sense
    ├── CheckpointError       a model or drafter file: missing, damaged, foreign, of the wrong shape
    └── ResourceError         not enough memory, no free slot, no compiler, no such device

A message says what was given, what was expected and what to do next, in one line. The command line
prints that line and exits with 2; `--debug` shows the traceback. Asserts elsewhere are for
invariants of this code only, never for input.
"""


class DSparkError(Exception):
    """Base of every error that the user can do something about."""


class InvalidRequestError(DSparkError):
    """The request itself is wrong: its prompt, or one of its sampling parameters."""


class ConfigError(DSparkError):
    """An option or a combination of options is wrong: an unknown drafter, dtype or model type."""


class CheckpointError(DSparkError):
    """A checkpoint cannot be read: missing, damaged, not of a supported kind, or inconsistent."""


class ResourceError(DSparkError):
    """The machine lacks something: memory, slots, a compiler, a device."""
