#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace torch_ckpt::test {

/// Returns a number from [low, high]: random, or from the fuzzer's bytes.
using Choose = std::function<std::uint64_t(std::uint64_t low, std::uint64_t high)>;

/// Generates a metadata program of about `bytes` bytes as a hostile writer could: with any first
/// opcode, long texts, paths, tables, shared values, and pairs that repeat until the end. Most
/// programs are well-formed, so that an index is built from them.
std::string metadata_program(const Choose& choose, std::size_t bytes);

}  // namespace torch_ckpt::test
