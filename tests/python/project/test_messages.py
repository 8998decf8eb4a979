"""Options that errors and warnings name.

A message that advises ``name=value`` is useful only if the functions that its reader has called
accept the option. SURFACES lists these functions, by the file of the message.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.words import files, passages
from torch_ckpt import CheckpointManager, training
from torch_ckpt._base.checks import names_of
from torch_ckpt.integrations import lightning
from torch_ckpt.manager import Preemption, SaveOptions
from torch_ckpt.megatron import AsyncCallsQueue, FileSystemWriterAsync

# These classes also accept the options of torch's classes.
WRITER = names_of(torch_ckpt.FileSystemWriter) | names_of(dcp.FileSystemWriter)
READER = names_of(torch_ckpt.FileSystemReader) | names_of(dcp.FileSystemReader)
WRITE = names_of(torch_ckpt.WriteOptions)
READ = names_of(torch_ckpt.ReadOptions)
# Without those that choose the checkpoint and the ranks.
LOAD = names_of(torch_ckpt.load) - {"state_dict", "checkpoint_id", "process_group", "no_dist"}
POLICIES = names_of(torch_ckpt.Retention) | names_of(Preemption) | names_of(SaveOptions)
SAFETENSORS = names_of(torch_ckpt.Safetensors)

#: The options that a user can pass, by the function or class that accepts them.
ACCEPTED = {
    "save": names_of(torch_ckpt.save) | WRITE,
    "async_save": names_of(torch_ckpt.async_save) | WRITE,
    "save of safetensors": names_of(torch_ckpt.save) | WRITE | SAFETENSORS,
    "FileSystemWriter": WRITER,
    "FileSystemReader": READER,
    "load": LOAD | READ,
    "preflight": names_of(torch_ckpt.preflight) | READ,
    "convert": names_of(torch_ckpt.convert),
    "Export": names_of(torch_ckpt.Export),
    "CheckpointManager": names_of(CheckpointManager) | WRITE | READ | POLICIES,
    "CheckpointManager.save": names_of(CheckpointManager.save),
    "CheckpointManager.restore": names_of(CheckpointManager.restore),
    "training.save_checkpoint": names_of(training.save_checkpoint) | WRITE,
    "training.load_checkpoint_if_it_exists": names_of(training.load_checkpoint_if_it_exists) | READ,
    "TorchCkptIO": names_of(lightning.TorchCkptIO) | WRITE,
    "AsyncCallsQueue": names_of(AsyncCallsQueue) | names_of(AsyncCallsQueue.close),
    "maybe_finalize_async_calls": names_of(AsyncCallsQueue.maybe_finalize_async_calls),
    "FileSystemWriterAsync": names_of(FileSystemWriterAsync) | WRITER,
    "dcp.save": names_of(dcp.save),
    "to_empty": names_of(torch.nn.Module.to_empty),
}
SAVES = ["save", "async_save", "CheckpointManager", "training.save_checkpoint"]
LOADS = ["load", "CheckpointManager.restore", "training.load_checkpoint_if_it_exists"]
#: Parts of messages that name another place for an option than the function that was called.
ELSEWHERE = ("to a FileSystemReader: allow_pickle", "FileSystemReader(allow_pickle=True)")

#: The functions whose callers read the messages with an option, by file and option.
SURFACES: dict[tuple[str, str], list[str]] = {
    ("csrc/directory/model_save.cpp", "overwrite"): ["save of safetensors", "convert"],
    ("csrc/engine/load_session.cpp", "max_inflight_bytes"): ["load", "FileSystemReader"],
    ("csrc/engine/new_file.cpp", "direct_io"): [*SAVES, "save of safetensors"],
    ("csrc/engine/record_reader.cpp", "direct_io"): ["load", "FileSystemReader"],
    ("csrc/index/checkpoint_index.cpp", "allow_pickle"): LOADS,
    ("torch_ckpt/api.py", "check_replicas"): ["save"],
    ("torch_ckpt/checkpoint/lease.py", "use_collectives"): ["dcp.save"],
    ("torch_ckpt/checkpoint/objects.py", "allow_pickle"): LOADS,
    ("torch_ckpt/checkpoint/publishing.py", "overwrite"): ["save", "convert"],
    ("torch_ckpt/conversion/convert.py", "tensors_only"): ["convert"],
    ("torch_ckpt/conversion/targets.py", "overwrite"): ["convert"],
    ("torch_ckpt/conversion/sources.py", "allow_pickle"): ["convert"],
    ("torch_ckpt/integrations/lightning.py", "async_saves"): ["TorchCkptIO"],
    ("torch_ckpt/integrations/lightning.py", "options"): ["TorchCkptIO"],
    ("torch_ckpt/loading/reader.py", "strict"): ["load"],
    ("torch_ckpt/loading/report.py", "rename"): [*LOADS, "preflight"],
    ("torch_ckpt/loading/load.py", "free_before_read"): ["load"],
    ("torch_ckpt/loading/load.py", "names"): LOADS,
    ("torch_ckpt/loading/load.py", "rename"): LOADS,
    ("torch_ckpt/loading/load.py", "strict"): LOADS,
    ("torch_ckpt/manager/manager.py", "best_metric"): ["CheckpointManager"],
    ("torch_ckpt/manager/manager.py", "export"): ["CheckpointManager"],
    ("torch_ckpt/manager/manager.py", "force"): ["CheckpointManager.save"],
    ("torch_ckpt/manager/manager.py", "keep"): ["CheckpointManager"],
    ("torch_ckpt/manager/preemption_notice.py", "file"): ["CheckpointManager"],
    ("torch_ckpt/manager/preemption_notice.py", "signals"): ["CheckpointManager"],
    ("torch_ckpt/manager/saver.py", "metrics"): ["CheckpointManager.save"],
    ("torch_ckpt/manager/timeline.py", "overwrite"): ["CheckpointManager.save"],
    ("torch_ckpt/manager/timeline.py", "step"): ["CheckpointManager.restore"],
    ("torch_ckpt/megatron/async_writer.py", "open_file"): ["FileSystemWriterAsync"],
    ("torch_ckpt/megatron/async_writer.py", "serialization_format"): ["FileSystemWriterAsync"],
    ("torch_ckpt/megatron/async_writer.py", "use_msc"): ["FileSystemWriterAsync"],
    ("torch_ckpt/megatron/call.py", "abort"): ["AsyncCallsQueue"],
    ("torch_ckpt/megatron/call.py", "timeout"): ["AsyncCallsQueue"],
    ("torch_ckpt/megatron/calls_queue.py", "blocking"): ["maybe_finalize_async_calls"],
    ("torch_ckpt/megatron/write_task.py", "abort"): ["AsyncCallsQueue"],
    ("torch_ckpt/steps/retention.py", "keep_best"): ["CheckpointManager"],
    ("torch_ckpt/saving/handle.py", "if_busy"): ["async_save"],
    ("torch_ckpt/saving/run.py", "staging"): ["async_save", "CheckpointManager"],
    ("torch_ckpt/saving/handle.py", "warn_unchanged"): ["async_save"],
    ("torch_ckpt/huggingface/object_model.py", "overwrite"): ["save of safetensors", "convert"],
    ("torch_ckpt/saving/object_target.py", "overwrite"): SAVES[:3],
    ("torch_ckpt/saving/replica_check.py", "check_replicas"): ["save", "CheckpointManager"],
    ("torch_ckpt/saving/save_state.py", "device"): ["to_empty"],
    ("torch_ckpt/saving/target.py", "overwrite"): SAVES[:3],
    ("torch_ckpt/state/states.py", "device"): ["to_empty"],
    ("torch_ckpt/state/optimizers.py", "names"): [*LOADS, "preflight"],
    ("torch_ckpt/state/state_targets.py", "names"): LOADS,
    ("torch_ckpt/steps/lease_protocol.py", "takeover"): ["CheckpointManager"],
    ("torch_ckpt/steps/root_lease.py", "read_only"): ["CheckpointManager"],
    ("torch_ckpt/steps/step_store.py", "overwrite"): [
        "CheckpointManager.save",
        "training.save_checkpoint",
    ],
}

#: Text of the form "name=" that is no option of torch_ckpt.
NO_OPTIONS = {
    ("torch_ckpt/conversion/torch_target.py", "weights_only"),  # of torch.load
    ("torch_ckpt/integrations/lightning.py", "save_last"),  # of ModelCheckpoint
    ("torch_ckpt/integrations/transformers.py", "resume_from_checkpoint"),  # of Trainer.train
    ("torch_ckpt/integrations/torchtitan.py", "last_save_in_hf"),  # of torchtitan's settings
    ("torch_ckpt/integrations/torchtitan.py", "load_step"),
    ("torch_ckpt/checkpoint/objects.py", "map_location"),  # of torch.load
    ("torch_ckpt/megatron/async_writer.py", "enable_cache"),  # of Megatron
    ("torch_ckpt/training/async_checkpoint.py", "model"),  # a value to save
}
#: Files with texts of this form that are not messages: scripts, drawings, digests and settings.
NO_MESSAGES = (
    "torch_ckpt/training/graphs.py",
    "torch_ckpt/huggingface/model_target.py",
    "torch_ckpt/publication/version_target.py",
)

MENTIONED = re.compile(r"(?<![\w.{-])([a-z][a-z0-9_]*)=")


def mentions() -> dict[tuple[str, str], list[str]]:
    """Returns the messages that mention an option, by file and option."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in files(["torch_ckpt", "csrc"]):
        for passage in passages(file):
            if passage.kind == "message":
                for option in MENTIONED.findall(passage.text):
                    found[file, option].append(passage.text)
    return found


FOUND = mentions()


def advised() -> Iterator[tuple[str, str]]:
    """Yields the file and the name of each option of torch_ckpt in a message."""
    for file, option in FOUND:
        if (file, option) not in NO_OPTIONS and not file.startswith(NO_MESSAGES):
            yield file, option


def test_each_option_in_a_message_has_readers() -> None:
    assert set(advised()) == SURFACES.keys()


@pytest.mark.parametrize(("file", "option"), SURFACES)
def test_the_functions_whose_callers_read_a_message_accept_its_options(
    file: str, option: str
) -> None:
    for surface in SURFACES[file, option]:
        for message in FOUND[file, option]:
            is_elsewhere = any(place in message for place in ELSEWHERE)
            assert option in ACCEPTED[surface] or is_elsewhere, (surface, message)
