"""Prints tests/cpp/stock_records.cpp: records that the installed torch writes for a few tensors.

    .venv/bin/python tests/cpp/stock_records.py > tests/cpp/stock_records.cpp
    clang-format -i tests/cpp/stock_records.cpp

The C++ tests need no torch: they compare with these constants. The script needs 6 GiB of temporary
disk space.
"""

import os
import struct
import tempfile
import zipfile
import zlib

import torch


def literal(data: bytes, columns: int = 88) -> str:
    """Formats a C++ literal. Octal escapes end after three digits, even if a digit follows."""
    lines = [""]
    for byte in data:
        char = chr(byte)
        if char == "\n":
            token = "\\n"
        elif char in '"\\':
            token = "\\" + char
        elif 32 <= byte < 127:
            token = char
        else:
            token = f"\\{byte:03o}"
        if len(lines[-1]) + len(token) > columns:
            lines.append("")
        lines[-1] += token
    return "\n".join(f'    "{line}"' for line in lines) + "sv"


def stored(tensor: torch.Tensor) -> tuple[bytes, int, int, bytes, bytes]:
    """Returns data.pkl, payload size, payload checksum, and the bytes before and after it."""
    with tempfile.TemporaryFile() as file:
        torch.save(tensor, file)
        with zipfile.ZipFile(file) as archive:
            pickle = archive.read("archive/data.pkl")
            entry = archive.getinfo("archive/data/0")
        file.seek(entry.header_offset)
        name, extra = struct.unpack("<26xHH", file.read(30))
        begin = entry.header_offset + 30 + name + extra
        file.seek(0)
        head = file.read(begin)
        file.seek(begin + entry.file_size, os.SEEK_SET)
        return pickle, entry.file_size, entry.CRC, head, file.read()


COMPLEX = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
SMALL = {
    "scalar": torch.tensor(3),
    "row": torch.arange(100.0),
    "matrix": torch.zeros(300, 2),
    "transposed": torch.ones(3, 4, dtype=torch.bfloat16).t(),
    "four_dimensions": torch.zeros(2, 3, 1, 128, dtype=torch.uint8),
    "empty": torch.empty(0, 2),
    "four_byte_integers": torch.zeros(70000, dtype=torch.int8),
    "untyped_storage": torch.arange(300).to(torch.uint16),
    "float8": torch.tensor([1.0, 2, 3, 4, 5]).to(torch.float8_e4m3fn),
    "conjugate": COMPLEX.conj(),
    "negative": torch._neg_view(torch.tensor([1.0, 2.0])),
    "conjugate_and_negative": torch._neg_view(COMPLEX.conj()),
}
# Sizes around the two limits of zip64: for headers after the payload, and for the payload itself.
LARGE = {
    "long_integers": 1 << 31,
    "ends_below_4_gib": 0xFFFFFFFE - 800,
    "directory_above_4_gib": 0xFFFFFFFE,
    "smallest_zip64": 0xFFFFFFFF,
    "five_gib": 5 << 30,
}


def braces(values: object) -> str:
    return "{" + ", ".join(map(str, values)) + "}"  # type: ignore[call-overload]


def case(name: str, tensor: torch.Tensor) -> str:
    pickle, payload_bytes, payload_crc, head, tail = stored(tensor)
    header = ", ".join(
        [
            f'"{str(tensor.dtype).removeprefix("torch.")}"',
            braces(tensor.shape),
            braces(tensor.stride()),
            str(tensor.is_conj()).lower(),
            str(tensor.is_neg()).lower(),
        ]
    )
    return (
        f'{{"{name}", {header},\n{literal(pickle)},\n'
        f"{payload_bytes}, {payload_crc:#010x}, {len(head)}, {zlib.crc32(head):#010x}, "
        f"{len(tail)}, {zlib.crc32(tail):#010x}}},\n"
    )


def main() -> None:
    print(f"// Printed by stock_records.py from torch {torch.__version__}; do not edit.\n")
    print('#include "stock_records.h"\n')
    print("namespace torch_ckpt::test {\n\nusing namespace std::string_view_literals;\n")
    print("const std::vector<StockRecord>& stock_records() {")
    print("static const std::vector<StockRecord> kRecords = {")
    for name, tensor in SMALL.items():
        print(case(name, tensor), end="")
    for name, size in LARGE.items():
        print(case(name, torch.zeros(size, dtype=torch.uint8)), end="")
    print("};\nreturn kRecords;\n}\n")
    _, _, _, head, tail = stored(SMALL["scalar"])
    print(f"std::string_view stock_scalar_head() {{\nreturn\n{literal(head)};\n}}\n")
    print(f"std::string_view stock_scalar_tail() {{\nreturn\n{literal(tail)};\n}}\n")
    print("}  // namespace torch_ckpt::test")


if __name__ == "__main__":
    main()
