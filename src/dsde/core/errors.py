"""The errors a user can cause or meet. Each message is one sentence that says what is wrong and what to do."""

from __future__ import annotations


class DsdeError(Exception):
    """Base of every error that dsde raises on purpose."""


class InvalidInput(DsdeError, ValueError):
    """A value given by the user is not allowed; the message names the field and what is allowed."""


class ModelError(DsdeError):
    """A model cannot be found, read or used; the message says which and why."""


class DownloadError(ModelError):
    """Weights are not on this machine and could not be fetched."""


class OutOfMemory(DsdeError):
    """A step needed more memory than there is; the message says what to lower. Nothing is lost: it can be run again."""
