#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace torch_ckpt::test {

// The functions that meet bytes from outside, with what a load does with their results. Each
// returns which property does not hold, empty for none; refusing the bytes is always right. Shared
// by the fuzzers and by mutation_test.cpp.

/// One record, or parts of one: the archive, data.pkl, a checksum table with or without its sum.
std::string use_record(std::span<const std::byte> bytes);

/// The program of a metadata pickle.
std::string use_metadata(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::test
