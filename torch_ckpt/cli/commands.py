"""The commands of torch-ckpt. Each imports the modules that it needs only when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch_ckpt._base.formatting import Block
from torch_ckpt._base.progress import Progress, ProgressBar, stderr_is_terminal
from torch_ckpt.cli.exit_codes import ExitCode
from torch_ckpt.cli.output import print_blocks, print_error, print_json
from torch_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch_ckpt.inspection.listing import Listing
    from torch_ckpt.steps import StepStore


class _Report(Protocol):
    def document(self) -> dict[str, Any]: ...
    def lines(self) -> Iterable[str]: ...


def _print_report(
    report: _Report, arguments: argparse.Namespace, blocks: Iterable[Block] | None = None
) -> None:
    if arguments.json:
        print_json(report.document())
    else:
        print_blocks(report.lines() if blocks is None else blocks)


@contextmanager
def _progress_bar(
    arguments: argparse.Namespace, title: str
) -> Iterator[Callable[[Progress], None] | None]:
    """Shows a progress bar if stderr is a terminal; yields its callback, or None."""
    is_quiet = arguments.json or getattr(arguments, "quiet", False)
    if is_quiet or not stderr_is_terminal():
        yield None
        return
    bar = ProgressBar(title, erase=True)
    try:
        yield bar.update
    finally:
        bar.close()


def list_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Lists a checkpoint. Returns FINDING if files or shards are missing or files are too short."""
    from torch_ckpt.inspection.listing import document, examine

    listing = examine(arguments.directory, arguments.names or None)
    if arguments.json:
        print_json(document(listing))
    else:
        print_blocks(_listing_blocks(listing, arguments.files))
    if listing.faults:
        faults = ", ".join(listing.faults)
        print_error(f"{listing.path} cannot be loaded completely: {faults}")
        return ExitCode.FINDING
    return ExitCode.SUCCESS


def _listing_blocks(listing: Listing, lists_files: bool) -> Iterator[Block]:
    from torch_ckpt.inspection.listing import file_table, item_table, part_table, total_line

    if lists_files:
        yield file_table(listing)
        yield ""
    else:
        yield item_table(listing)
        yield ""
        if parts := part_table(listing):
            yield parts
            yield ""
    yield total_line(listing)


def explain_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Shows what each rank wrote and how long it took."""
    from torch_ckpt.inspection.explain import explain

    report = explain(arguments.directory)
    _print_report(report, arguments, report.blocks())
    return ExitCode.SUCCESS


def _require_checkpoints(*paths: str) -> None:
    """Raises if a path holds no checkpoint, before torch is imported, which takes seconds."""
    from torch_ckpt.checkpoint.locating import open_checkpoint

    for path in paths:
        open_checkpoint(path).close()


def show_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Shows the values of tensors and objects. Returns FINDING if any of them are damaged."""
    _require_checkpoints(arguments.directory)
    from torch_ckpt.inspection.show import show

    with _progress_bar(arguments, "show") as progress:
        report = show(
            arguments.directory,
            arguments.names or None,
            first=arguments.first,
            allow_pickle=arguments.allow_pickle,
            progress=progress,
        )
    _print_report(report, arguments)
    return ExitCode.SUCCESS if report.ok else ExitCode.FINDING


def verify_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Verifies a checkpoint. Returns FINDING if anything is damaged or missing, otherwise ERROR if
    part of the checkpoint could not be read."""
    from torch_ckpt.inspection.verify import verify

    with _progress_bar(arguments, "verify") as progress:
        report = verify(arguments.directory, thread_count=arguments.threads, progress=progress)
    if not arguments.quiet:
        _print_report(report, arguments)
    elif not report.ok:
        print_blocks(report.faults())
    if report.unread:
        print_error(f"{report.checkpoint} was not read completely: {report.unread[0].what}")
    if report.has_damage:
        return ExitCode.FINDING
    return ExitCode.ERROR if report.unread else ExitCode.SUCCESS


def diff_checkpoints(arguments: argparse.Namespace) -> ExitCode:
    """Compares two checkpoints. Returns FINDING if they differ."""
    _require_checkpoints(arguments.a, arguments.b)
    from torch_ckpt.inspection.diff import diff

    with _progress_bar(arguments, "compare") as progress:
        report = diff(
            arguments.a,
            arguments.b,
            arguments.names or None,
            atol=arguments.atol,
            rtol=arguments.rtol,
            progress=progress,
        )
    if not (arguments.quiet and report.equal):
        _print_report(report, arguments)
    return ExitCode.SUCCESS if report.equal else ExitCode.FINDING


def convert_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Converts a model from one format to another."""
    from torch_ckpt.conversion.convert import convert

    try:
        with _progress_bar(arguments, "convert") as progress:
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
                progress=progress,
            )
    except ValueError as error:
        # The options contradict each other.
        raise CheckpointError(str(error)) from error
    _print_report(report, arguments)
    return ExitCode.SUCCESS


def examine_directory(arguments: argparse.Namespace) -> ExitCode:
    """Examines a directory. Returns FINDING if an assumption that durability depends on fails."""
    from torch_ckpt.cli.doctor import DEFAULT_BYTES, diagnose

    with _progress_bar(arguments, "measure") as progress:
        report = diagnose(
            arguments.directory,
            measured_bytes=arguments.size or DEFAULT_BYTES,
            progress=progress,
        )
    _print_report(report, arguments, report.blocks())
    return ExitCode.SUCCESS if report.ok else ExitCode.FINDING


def list_steps(arguments: argparse.Namespace) -> ExitCode:
    """Lists the steps of a run."""
    from torch_ckpt.cli.steps import step_blocks, steps_document

    store = _open_steps(arguments.root)
    entries = store.entries()
    if not entries:
        raise CheckpointError(f"{store.root}: there are no steps")
    if arguments.json:
        print_json(steps_document(store.root, entries))
    else:
        print_blocks(step_blocks(entries))
    return ExitCode.SUCCESS


def collect_steps(arguments: argparse.Namespace) -> ExitCode:
    """Deletes the steps that no rule keeps. Returns FINDING if one of them is in use."""
    if arguments.keep_best is not None and arguments.metric is None:
        raise CheckpointError("--keep-best needs --metric NAME, the metric to compare by")
    from torch_ckpt.cli.steps import collect
    from torch_ckpt.retention import Retention

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
            "or --sweep, to delete leftovers only"
        )
    store = _open_steps(arguments.root)
    with _progress_bar(arguments, "delete") as progress:
        report = collect(
            store, retention, sweep=arguments.sweep, dry_run=arguments.dry_run, progress=progress
        )
    if report.found_nothing:
        raise CheckpointError(f"{store.root}: there are no steps")
    _print_report(report, arguments)
    return ExitCode.FINDING if report.busy else ExitCode.SUCCESS


def delete_steps(arguments: argparse.Namespace) -> ExitCode:
    """Deletes steps by number. Returns FINDING if one of them is in use."""
    from torch_ckpt.cli.steps import delete

    store = _open_steps(arguments.root)
    with _progress_bar(arguments, "delete") as progress:
        report = delete(store, arguments.steps, force=arguments.force, progress=progress)
    _print_report(report, arguments)
    return ExitCode.FINDING if report.busy else ExitCode.SUCCESS


def pin_steps(arguments: argparse.Namespace) -> ExitCode:
    """Pins or unpins steps."""
    from torch_ckpt.cli.steps import set_pinned

    store = _open_steps(arguments.root)
    set_pinned(store, arguments.steps, arguments.is_pinned)
    outcome = "pinned" if arguments.is_pinned else "unpinned"
    if arguments.json:
        print_json({"root": store.root, outcome: arguments.steps})
    else:
        print_blocks(f"{outcome}: {step}" for step in arguments.steps)
    return ExitCode.SUCCESS


def print_completion(arguments: argparse.Namespace) -> ExitCode:
    """Prints the completion script for a shell."""
    from torch_ckpt.cli.completion import completion_script

    print(completion_script(arguments.parser, arguments.shell), end="")
    return ExitCode.SUCCESS


def _open_steps(root: str) -> StepStore:
    from torch_ckpt.steps import open_steps

    try:
        return open_steps(root)
    except (ImportError, ValueError) as error:
        raise CheckpointError(str(error)) from error
