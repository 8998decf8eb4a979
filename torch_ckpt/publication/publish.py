"""``publish`` and ``async_publish``. csrc/directory/version.h has the protocol."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from torch_ckpt._base.options import refuse_unknown
from torch_ckpt._base.paths import absolute
from torch_ckpt.api import async_save, save
from torch_ckpt.huggingface.safetensors_writer import SafetensorsWriter, StrPath
from torch_ckpt.publication.version_writer import VersionWriter
from torch_ckpt.retention import Retention
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.save_state import StateDict
from torch_ckpt.steps import step_name

_SAVE_OPTIONS = frozenset({"process_group", "no_dist", "timeout", "check_replicas"})
_ASYNC_OPTIONS = _SAVE_OPTIONS | {"staging", "if_busy", "write_done", "on_commit", "trace"}


class Version(NamedTuple):
    """A published version.

    Attributes:
        number: its number.
        path: its directory.
    """

    number: int
    path: str


def publish(
    state_dict: StateDict | Callable[[], StateDict],
    root: StrPath,
    version: SupportsIndex | None = None,
    *,
    base: SupportsIndex | str | None = None,
    delta: bool = False,
    keep: SupportsIndex | Retention | None = None,
    **options: Any,
) -> Version:
    """Publishes a version of a model: a directory of safetensors files beneath a root.

    A version appears under its name once it is complete and durable. Then the link ``latest`` in
    the root is made to lead to it. All ranks must call ``publish``, like :func:`torch_ckpt.save`.

    ``torch_ckpt.load(state_dict, root)`` loads the newest version. ``torch-ckpt steps`` lists
    versions.

    Args:
        state_dict: see :func:`torch_ckpt.save`. It may contain only tensors.
        root: a local directory. Created if it does not exist.
        version: number of the version, such as the training step, which must be larger than those
            of all versions beneath the root. None adds 1 to the number of the newest version.
        base: a version to compare with: its number, or "latest". A file that has the same bytes in
            both versions is stored once, as a hard link. "latest" compares nothing if there is no
            version yet.
        delta: also write ``torch_ckpt.delta``, with the elements that have changed since ``base``,
            for programs that fetch versions over a network. :func:`torch_ckpt.apply_delta` applies
            it. If ``base`` is None, the newest version is the base.
        keep: number of newest versions to keep, or rules (:class:`torch_ckpt.retention.Retention`).
            Other versions are deleted after the publication, unless a process is loading them with
            torch_ckpt. None keeps all versions.
        options: ``process_group``, ``no_dist``, ``timeout`` and ``check_replicas`` of
            :func:`torch_ckpt.save`, and the options of :class:`SafetensorsWriter`.

    Returns:
        The version, on every rank.

    Raises:
        CheckpointException: the publication failed; raised on every rank with the cause from each
            failed rank. See :func:`torch_ckpt.save`. If a version with a larger number exists, the
            cause is ``FileExistsError``.
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        version = torch_ckpt.publish(model.state_dict(), "policy", dtype="bf16", delta=True, keep=3)
        print(version.number, version.path)
    """
    numbers: list[int] = []
    chosen = check_options(publish, _SAVE_OPTIONS, version, base, delta, keep, options)
    save(state_dict, root, format=VersionWriter, on_number=numbers.append, **chosen)
    return Version(numbers[-1], str(absolute(root) / step_name(numbers[-1])))


def async_publish(
    state_dict: StateDict | Callable[[], StateDict],
    root: StrPath,
    version: SupportsIndex | None = None,
    *,
    base: SupportsIndex | str | None = None,
    delta: bool = False,
    keep: SupportsIndex | Retention | None = None,
    **options: Any,
) -> AsyncSave:
    """Publishes a snapshot of a model in the background, while training continues.

    Args:
        state_dict, root, version, base, delta, keep: see :func:`publish`.
        options: the options ``staging``, ``process_group``, ``no_dist``, ``if_busy``, ``timeout``,
            ``write_done``, ``on_commit``, ``check_replicas`` and ``trace`` of
            :func:`torch_ckpt.async_save`, and the options of :class:`SafetensorsWriter`.

    Returns:
        A handle; see :func:`torch_ckpt.async_save`.

    Raises:
        CheckpointException, CheckpointError, RuntimeError: see :func:`torch_ckpt.async_save`.
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        handle = torch_ckpt.async_publish(model.state_dict(), "policy", version=100, delta=True)
        train_one_step()
        handle.result()  # waits until the version is visible
    """
    chosen = check_options(async_publish, _ASYNC_OPTIONS, version, base, delta, keep, options)
    return async_save(
        state_dict,
        root,
        format=VersionWriter,
        # A version may be the same as the one before.
        warn_unchanged=False,
        **chosen,
    )


def check_options(
    caller: Callable[..., Any],
    save_options: frozenset[str],
    version: SupportsIndex | None,
    base: SupportsIndex | str | None,
    delta: bool,
    keep: SupportsIndex | Retention | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Checks and completes the options, before any other rank waits for this one.

    Args:
        save_options: the options that ``save`` or ``async_save`` accepts besides the writer's.
    """
    refuse_unknown(caller, SafetensorsWriter, options.keys() - save_options)
    if "overwrite" in options:
        raise TypeError(f"{caller.__name__}() does not accept overwrite: a version never changes")
    if version is not None:
        version = int(step_name(operator.index(version)))
    if base is not None and base != "latest":
        base = _number(base, 'base must be the number of a version or "latest"')
    if keep is not None and not isinstance(keep, Retention):
        keep = Retention(
            keep_last=_number(keep, "keep must be a number of versions or a Retention")
        )
    return options | {
        "version": version,
        "base": "latest" if delta and base is None else base,
        "delta": delta,
        "keep": keep,
    }


def _number(value: Any, requirement: str) -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise TypeError(f"{requirement}, got {value!r}")
