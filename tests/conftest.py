"""Shared fixtures: real text that is always there."""

from functools import cache

import pytest


@cache
def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@pytest.fixture(scope="session")
def real_text() -> str:
    """About 700 kB of English prose and code: the documentation topics of the standard library."""
    return _topics()
