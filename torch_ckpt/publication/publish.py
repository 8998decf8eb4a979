"""``publish`` and ``async_publish``. version_target.py has the protocol."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex

import torch.distributed as dist

from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.huggingface.model_target import Safetensors, StrPath, refuse_model_options
from torch_ckpt.options import DEFAULT_OPTIONS, WriteOptions
from torch_ckpt.publication.version_target import NewVersion, version_target
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup
from torch_ckpt.saving.handle import AsyncSave, save, start
from torch_ckpt.saving.save_state import StateDict
from torch_ckpt.steps import step_name
from torch_ckpt.steps.retention import Retention

if TYPE_CHECKING:
    from typing_extensions import Never  # in typing since Python 3.11

DEFAULT_FORMAT = Safetensors()


def refuse_options(caller: Callable[..., Any], given: dict[str, Any]) -> NoReturn:
    """Raises TypeError for keywords that belong into an object with options."""
    if "overwrite" in given:
        raise TypeError(f"{caller.__name__}() has no option overwrite: a version never changes")
    refuse_model_options(caller, given)


class Version(NamedTuple):
    """A published version.

    Attributes:
        number: its number.
        path: its directory or URL.
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
    format: Safetensors = DEFAULT_FORMAT,
    options: WriteOptions = DEFAULT_OPTIONS,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    check_replicas: str = "warn",
    **removed: Never,
) -> Version:
    """Publishes a version of a model: a directory of safetensors files beneath a root.

    A version appears under its name once it is complete and durable. Then the link ``latest`` in
    the root is made to lead to it. All ranks must call ``publish``, like :func:`torch_ckpt.save`.

    ``torch_ckpt.load(state_dict, root)`` loads the newest version. ``torch-ckpt steps`` lists
    versions.

    Args:
        state_dict: see :func:`torch_ckpt.save`. It may contain only tensors.
        root: a local directory, which is created if it does not exist; or a URL
            (docs/huggingface.md).
        version: number of the version, such as the training step, which must be larger than those
            of all versions beneath the root. None adds 1 to the number of the newest version.
        base: a version to compare with: its number, or "latest". A file that has the same bytes in
            both versions is stored once, as a hard link. "latest" compares nothing if there is no
            version yet.
        delta: also write ``torch_ckpt.delta``, with the elements that have changed since ``base``,
            for programs that fetch versions over a network. :func:`torch_ckpt.apply_delta` applies
            it. If ``base`` is None, the newest version is the base.
        keep: number of newest versions to keep, or rules (:class:`torch_ckpt.Retention`).
            Other versions are deleted after the publication, unless a process is loading them with
            torch_ckpt. None keeps all versions.
        format: the options of the files.
        options: the options of the save. A version never changes, so ``overwrite`` is ignored.
        process_group, no_dist, timeout, check_replicas: see :func:`torch_ckpt.save`.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        The version, on every rank.

    Raises:
        CheckpointException: the publication failed; raised on every rank with the cause from each
            failed rank. See :func:`torch_ckpt.save`. If a version with a larger number exists, the
            cause is ``FileExistsError``.
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        format = torch_ckpt.Safetensors(dtype="bf16")
        version = torch_ckpt.publish(model.state_dict(), "policy", format=format, keep=3)
        print(version.number, version.path)
    """
    if removed:
        refuse_options(publish, removed)
    chosen = version_options(version, base, delta, keep)
    saved = save(
        state_dict,
        lambda: version_target(root, format, options, NewVersion(**chosen)),
        RankGroup.of(process_group, no_dist),
        timeout=timeout,
        check_replicas=check_replicas,
    )
    return Version(int(Path(saved.path).name), saved.path)


def async_publish(
    state_dict: StateDict | Callable[[], StateDict],
    root: StrPath,
    version: SupportsIndex | None = None,
    *,
    base: SupportsIndex | str | None = None,
    delta: bool = False,
    keep: SupportsIndex | Retention | None = None,
    format: Safetensors = DEFAULT_FORMAT,
    options: WriteOptions = DEFAULT_OPTIONS,
    staging: str = "blocking",
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    if_busy: str = "wait",
    timeout: float = TIMEOUT_SECONDS,
    on_commit: Callable[[Checkpoint], None] | None = None,
    check_replicas: str = "warn",
    **removed: Never,
) -> AsyncSave:
    """Publishes a snapshot of a model in the background, while training continues.

    Args:
        state_dict, root, version, base, delta, keep, format, options: see :func:`publish`.
        staging, process_group, no_dist, if_busy, timeout, on_commit, check_replicas: see
            :func:`torch_ckpt.async_save`.
        removed: no keyword; the error for a former one names what replaces it.

    Returns:
        A handle; see :func:`torch_ckpt.async_save`.

    Raises:
        CheckpointException, CheckpointError, RuntimeError: see :func:`torch_ckpt.async_save`.
        ValueError, TypeError: an option is out of range or unknown.

    Example::

        handle = async_publish(model.state_dict(), "policy", version=100, delta=True)
        train_one_step()
        handle.result()  # waits until the version is visible
    """
    if removed:
        refuse_options(async_publish, removed)
    chosen = version_options(version, base, delta, keep)
    return start(
        state_dict,
        lambda: version_target(root, format, options, NewVersion(**chosen)),
        RankGroup.of(process_group, no_dist),
        staging=staging,
        if_busy=if_busy,
        timeout=timeout,
        on_commit=on_commit,
        # A version may be the same as the one before.
        warn_unchanged=False,
        check_replicas=check_replicas,
    )


def version_options(
    version: SupportsIndex | None,
    base: SupportsIndex | str | None,
    delta: bool,
    keep: SupportsIndex | Retention | None,
) -> dict[str, Any]:
    """Checks and completes the options of a version, before any other rank waits for this one."""
    if version is not None:
        version = int(step_name(operator.index(version)))
    if base is not None and base != "latest":
        base = _number(base, 'base must be the number of a version or "latest"')
    keep = None if keep is None else Retention.of(keep)
    base = "latest" if delta and base is None else base
    return {"version": version, "base": base, "delta": delta, "keep": keep}


def _number(value: Any, requirement: str) -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise TypeError(f"{requirement}, got {value!r}")
