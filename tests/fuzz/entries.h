#pragma once

#include <cstddef>
#include <cstdint>
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

/// The cost of reading metadata once: the walk and the index.
struct Cost {
  std::size_t heap_bytes = 0;  // at any one time
  std::uint64_t steps = 0;     // basic blocks of csrc/index; 0 in a build that does not count them
  bool is_accepted = false;
};

// Limits of the cost. Metadata of a few bytes costs the fixed part.
inline constexpr std::size_t kHeapBytesPerByte = 64;
inline constexpr std::size_t kFixedHeapBytes = std::size_t{256} << 10;
inline constexpr std::uint64_t kStepsPerByte = 256;
inline constexpr std::uint64_t kFixedSteps = std::uint64_t{1} << 16;

Cost cost_of_metadata(std::span<const std::byte> bytes);
/// Calls use_metadata, and checks the cost and the lists that accepted paths make.
std::string use_metadata_within_cost(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::test
