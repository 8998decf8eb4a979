#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace torch_ckpt::test {

// Functions that decode untrusted bytes as a load does, and use the results. Each returns the
// property that does not hold; empty if all hold. Rejecting the bytes is always right. Used by the
// fuzzers and by mutation_test.cpp.

/// Decodes a record or a part of one: the archive, data.pkl, or a checksum table with or without
/// its checksum.
std::string use_record(std::span<const std::byte> bytes);

/// Decodes a metadata pickle.
std::string use_metadata(std::span<const std::byte> bytes);

/// The cost of reading metadata once: the walk and the index.
struct Cost {
  std::size_t heap_bytes = 0;  // peak
  std::uint64_t steps = 0;     // basic blocks of csrc/index; 0 in a build that does not count them
  bool is_accepted = false;
};

// Limits of the cost: a fixed part, plus a part for each byte of metadata.
inline constexpr std::size_t kHeapBytesPerByte = 64;
inline constexpr std::size_t kFixedHeapBytes = std::size_t{256} << 10;
inline constexpr std::uint64_t kStepsPerByte = 256;
inline constexpr std::uint64_t kFixedSteps = std::uint64_t{1} << 16;

Cost cost_of_metadata(std::span<const std::byte> bytes);
/// Calls use_metadata(), and checks the cost and the lists that torch would create for the paths.
std::string use_metadata_within_cost(std::span<const std::byte> bytes);

}  // namespace torch_ckpt::test
