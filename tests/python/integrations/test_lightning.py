"""torch_ckpt.integrations.lightning in the real Trainer, under both of Lightning's names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_structure

import torch_ckpt
from tests.fault_hooks import at_fault_points, failing, held
from tests.forked import run_script
from tests.object_server import ObjectServer
from tests.snippets import snippets_of
from tests.support import assert_equal, stock_load
from torch_ckpt.stores import open_object, open_store

NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name.partition(".")[0]) is None, reason=f"no {name}"
        ),
    )
    for name in ("lightning.pytorch", "pytorch_lightning")
]
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=NAMES)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def plugin(**options: Any) -> Any:
    from torch_ckpt.integrations.lightning import TorchCkptIO

    return TorchCkptIO(**options)


def module(pl: Any) -> Any:
    class Module(pl.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
            )

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    torch.manual_seed(3)
    return Module()


def batches() -> Any:
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(
    pl: Any,
    root: Path | str,
    epochs: int,
    io: Any,
    resume: Any = None,
    *,
    save_last: Any = True,
    ranks: int = 1,
    more: Sequence[Any] = (),
) -> Any:
    """Trains 6 steps an epoch, fewer on several ranks; returns the trainer."""
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=root, filename="{epoch}", monitor="loss", save_top_k=2, save_last=save_last
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if ranks == 1 else "ddp",
        max_epochs=epochs,
        plugins=[io],
        callbacks=[checkpoint, *more],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module(pl), batches(), batches(), ckpt_path=resume)
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return trainer.lightning_module.state_dict()


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(
    pl: Any, tmp_path: Path
) -> None:
    uninterrupted = fit(pl, tmp_path / "whole", 4, plugin())
    fit(pl, tmp_path / "parts", 2, plugin())
    resumed = fit(pl, tmp_path / "parts", 4, plugin(), resume="last")
    assert resumed.global_step == uninterrupted.global_step == 24
    assert_equal(weights(resumed), weights(uninterrupted))


def test_model_checkpoint_keeps_the_best_and_the_last(pl: Any, tmp_path: Path) -> None:
    trainer = fit(pl, tmp_path, 4, plugin())
    kept = sorted(path.name for path in tmp_path.iterdir())
    best = trainer.checkpoint_callback.best_k_models
    assert len(best) == 2
    assert kept == sorted([*(Path(path).name for path in best), "last.ckpt"])
    for name in kept:
        assert torch_ckpt.verify(tmp_path / name).ok


def test_a_run_beneath_a_url_is_saved_resumed_and_pruned(pl: Any, tmp_path: Path) -> None:
    uninterrupted = fit(pl, tmp_path, 4, plugin())
    url = f"memory://{uuid.uuid4().hex}/run"
    fit(pl, url, 2, plugin())
    resumed = fit(pl, url, 4, plugin(), resume=f"{url}/last.ckpt")
    assert resumed.global_step == 24
    assert_equal(weights(resumed), weights(uninterrupted))
    callback = resumed.checkpoint_callback
    best = {path.removeprefix(f"{url}/") for path in callback.best_k_models}
    kept = {entry.name.partition("/")[0] for entry in open_store(url).list()}
    assert len(best) == 2
    assert kept == best | {"last.ckpt"}
    for name in kept:
        assert callback.file_exists(f"{url}/{name}", resumed)
        assert torch_ckpt.verify(f"{url}/{name}").ok
    assert not callback.file_exists(f"{url}/absent.ckpt", resumed)


PAGE = Path(__file__).parents[3] / "docs" / "remote.md"

# The module that the lines on the page train, the lines, and a second run that continues.
PROGRAM = """
import os
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_ckpt.integrations.lightning import TorchCkptIO

os.chdir({directory!r})

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Module()
{code}
again = L.Trainer(plugins=[TorchCkptIO()], max_epochs=3)
again.fit(Module(), ckpt_path="s3://bucket/lightning/last.ckpt")
assert (trainer.global_step, again.global_step) == (4, 6)
"""


def test_the_lines_on_the_page_save_and_resume_at_a_server(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("lightning", "s3fs"):
        pytest.importorskip(package)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options["endpoint_url"])
    [code] = [one.code for one in snippets_of(PAGE) if "TorchCkptIO" in one.code]
    done = run_script(PROGRAM.format(code=code, directory=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "lightning/last.ckpt/.metadata" in s3.objects
    assert {key.partition("/")[0] for key in s3.objects} == {"lightning"}
    assert not s3.uploads


def test_save_last_may_be_a_link_with_synchronous_saves(pl: Any, tmp_path: Path) -> None:
    trainer = fit(pl, tmp_path, 3, plugin(async_saves=False), save_last="link")
    assert (tmp_path / "last.ckpt").is_symlink()
    loaded = plugin().load_checkpoint(tmp_path / "last.ckpt")
    assert_equal(loaded["state_dict"], weights(trainer))


def test_a_link_to_the_last_checkpoint_is_refused_for_asynchronous_saves(
    pl: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"last\.ckpt is a link: .*async_saves=False"):
        fit(pl, tmp_path, 3, plugin(), save_last="link")
    # The second save has written nothing.
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 1
    assert torch_ckpt.verify(tmp_path / "last.ckpt").ok


def test_tensors_of_a_checkpoint_have_their_names_for_stock_dcp(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    trainer = fit(pl, tmp_path, 1, plugin())
    target = {"state_dict.net.0.weight": torch.zeros(8, 8)}
    stock_load(target, tmp_path / "last.ckpt")
    assert torch.equal(target["state_dict.net.0.weight"], weights(trainer)["net.0.weight"])


# --- CheckpointIO --------------------------------------------------------------------------------


@pytest.fixture
def io() -> Any:
    pytest.importorskip("lightning")
    return plugin()


def checkpoint_of(value: float) -> dict[str, Any]:
    module = nn.BatchNorm1d(3)
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": value, "betas": (0.9, 0.5)}]}],
        "by_number": {0: torch.full((2,), value), "none": None, "pair": (torch.tensor(value), 1)},
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert tree_structure(found) == tree_structure(wanted)
    assert_equal(found, wanted)


@pytest.fixture(params=["directory", "URL", "file URL"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Root of checkpoints of each kind."""
    urls = {"URL": f"memory://{uuid.uuid4().hex}", "file URL": f"file://{tmp_path}"}
    return urls.get(request.param, str(tmp_path))


@pytest.mark.parametrize("async_saves", [True, False])
def test_the_loaded_checkpoint_equals_the_saved_one(io: Any, root: str, async_saves: bool) -> None:
    checkpoint = checkpoint_of(0.5)
    plugin(async_saves=async_saves).save_checkpoint(checkpoint, f"{root}/c")
    torch_ckpt.check_for_errors()
    io.save_checkpoint(checkpoint_of(0.25), f"{root}/other")
    loaded = io.load_checkpoint(f"{root}/c")
    assert_same(loaded, checkpoint)
    assert loaded["state_dict"]._metadata == checkpoint["state_dict"]._metadata


def test_changes_after_a_save_are_not_in_the_checkpoint(io: Any, tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20)
    io.save_checkpoint({"tensor": tensor}, tmp_path / "c")
    tensor.fill_(1.0)
    assert not io.load_checkpoint(tmp_path / "c")["tensor"].any()


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Makes every commit fail from the call on."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(failing("rename", ENOSPC, "*/.metadata"))


def test_the_next_save_or_teardown_raises_the_error_of_a_save_once(
    io: Any, tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    full_disk()
    for next_call in (io.teardown, lambda: io.save_checkpoint(checkpoint_of(0.5), tmp_path / "d")):
        io.save_checkpoint(checkpoint_of(0.5), tmp_path / "c")
        with pytest.raises(CheckpointException, match="No space left"):
            next_call()
        io.teardown()


def test_an_old_checkpoint_is_kept_if_the_new_save_fails(
    io: Any, tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    io.save_checkpoint(checkpoint_of(0.5), tmp_path / "old")
    io.wait_until_finished()
    full_disk()
    io.save_checkpoint(checkpoint_of(0.25), tmp_path / "new")
    io.remove_checkpoint(tmp_path / "old")
    with pytest.raises(CheckpointException, match="No space left"):
        io.teardown()
    assert_same(io.load_checkpoint(tmp_path / "old"), checkpoint_of(0.5))


def test_a_link_to_an_interrupted_save_is_named(io: Any, tmp_path: Path) -> None:
    with held("rename", "*/new/.metadata") as may_commit:
        io.save_checkpoint(checkpoint_of(0.5), tmp_path / "new")
        (tmp_path / "last.ckpt").symlink_to("new")
        with pytest.raises(
            FileNotFoundError, match="link points to new, whose save was interrupted"
        ):
            plugin().load_checkpoint(tmp_path / "last.ckpt")
        may_commit.open()
        io.teardown()
    assert_same(plugin().load_checkpoint(tmp_path / "last.ckpt"), checkpoint_of(0.5))


def test_an_old_checkpoint_is_removed_after_the_new_one_is_durable(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(checkpoint_of(0.5), tmp_path / "old")
    io.wait_until_finished()
    calls: list[str] = []
    removal_waits = threading.Event()

    def note(operation: str, path: str) -> None:
        if operation == "wait for the save before a removal":
            removal_waits.set()
        if (operation, path) == ("rename", f"{tmp_path}/new/.metadata"):
            # Otherwise the removing thread might reach the directory later.
            assert removal_waits.wait(60)
        if operation in ("rename", "fsync_directory", "rmtree"):
            calls.append(f"{operation} {os.path.relpath(path, tmp_path)}")

    with at_fault_points(note):
        io.save_checkpoint(checkpoint_of(0.25), tmp_path / "new")
        io.remove_checkpoint(tmp_path / "old")
        io.teardown()
    assert calls[-3:] == ["rename new/.metadata", "fsync_directory new", "rmtree old"]
    assert not (tmp_path / "old").exists()


class Own:
    """Class that is not allow-listed."""


def test_objects_of_other_classes_are_loaded_only_with_weights_only_false(
    io: Any, tmp_path: Path
) -> None:
    io.save_checkpoint({"own": Own()}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Own"):
        io.load_checkpoint(tmp_path / "c")
    assert type(io.load_checkpoint(tmp_path / "c", weights_only=False)["own"]) is Own


@pytest.mark.parametrize(
    ("checkpoint", "path", "message"),
    [
        ({"a": {0: torch.zeros(1), "0": torch.ones(1)}}, None, r"have the name a\.0"),
        ({"a": {0: torch.zeros(1), "0": None}}, None, r"have the name a\.0"),
        ({"lightning": torch.zeros(1)}, None, "have the name lightning"),
        ({}, "s3://me:hidden@bucket/c", "has a user name or a password"),
    ],
    ids=["two tensors", "a tensor and None", "the reserved name", "a URL with a password"],
)
def test_two_values_with_the_same_name_and_a_password_are_refused(
    io: Any, tmp_path: Path, checkpoint: dict[str, Any], path: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        io.save_checkpoint(checkpoint, path or tmp_path / "c")


def test_a_directory_without_a_checkpoint_is_named(io: Any, root: str) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        io.load_checkpoint(f"{root}/absent")


def test_a_removed_checkpoint_cannot_be_loaded_and_others_can(io: Any, root: str) -> None:
    for name in ("old", "new"):
        io.save_checkpoint(checkpoint_of(0.5), f"{root}/{name}")
    io.remove_checkpoint(f"{root}/old")
    io.remove_checkpoint(f"{root}/absent")
    io.teardown()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(f"{root}/old")
    assert_same(io.load_checkpoint(f"{root}/new"), checkpoint_of(0.5))


def test_a_checkpoint_of_lightning_itself_is_removed_from_a_store(io: Any) -> None:
    url = f"memory://{uuid.uuid4().hex}/last.ckpt"
    store, name = open_object(url)
    for other in (name, f"{name}.old"):
        store.put(other, [memoryview(b"x")], 1)
    io.remove_checkpoint(url)
    assert [entry.name for entry in store.list()] == [f"{name}.old"]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_torch_ckpt_imports_neither_lightning_nor_transformers() -> None:
    others = "{'lightning', 'pytorch_lightning', 'transformers'}"
    done = run(f"import sys, torch_ckpt; print({others} & {{*sys.modules}})")
    assert done.stdout.strip() == "set()"


def test_a_missing_lightning_is_reported_with_the_package_to_install() -> None:
    code = (
        "import sys, importlib.util as of\n"
        "find = of.find_spec\n"
        "hidden = {'lightning', 'lightning_fabric'}\n"
        "of.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
        "import torch_ckpt.integrations.lightning\n"
    )
    done = run(code)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: torch_ckpt.integrations.lightning needs Lightning. Run "
        "pip install 'torch_ckpt[lightning]' (or pip install pytorch-lightning)"
    )
