"""The two kinds of failure a user can cause. The message is what they read: what is wrong, where, what to do."""


class LmappError(Exception):
    """The work could not be done (missing file, undecodable text, damaged checkpoint, full disk). Exit code 1."""

    exit_code = 1


class UsageError(LmappError):
    """An option or configuration is wrong. Exit code 2."""

    exit_code = 2
