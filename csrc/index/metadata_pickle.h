#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "error.h"
#include "format/pickle_reader.h"
#include "index/allowed_globals.h"
#include "index/pickle_values.h"
#include "index/torch_records.h"

namespace torch_ckpt::index {

// The metadata of a checkpoint is a pickle, which is a program for Python's unpickler.
// Allow-listing names does not make it safe: BUILD sets attributes of any object, lengths and memo
// indices make the unpickler allocate memory, and hashing tuples that each contain the previous one
// twice takes forever. The program is therefore first walked without running it, and the index is
// built from the result of the walk. Python runs only programs that have passed, and only if
// torch's objects are needed.

/// Limits that are far above what real metadata needs. docs/format.md gives the reasons.
struct MetadataLimits {
  static constexpr std::size_t kDepth = 64;  // maximum nesting depth of values
  static constexpr std::size_t kStack = std::size_t{1} << 20;
  static constexpr std::size_t kNameBytes = format::PickleReader::kNameBytes;
  // The weight of a value is 1, plus 1 per 64 bytes of text or bytes, plus the weights of its
  // parts; a shared part counts each time. The cost of hashing, printing or copying a value is
  // proportional to its weight.
  static constexpr std::uint32_t kKeyWeight = 2048;
  static constexpr std::uint32_t kArgumentsWeight = 4096;
  static constexpr std::uint32_t kWeight = 0xfffffffe;
  static constexpr std::uint32_t weight_of_text(std::size_t bytes) {
    return static_cast<std::uint32_t>(1 + bytes / 64);
  }
  /// Maximum weight of a value in a pickle of `bytes` bytes. A value without shared parts weighs
  /// less than 1 per byte of pickle; torch's metadata weighs about 1/3 per byte.
  static constexpr std::uint32_t max_weight(std::size_t bytes) {
    return static_cast<std::uint32_t>(std::min<std::size_t>(kWeight, 65536 + 4 * bytes));
  }
  /// Maximum number of lists, dicts and instances that exist at the same time, in a pickle of
  /// `bytes` bytes. torch's metadata has one per 26 bytes.
  static constexpr std::size_t max_objects(std::size_t bytes) {
    return std::min<std::size_t>(kWeight, 4096 + bytes / 6);
  }
};

/// The values of a metadata pickle, and the records of the instances of torch's classes.
struct MetadataPickle {
  PickleValues values;
  TorchRecords records;
};

/// Walks a program without running it. Accepts only binary opcodes of protocols 2 to 5, in the form
/// that CPython's picklers write. Time and memory are proportional to the program's size.
///
/// Fails with Errc::pickle_forbidden for a name that is not in `allowed`. For any other defect,
/// fails with another pickle_* code and the offset of the opcode.
Result<MetadataPickle> walk_metadata_pickle(std::span<const std::byte> bytes,
                                            const Globals& allowed);

}  // namespace torch_ckpt::index
