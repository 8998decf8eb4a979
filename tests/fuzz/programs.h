#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace torch_ckpt::test {

/// A number from [low, high]: random, or from the fuzzer's bytes.
using Choose = std::function<std::uint64_t(std::uint64_t low, std::uint64_t high)>;

/// Builds a metadata program of about `bytes` bytes as a hostile writer could: any first opcode,
/// long texts, paths, tables, values that the memo shares, and pairs that repeat up to the end.
/// Most programs are well-formed, so that they reach the index.
std::string metadata_program(const Choose& choose, std::size_t bytes);

}  // namespace torch_ckpt::test
