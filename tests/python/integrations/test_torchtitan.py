"""torch_ckpt.integrations.torchtitan with torchtitan's components, beside its own checkpointer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import EACCES, EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_ckpt
from tests.fault_hooks import failing, held
from tests.metadata import read_metadata
from tests.support import assert_equal
from torch_ckpt import CheckpointError

pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)

from torchtitan.components.checkpointer import CheckpointManager as Stock

from tests import titan
from tests.titan import STEPS
from torch_ckpt.integrations.torchtitan import TorchCkptManager as Ours
from torch_ckpt.manager import manager as manager_module

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("one_rank_mesh"),
    pytest.mark.filterwarnings("ignore"),
]

MADE: list[titan.Trainer] = []


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    """Closes the checkpointers at the end of a test."""
    yield
    while MADE:
        MADE.pop().checkpointer.close()


def new(kind: Any, folder: Path | str, **config: Any) -> titan.Trainer:
    trainer = titan.Trainer(kind, folder, **config)
    MADE.append(trainer)
    return trainer


def trained(kind: Any, folder: Path | str, steps: int = STEPS, **config: Any) -> titan.Trainer:
    trainer = new(kind, folder, **config)
    assert not trainer.checkpointer.load()
    trainer.train(steps)
    return trainer


def loaded(kind: Any, folder: Path | str, step: int = -1, **config: Any) -> titan.Trainer:
    """Returns a trainer with other weights that has loaded a checkpoint."""
    trainer = new(kind, folder, seed=1, **config)
    assert trainer.checkpointer.load(step)
    return trainer


def numbered(*steps: int) -> list[str]:
    return [f"{step:010d}" for step in steps]


def steps_in(folder: Path) -> list[str]:
    """Returns the names of the steps of both checkpointers."""
    return sorted(path.name for path in folder.iterdir() if path.name[:4] in ("0000", "step"))


def test_a_step_has_the_names_of_torchtitans_checkpoint_and_torchtitan_loads_it(
    tmp_path: Path,
) -> None:
    ours, stock = (trained(kind, tmp_path / kind.__name__, 4) for kind in (Ours, Stock))
    step = tmp_path / Ours.__name__ / "0000000004"
    names = read_metadata(step).state_dict_metadata.keys()
    assert names == read_metadata(tmp_path / Stock.__name__ / "step-4").state_dict_metadata.keys()
    config = {"initial_load_path": str(step), "initial_load_model_only": False}
    assert_equal(loaded(Stock, tmp_path / "new", **config).state(), ours.state())
    assert_equal(ours.state(), stock.state())


def test_the_run_in_a_folder_of_torchtitans_checkpoints_is_continued(tmp_path: Path) -> None:
    trained(Stock, tmp_path, 6)
    continued = loaded(Ours, tmp_path)
    assert continued.step == 6
    continued.train()
    assert steps_in(tmp_path) == [*numbered(8, 10), "step-2", "step-4", "step-6"]
    assert loaded(Ours, tmp_path).step == 10
    assert loaded(Ours, tmp_path, 4).step == 4
    assert loaded(Ours, tmp_path, 8).step == 8


def test_training_continues_from_a_chosen_older_step_of_torchtitan(
    tmp_path: Path,
) -> None:
    trained(Stock, tmp_path, 4)
    loaded(Ours, tmp_path).train(8)
    with pytest.warns(match="there are later steps"):
        rewound = loaded(Ours, tmp_path, 4)
    rewound.train()
    assert loaded(Ours, tmp_path).step == 10


def test_of_a_run_that_both_have_saved_the_newest_step_is_loaded(tmp_path: Path) -> None:
    trained(Ours, tmp_path, 4)
    trainer = new(Stock, tmp_path)
    trainer.train(6)
    assert loaded(Ours, tmp_path).step == 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_step_has_only_the_model_in_the_dtype_of_the_export(
    tmp_path: Path, dtype: str
) -> None:
    config = {"last_save_model_only": True, "export_dtype": dtype}
    trainer = trained(Ours, tmp_path, **config)
    state = {name: torch.empty_like(value) for name, value in trainer.model.state_dict().items()}
    state = {name: value.to(getattr(torch, dtype)) for name, value in state.items()}
    torch_ckpt.load(state, tmp_path / numbered(STEPS)[0])
    assert read_metadata(tmp_path / numbered(STEPS)[0]).state_dict_metadata.keys() == state.keys()
    for name, value in trainer.model.state_dict().items():
        assert_equal(state[name], value.to(getattr(torch, dtype)))


def test_the_last_step_in_hugging_faces_format_begins_another_run(tmp_path: Path) -> None:
    trainer = trained(Ours, tmp_path / "a", last_save_model_only=True, last_save_in_hf=True)
    path = tmp_path / f"a/step-{STEPS}"
    saved = trainer.checkpointer.sd_adapter.to_hf(trainer.model.state_dict())
    assert_equal(
        dict(sorted(load_file(path / "model.safetensors").items())), dict(sorted(saved.items()))
    )
    begun = loaded(Ours, tmp_path / "b", initial_load_path=str(path), initial_load_in_hf=True)
    assert begun.step == 0
    assert_equal(dict(begun.model.state_dict()), dict(trainer.model.state_dict()))


def test_a_seed_has_only_the_model_and_begins_at_step_0(tmp_path: Path) -> None:
    seed = new(Ours, tmp_path, seed=3, last_save_model_only=True)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    begun = loaded(Ours, tmp_path)
    assert begun.step == 0
    assert_equal(dict(begun.model.state_dict()), dict(seed.model.state_dict()))


def test_steps_that_are_only_on_the_hosts_disks_are_newer_than_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "CLOSE_SECONDS", 0.0)
    config = {"local": str(tmp_path / "local")}
    seed = new(Ours, tmp_path / "shared", last_save_model_only=True)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    with failing("pwrite", EIO, "*/shared/*.part"):
        loaded(Ours, tmp_path / "shared", **config).train(4)
    assert steps_in(tmp_path / "shared") == numbered(0)
    assert loaded(Ours, tmp_path / "shared", **config).step == 4


def test_a_folder_with_only_an_export_is_refused(tmp_path: Path) -> None:
    trained(Ours, tmp_path, interval=STEPS, last_save_model_only=True, last_save_in_hf=True)
    with pytest.raises(CheckpointError, match=f"step-{STEPS}.*Choose another folder"):
        new(Ours, tmp_path).checkpointer.load()
    with pytest.raises(ValueError, match="create_seed_checkpoint cannot be combined"):
        new(
            Ours,
            tmp_path,
            create_seed_checkpoint=True,
            last_save_model_only=True,
            last_save_in_hf=True,
        )


def damaged(step: Path) -> None:
    """Changes a byte of the last tensor of a step."""
    [file] = step.glob("*.distcp")
    data = bytearray(file.read_bytes())
    index = read_metadata(step)
    last = max(index.storage_data.values(), key=lambda info: info.offset)
    data[last.offset + last.length // 2] ^= 1
    file.write_bytes(data)


def test_a_run_does_not_fall_back_to_a_seed_with_the_optimizer_of_a_damaged_step(
    tmp_path: Path,
) -> None:
    seed = new(Ours, tmp_path, last_save_model_only=True)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    loaded(Ours, tmp_path).train(2)
    damaged(tmp_path / "0000000002")
    with pytest.raises(CheckpointError, match="restart with load_step=0"):
        new(Ours, tmp_path).checkpointer.load()
    assert loaded(Ours, tmp_path, 0).step == 0


def test_a_chosen_step_without_a_file_is_not_replaced_by_torchtitans_step_of_its_number(
    tmp_path: Path,
) -> None:
    trained(Stock, tmp_path, 4)
    with pytest.warns(match="later steps of torchtitan's checkpointer, up to step-4"):
        rewound = loaded(Ours, tmp_path, 2)
    rewound.train(4)
    [file] = (tmp_path / "0000000004").glob("*.distcp")
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"\.distcp"):
        new(Ours, tmp_path).checkpointer.load(4)


def test_the_manager_restores_no_older_step_than_torchtitans_newest(tmp_path: Path) -> None:
    trained(Ours, tmp_path, 4)
    trainer = new(Stock, tmp_path)
    trainer.train(6)
    [file] = (tmp_path / "0000000004").glob("*.distcp")
    file.unlink()
    assert loaded(Ours, tmp_path).step == 6


def test_a_directory_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(Stock, tmp_path, 2)
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("step-2"):
            raise PermissionError(EACCES, "no", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError, match="step-2"):
        new(Ours, tmp_path).checkpointer.load()


def test_the_last_step_is_complete_in_the_folder_when_training_ends(tmp_path: Path) -> None:
    trainer = new(Ours, tmp_path / "shared", local=str(tmp_path / "local"), interval=STEPS)
    trainer.checkpointer.load()
    with held("pwrite", "*/shared/*.part") as gate, ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainer.train)
        gate.wait()
        assert not training.done()
        gate.open()
        training.result()
    assert steps_in(tmp_path / "shared") == numbered(STEPS)


def test_a_state_without_values_is_restored(tmp_path: Path) -> None:
    def train(steps: int) -> titan.Trainer:
        trainer = new(Ours, tmp_path)
        trainer.loader.state_dict = dict  # type: ignore[method-assign]
        assert trainer.checkpointer.load() is (steps > 2)
        trainer.train(steps)
        return trainer

    train(2)
    assert train(4).step == 4


@pytest.mark.parametrize("model_only", [False, True])
def test_a_run_begins_with_an_initial_checkpoint(tmp_path: Path, model_only: bool) -> None:
    old = trained(Ours, tmp_path / "a", 4)
    config = {"initial_load_model_only": model_only}
    begun = loaded(Ours, tmp_path / "b", initial_load_path=str(tmp_path / "a/0000000004"), **config)
    assert begun.step == (0 if model_only else 4)
    assert_equal(dict(begun.model.state_dict()), dict(old.model.state_dict()))


def test_a_step_that_does_not_exist_is_refused_with_the_steps(tmp_path: Path) -> None:
    trained(Ours, tmp_path, 4)
    with pytest.raises(FileNotFoundError, match=r"step 3 .*\[2, 4\]"):
        new(Ours, tmp_path).checkpointer.load(3)


def test_excluded_keys_keep_their_values(tmp_path: Path) -> None:
    trained(Ours, tmp_path, 4)
    fresh = loaded(Ours, tmp_path, exclude_from_loading=["lr_scheduler", "dataloader"])
    assert fresh.step == 4
    assert (fresh.schedulers.state_dict(), fresh.loader.dataset.last) == ({"last_epoch": 0}, 0)
    with pytest.raises(ValueError, match="the state has no typo"):
        new(Ours, tmp_path, exclude_from_loading=["typo"])


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"keep_latest_k": 2}, [8, 10]),
        ({"keep_latest_k": 0}, [2, 4, 6, 8, 10]),
        ({"interval": 4, "enable_first_step_checkpoint": True}, [1, 4, 8, 10]),
    ],
    ids=["two", "all", "first"],
)
def test_the_settings_choose_the_steps(
    tmp_path: Path, config: dict[str, Any], steps: list[int]
) -> None:
    trained(Ours, tmp_path, **config)
    with torch_ckpt.CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == steps


def test_a_checkpointer_that_only_loads_saves_nothing_and_one_that_is_disabled_does_nothing(
    tmp_path: Path,
) -> None:
    trained(Ours, tmp_path, 4)
    loaded(Ours, tmp_path, load_only=True).train()
    assert not new(Ours, tmp_path / "absent", load_only=True).checkpointer.load()
    disabled = new(Ours, tmp_path, enable=False)
    assert not disabled.checkpointer.load()
    disabled.train()
    assert steps_in(tmp_path) == numbered(2, 4)


def test_steps_are_saved_on_the_hosts_own_disk_first(tmp_path: Path) -> None:
    local = tmp_path / "local"
    trained(Ours, tmp_path / "shared", 6, local=str(local))
    assert [path.name for path in sorted(local.rglob("00000*"))] == numbered(4, 6)
    assert loaded(Ours, tmp_path / "shared", local=str(local)).step == 6


def test_a_folder_can_be_a_url(tmp_path: Path) -> None:
    url = f"memory://torchtitan/{tmp_path.name}"
    trained(Stock, url, 2)
    assert loaded(Ours, url).step == 2
    loaded(Ours, url).train(4)
    assert loaded(Ours, url).step == 4


def test_the_error_of_a_save_is_raised_when_training_waits_for_it(tmp_path: Path) -> None:
    trainer = new(Ours, tmp_path, async_mode="async")
    with failing("fsync", ENOSPC):
        trainer.checkpointer.save(2)
        with pytest.raises(OSError, match="No space"):
            trainer.checkpointer.maybe_wait_for_saving()
    trainer.checkpointer.close()


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="async_mode must be one of"):
        new(Ours, tmp_path, async_mode="Async")


@pytest.mark.parametrize("setting", ["last_save_in_hf", "initial_load_in_hf"])
def test_hugging_faces_format_needs_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr("tests.titan.Adapter", lambda: None)
    with pytest.raises(ValueError, match="needs a model with an sd_adapter"):
        new(Ours, tmp_path, last_save_model_only=True, **{setting: True})


def test_a_setting_of_a_later_torchtitan_is_refused_unless_it_has_its_default(
    tmp_path: Path,
) -> None:
    class Later(Ours):
        @dataclass(kw_only=True, slots=True)
        class Config(Ours.Config):
            purge_exempt: Any = None
            others: list[str] = field(default_factory=list)

    new(Later, tmp_path).checkpointer.close()
    with pytest.raises(ValueError, match="does not support torchtitan's setting purge_exempt"):
        new(Later, tmp_path, purge_exempt=lambda step: True)
