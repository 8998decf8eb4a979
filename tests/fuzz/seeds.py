"""Writes the fuzzers' seeds: records and metadata as torch and this package write them.

.venv/bin/python -m tests.fuzz.seeds build/fuzz/seeds
"""

from __future__ import annotations

import io
import pickle
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

import torch_ckpt
from tests.attacks.test_metadata_bombs import TEXT_AT_BYTE_0
from tests.cpp.stock_metadata import rich, small
from tests.metadata import read_metadata
from torch_ckpt.checkpoint.metadata import checksum_tables, encode_metadata

TENSORS = {
    "scalar": torch.tensor(3),
    "row": torch.arange(40.0),
    "transposed": torch.ones(3, 4, dtype=torch.bfloat16).t(),
    "empty": torch.empty(0, 2),
    "untyped": torch.arange(30).to(torch.uint16),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(4)),
    "two": [torch.ones(2), torch.ones(2)],
}


def records() -> dict[str, bytes]:
    seeds = {}
    for name, value in TENSORS.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        seeds[name] = stream.getvalue()
        with zipfile.ZipFile(stream) as archive:
            pickles = [entry for entry in archive.namelist() if entry.endswith("data.pkl")]
            seeds[f"{name}.pkl"] = archive.read(pickles[0])
    with tempfile.TemporaryDirectory() as path:
        state = {"small": torch.ones(3), "blocks": torch.ones(40_000), "object": "x" * 20_000}
        torch_ckpt.save(state, path, no_dist=True)
        for name, table in checksum_tables(read_metadata(path)).items():
            seeds[f"table.{name}"] = table
            # use_record() appends the checksum.
            seeds[f"table.{name}.unsummed"] = table[:-4]
    return seeds


def metadata() -> dict[str, bytes]:
    seeds = {"ours": encode_metadata(small()), "text_at_byte_0": TEXT_AT_BYTE_0}
    for protocol in (2, 3, 4, 5):
        seeds[f"small.{protocol}"] = pickle.dumps(small(), protocol)
        seeds[f"rich.{protocol}"] = pickle.dumps(rich(), protocol)
    return seeds


def main() -> None:
    target = Path(sys.argv[1])
    # For the generator of programs, any bytes are choices.
    kinds = {"record": records(), "metadata": metadata(), "program": {"choices": bytes(range(256))}}
    for kind, seeds in kinds.items():
        (target / kind).mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (target / kind / name).write_bytes(data)
        print(f"{kind}: {len(seeds)} seeds, {sum(map(len, seeds.values()))} bytes")


if __name__ == "__main__":
    main()
