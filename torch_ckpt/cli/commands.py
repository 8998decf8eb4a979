"""The commands of torch-ckpt."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch_ckpt._base.formatting import printable
from torch_ckpt._base.progress import wants_bar
from torch_ckpt.cli.doctor import diagnose
from torch_ckpt.cli.steps import collect, delete, set_pinned, step_lines, steps_document
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.explain import explain
from torch_ckpt.inspection.listing import (
    Listing,
    document,
    examine,
    file_lines,
    item_lines,
    part_lines,
    total_line,
)
from torch_ckpt.inspection.show import show
from torch_ckpt.inspection.verify import verify
from torch_ckpt.manager.retention import Retention
from torch_ckpt.steps import StepStore, open_steps


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


class _Report(Protocol):
    def lines(self) -> Iterable[str]: ...
    def document(self) -> dict[str, Any]: ...


def _tell(report: _Report, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    else:
        _print(report.lines())


def list_checkpoint(arguments: argparse.Namespace) -> int:
    """Lists one checkpoint; returns 1 when files or shards of it are missing or files too short."""
    listing = examine(arguments.directory, arguments.names or None)
    if arguments.json:
        print(json.dumps(document(listing), indent=2))
    else:
        for lines in [file_lines(listing)] if arguments.files else _item_tables(listing):
            _print(lines)
            print()
        print(total_line(listing))
    if listing.faults:
        faults = ", ".join(listing.faults)
        complain(f"{listing.path} cannot be loaded whole: {faults}")
        return 1
    return 0


def _item_tables(listing: Listing) -> Iterator[Iterable[str]]:
    yield item_lines(listing)
    if parts := list(part_lines(listing)):
        yield parts


def explain_checkpoint(arguments: argparse.Namespace) -> int:
    """Says who wrote what of one checkpoint, and what took long."""
    _tell(explain(arguments.directory), arguments)
    return 0


def show_checkpoint(arguments: argparse.Namespace) -> int:
    """Shows what tensors and objects of a checkpoint hold; returns 1 when some are damaged."""
    report = show(
        arguments.directory,
        arguments.names or None,
        first=arguments.first,
        allow_pickle=arguments.allow_pickle,
        progress=_wants_bar(arguments),
    )
    _tell(report, arguments)
    return 0 if report.ok else 1


def verify_checkpoint(arguments: argparse.Namespace) -> int:
    """Verifies one checkpoint; returns 1 when something of it is damaged or missing, and 2 when
    nothing is, but some of it could not be read."""
    report = verify(
        arguments.directory,
        thread_count=arguments.threads,
        progress=_wants_bar(arguments),
    )
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    elif not arguments.quiet:
        _print(report.lines())
    elif not report.ok:
        _print(report.faults())
    if report.unread:
        complain(f"{report.checkpoint} was not read whole: {report.unread[0].what}")
    return 1 if report.has_damage else 2 if report.unread else 0


def diff_checkpoints(arguments: argparse.Namespace) -> int:
    """Compares two checkpoints; returns 1 when they differ."""
    report = diff(
        arguments.a,
        arguments.b,
        arguments.names or None,
        atol=arguments.atol,
        rtol=arguments.rtol,
        progress=_wants_bar(arguments),
    )
    if not (arguments.quiet and report.equal):
        _tell(report, arguments)
    return 0 if report.equal else 1


def convert_checkpoint(arguments: argparse.Namespace) -> int:
    """Converts a model from one format to another."""
    try:
        report = convert(
            arguments.source,
            arguments.target,
            select=arguments.select,
            strip_prefix=arguments.strip_prefix,
            rename=arguments.rename,
            dtype=arguments.dtype,
            config=arguments.config,
            max_shard_size=arguments.max_shard_size,
            tensors_only=arguments.tensors_only,
            overwrite=arguments.overwrite,
            allow_pickle=arguments.allow_pickle,
            progress=_wants_bar(arguments),
        )
    except ValueError as error:
        # Options that contradict each other.
        raise CheckpointError(str(error)) from error
    _tell(report, arguments)
    return 0


def examine_directory(arguments: argparse.Namespace) -> int:
    """Probes a directory; returns 1 when an assumption of the promises does not hold there."""
    report = diagnose(arguments.directory, measured_bytes=arguments.size)
    _tell(report, arguments)
    return 0 if report.ok else 1


def list_steps(arguments: argparse.Namespace) -> int:
    """Lists the steps of a run; returns 2 where there are none."""
    store = _opened_steps(arguments.root)
    entries = store.entries()
    if not entries:
        raise CheckpointError(f"{store.root}: there are no steps")
    if arguments.json:
        print(json.dumps(steps_document(store.root, entries), indent=2))
    else:
        _print(step_lines(entries))
    return 0


def collect_steps(arguments: argparse.Namespace) -> int:
    """Deletes steps that no rule keeps; returns 1 when one that was to go is in use, and 2 where
    there are none."""
    if arguments.keep_best is not None and arguments.metric is None:
        raise CheckpointError("--keep-best needs --metric NAME, the metric to compare by")
    retention = Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_every_hours=arguments.keep_every_hours,
        keep_best=arguments.keep_best,
        best_metric=arguments.metric,
        best_mode=arguments.mode,
    )
    if retention.keeps_all and not arguments.sweep:
        raise CheckpointError(
            "gc needs a rule: --keep-last, --keep-every, --keep-every-hours or --keep-best; "
            "or --sweep, for leftovers alone"
        )
    store = _opened_steps(arguments.root)
    report = collect(store, retention, sweep=arguments.sweep, dry_run=arguments.dry_run)
    if report.found_nothing:
        raise CheckpointError(f"{store.root}: there are no steps")
    _tell(report, arguments)
    return 1 if report.busy else 0


def delete_steps(arguments: argparse.Namespace) -> int:
    """Deletes steps; returns 1 when one is in use."""
    store = _opened_steps(arguments.root)
    report = delete(store, arguments.steps, force=arguments.force)
    _tell(report, arguments)
    return 1 if report.busy else 0


def pin_step(arguments: argparse.Namespace) -> int:
    """Pins steps, or releases them."""
    store = _opened_steps(arguments.root)
    set_pinned(store, arguments.steps, arguments.pins)
    done = "pinned" if arguments.pins else "unpinned"
    if arguments.json:
        print(json.dumps({"root": store.root, done: arguments.steps}, indent=2))
    else:
        _print(f"{done}: {step}" for step in arguments.steps)
    return 0


def _opened_steps(root: str) -> StepStore:
    try:
        return open_steps(root)
    except (ImportError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def _wants_bar(arguments: argparse.Namespace) -> bool:
    quiet = arguments.json or getattr(arguments, "quiet", False)
    return not quiet and wants_bar()


def complain(text: str) -> None:
    print(f"torch-ckpt: {printable(text)}", file=sys.stderr)
