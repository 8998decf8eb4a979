"""The commands of torch-ckpt. Each imports the modules that it needs only when it runs.

The first line of a docstring is the command's summary in ``torch-ckpt --help``; the rest is the
description in the command's own help. A command returns FINDING if it exits with 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_ckpt._base.formatting import Report, some_of
from torch_ckpt._base.progress import Progress, ProgressBar, stderr_is_terminal
from torch_ckpt._base.system import local_path
from torch_ckpt.cli.output import ExitCode, print_blocks, print_error, print_json
from torch_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch_ckpt.cli.diagnosis import Diagnosis
    from torch_ckpt.steps import StepStore


def _print_report(
    report: Report, arguments: argparse.Namespace, *, is_finding: bool = False
) -> ExitCode:
    if arguments.json:
        print_json(report.document())
    else:
        print_blocks(report.blocks())
    return ExitCode.FINDING if is_finding else ExitCode.SUCCESS


def _print_with_faults(
    report: Report, path: str, faults: list[str], arguments: argparse.Namespace
) -> ExitCode:
    code = _print_report(report, arguments, is_finding=bool(faults))
    if faults:
        print_error(f"{path} cannot be loaded completely: {some_of(faults)}")
    return code


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


@contextmanager
def _refusals_reported() -> Iterator[None]:
    """Block whose ``ValueError`` and ``ImportError`` are due to the arguments: a URL that is not
    allowed, a package that it needs, or options that contradict each other."""
    try:
        yield
    except (ImportError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def _require_checkpoints(*paths: str) -> None:
    """Raises if a path holds no checkpoint, before torch is imported, which takes seconds."""
    from torch_ckpt.checkpoint.locating import open_checkpoint

    with _refusals_reported():
        for path in paths:
            open_checkpoint(path).folder.close()


def list_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """List the tensors and objects of a checkpoint.

    List the tensors and objects of a checkpoint. Reads the metadata and the file lengths, not the
    data. Exits with 1 if a data file or a shard is missing or a file is too short, and with 2 if
    the checkpoint cannot be read or no name matches.
    """
    from torch_ckpt.inspection.listing import examine

    with _refusals_reported():
        listing = examine(arguments.directory, arguments.names or None)
    listing.shows_files = arguments.files
    return _print_with_faults(listing, listing.path, listing.faults, arguments)


def show_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Show values, statistics and file locations of tensors and objects.

    Read tensors and objects from a checkpoint. Show shape, dtype, first values, minimum, maximum,
    mean, standard deviation, the number of zeros, NaNs and infinities, and file locations. Exits
    with 1 if any of them are damaged (listed after the intact ones), and with 2 if no name matches
    or nothing can be read.
    """
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
    return _print_report(report, arguments, is_finding=not report.ok)


def verify_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Read an entire checkpoint and check it against its checksums.

    Read every record of a checkpoint, check it against all its checksums, and list everything that
    is damaged or missing. Exits with 0 if the checkpoint is intact, with 1 if anything is damaged
    or missing, and with 2 if the checkpoint cannot be read, or if no damage was found but part of
    it could not be read.
    """
    from torch_ckpt.inspection.verify import verify

    with _refusals_reported(), _progress_bar(arguments, "verify") as progress:
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
    """Compare two checkpoints by name, shape, dtype and value.

    Compare two checkpoints; their sharding may differ. Objects are compared by their stored bytes
    and never unpickled. Exits with 0 if the checkpoints are equal (within the tolerances, if
    given), with 1 if they differ, and with 2 if one cannot be read.
    """
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
    if arguments.quiet and report.equal:
        return ExitCode.SUCCESS
    return _print_report(report, arguments, is_finding=not report.equal)


def convert_checkpoint(arguments: argparse.Namespace) -> ExitCode:
    """Convert between checkpoint directories, torch.save files and safetensors.

    Convert a model, a few tensors at a time. SOURCE is a checkpoint directory, a torch.save file, a
    safetensors file, or a directory of safetensors files with an index. The name of TARGET selects
    its format: *.safetensors for safetensors; *.pt, *.pth or *.bin for torch.save. Any other name
    selects a checkpoint directory or, with --max-shard-size or --config, a directory of safetensors
    files. Exits with 2 if the conversion fails; an existing TARGET is then kept, and a new one is
    removed.
    """
    from torch_ckpt.conversion.convert import convert

    with _refusals_reported(), _progress_bar(arguments, "convert") as progress:
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
    return _print_report(report, arguments)


def apply_delta(arguments: argparse.Namespace) -> ExitCode:
    """Change a model's files to the next version, with a delta.

    Change a directory of safetensors files from one version of a model to the next, with a delta
    that torch_ckpt.publish has written. All values are compared with the checksums in the delta.
    The directory is replaced completely or not at all. Exits with 2 if the directory is not the
    base of the delta, or if either is damaged; the directory is then unchanged.
    """
    from torch_ckpt.huggingface import delta

    with _refusals_reported():
        delta.apply_delta(arguments.delta, arguments.directory, arguments.out)
    return ExitCode.SUCCESS


def examine_directory(arguments: argparse.Namespace) -> ExitCode:
    """Measure a file system or an object store, and check what saves rely on.

    Examine a directory: file system, free space, direct I/O, fsync latency, file locks, and the
    bandwidth of saves and loads with 1 to 8 threads. Recommend options, and check the assumptions
    that durability depends on. Examine a URL: the library and endpoint that serve it, latency and
    bandwidth, permissions, conditions, clocks, and the lifecycle rules of the bucket. Under
    torchrun, examine a directory that several hosts share: how soon the other ranks see a change,
    and whether locks exclude them. Deletes its own files and objects afterwards. Exits with 1 if an
    assumption does not hold, and with 2 if the directory is not writable, or if the store permits
    no request.
    """
    from torch_ckpt.cli import doctor, store_doctor

    report: Diagnosis | None
    with _refusals_reported(), _progress_bar(arguments, "measure") as progress:
        if (path := local_path(arguments.directory)) is None:
            count = arguments.size or store_doctor.DEFAULT_MEASURED
            report = store_doctor.diagnose_store(
                arguments.directory, measured_bytes=count, progress=progress
            )
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # torchrun, or another launcher, has started this process as one of several ranks.
            from torch_ckpt.cli import host_doctor

            count = arguments.size or host_doctor.DEFAULT_MEASURED
            with host_doctor.process_group():
                report = host_doctor.diagnose_hosts(path, measured_bytes=count)
        else:
            count = arguments.size or doctor.DEFAULT_MEASURED
            report = doctor.diagnose(path, measured_bytes=count, progress=progress)
    if report is None:  # rank 0 prints it
        return ExitCode.SUCCESS
    return _print_report(report, arguments, is_finding=not report.ok)


def list_steps(arguments: argparse.Namespace) -> ExitCode:
    """List the steps of a run.

    List the steps that CheckpointManager saved in ROOT, with their size, age, metrics and pins, and
    the leftovers of unfinished saves and deletions. Exits with 2 if there are no steps.
    """
    from torch_ckpt.cli.steps import StepListing

    store = _open_steps(arguments.root)
    listing = StepListing(store.root, store.entries())
    if not listing.steps:
        raise CheckpointError(f"{store.root}: there are no steps")
    return _print_report(listing, arguments)


def collect_steps(arguments: argparse.Namespace) -> ExitCode:
    """Delete the steps of a run that no retention rule keeps.

    Delete the complete steps in ROOT that no retention rule keeps. A step is kept if any rule keeps
    it; the newest step and pinned steps are always kept. If ROOT is a directory, a step that is
    being loaded is kept, and the exit code is 1. If ROOT is a URL, loads cannot be detected: the
    step is deleted, and the load fails. Exits with 2 if there are no steps.
    """
    if arguments.keep_best is not None and arguments.metric is None:
        raise CheckpointError("--keep-best needs --metric NAME, the metric to compare by")
    from torch_ckpt.cli.steps import collect
    from torch_ckpt.steps.retention import Retention

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
    store = _open_steps_to_delete(arguments.root)
    with _progress_bar(arguments, "delete") as progress:
        report = collect(
            store, retention, sweep=arguments.sweep, dry_run=arguments.dry_run, progress=progress
        )
    if report.found_nothing:
        raise CheckpointError(f"{store.root}: there are no steps")
    return _print_report(report, arguments, is_finding=bool(report.busy))


def delete_steps(arguments: argparse.Namespace) -> ExitCode:
    """Delete steps of a run by number.

    Delete complete steps in ROOT: all the given steps, or none if one is refused. Pinned steps,
    steps that are being saved and, without --force, the newest step are refused. If ROOT is a
    directory, a step that is being loaded is kept, and the exit code is 1. Exits with 2 if a step
    is refused.
    """
    from torch_ckpt.cli.steps import delete

    store = _open_steps_to_delete(arguments.root)
    with _progress_bar(arguments, "delete") as progress:
        report = delete(store, arguments.steps, force=arguments.force, progress=progress)
    return _print_report(report, arguments, is_finding=bool(report.busy))


def pin_steps(arguments: argparse.Namespace) -> ExitCode:
    """Protect steps of a run from deletion.

    Protect steps of a run from deletion. Exits with 2 if any of the steps does not exist.
    """
    return _set_pinned(arguments, True)


def unpin_steps(arguments: argparse.Namespace) -> ExitCode:
    """Remove the protection of pinned steps.

    Remove the protection of pinned steps. Exits with 2 if any of the steps does not exist.
    """
    return _set_pinned(arguments, False)


def _set_pinned(arguments: argparse.Namespace, is_pinned: bool) -> ExitCode:
    from torch_ckpt.cli.steps import set_pinned

    store = _open_steps(arguments.root)
    set_pinned(store, arguments.steps, is_pinned)
    outcome = "pinned" if is_pinned else "unpinned"
    if arguments.json:
        print_json({"root": store.root, outcome: arguments.steps})
    else:
        print_blocks(f"{outcome}: {step}" for step in arguments.steps)
    return ExitCode.SUCCESS


def _open_steps_to_delete(root: str) -> StepStore:
    """Opens steps so that deletions fail once another run takes or releases the lease."""
    from torch_ckpt.steps.root_lease import ObservedLease

    store = _open_steps(root, read_only=False)
    store.lease = ObservedLease(store.lease_store())
    return store


def _open_steps(root: str, *, read_only: bool = True) -> StepStore:
    from torch_ckpt.steps import open_steps

    with _refusals_reported():
        store = open_steps(root)
    store.require_root(read_only=read_only)
    return store
