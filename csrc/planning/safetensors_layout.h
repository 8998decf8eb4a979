#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/safe_checksums.h"
#include "format/safetensors.h"
#include "planning/collective_ranges.h"
#include "planning/global_plan.h"

namespace torch_ckpt::planning {

// The files of a model in Hugging Face's layout:
//
//   1. Tensors are distributed over files in the order of their names in the state dict. A file has
//      at most `max_shard_bytes` bytes of tensors, or a single larger tensor.
//   2. A file has wide elements first, so that readers can map each tensor at its alignment, and
//      equally wide elements in the order of their names. Its data begins at a multiple of a page.
//   3. A single file is "model.safetensors". Several files are "model-00001-of-00002.safetensors",
//      and so on, and "model.safetensors.index.json" maps names to files. With a tag, the names are
//      "model-{tag}-00001-of-00002.safetensors", and a single file has an index, too.
//
// Everything follows from names, dtypes and sizes, so each rank can write its parts of tensors to
// their final places.
class SafetensorsLayout {
 public:
  struct Options {
    std::uint64_t max_shard_bytes = 0;   // 0: a single file
    format::SafeMetadata metadata = {};  // of each file
    std::string tag = {};                // in the names of the files
  };
  struct File {
    std::string name;
    std::string header;  // the bytes before the data
    std::uint64_t bytes = 0;
  };
  /// The place of a tensor's data.
  struct Place {
    std::uint32_t file = 0;
    std::uint64_t begin = 0;  // offset in the file
  };
  /// Encoded parts (format/part_sums.h) that a rank has written to a file.
  struct WrittenParts {
    std::string_view file;
    std::string_view parts;
  };
  /// Another file of the model, such as config.json.
  struct Extra {
    std::string name;
    std::string contents;
  };
  static constexpr std::string_view kIndexName = "model.safetensors.index.json";

  /// Fails with Errc::unsavable if the format cannot hold a tensor, or two have one name.
  static Result<SafetensorsLayout> of(std::vector<format::SafeTensor> tensors,
                                      const Options& options);

  std::span<const File> files() const { return files_; }
  /// The tensors, in the order in which they were given; the places, in the same order.
  std::span<const format::SafeTensor> tensors() const { return tensors_; }
  std::span<const Place> places() const { return places_; }
  /// Joins the parts of all ranks to the encoded checksum table of each file. Fails with
  /// Errc::internal and the tensor's name unless the parts have as many bytes as each tensor.
  Result<std::vector<std::string>> checksum_tables(std::span<const WrittenParts> written) const;
  /// The contents of the index; empty if a single file has no index.
  const std::string& index() const { return index_; }

 private:
  std::vector<File> files_;
  std::vector<Place> places_;
  std::vector<format::SafeTensor> tensors_;  // in the order in which they were given
  std::string index_;
};

/// Returns the checksums of a model's files. tables: encoded checksum tables, in the order of the
/// files; empty if unknown.
std::vector<format::SafeChecksums> checksums_of(std::span<const SafetensorsLayout::File> files,
                                                std::vector<std::string> tables,
                                                std::span<const SafetensorsLayout::Extra> extras);

/// Returns the dtype in which a tensor is stored: `cast` if the tensor has floating-point elements
/// of another dtype, otherwise its own. cast: nullptr changes nothing.
const format::Dtype* stored_dtype(const format::Dtype* dtype, const format::Dtype* cast);

/// Returns the tensors of a plan, in the order of GlobalPlan::name(). Fails with
/// Errc::unsavable if a value is not a tensor. names: new names in the same order; empty
/// keeps the plan's.
Result<std::vector<format::SafeTensor>> safe_tensors_of(const GlobalPlan& plan,
                                                        std::span<const std::string> names,
                                                        const format::Dtype* cast);

/// A part of a tensor of the layout, which one rank writes.
struct OwnedPart {
  std::size_t tensor = 0;  // number in the layout
  std::vector<std::uint64_t> offsets;
  std::vector<std::uint64_t> sizes;
};

/// Returns the parts that each rank owns, in the order of GlobalPlan::owned(). The layout must have
/// the tensors in the order of the plan's names.
std::vector<std::vector<OwnedPart>> owned_parts_of(const GlobalPlan& plan);

/// Returns the bytes of the files that each part occupies. parts: of each rank. Leaves out a part
/// that does not lie within its tensor, which the rank itself refuses.
std::vector<FilePart> file_parts_of(const SafetensorsLayout& layout,
                                    std::span<const std::vector<OwnedPart>> parts);

/// The files of which a rank writes parts, and the places of the tensors, in the order of the parts
/// that it owns.
struct RankPlaces {
  struct File {
    std::string name;
    std::uint64_t bytes = 0;
    // The bytes before the data, if this rank writes the complete file.
    std::string head = {};
  };
  std::vector<File> files;
  std::vector<SafetensorsLayout::Place> places;
  // Ranges that this rank writes together with others; nullptr if there are none.
  std::shared_ptr<const CollectiveRanges> collective = nullptr;
  // True for files that hold only this rank's parts (planning/object_files.h).
  bool are_packed = false;

  /// Returns the places for each rank. parts: of each rank. offers: see choose_collective_ranges().
  static std::vector<RankPlaces> of(const SafetensorsLayout& layout,
                                    std::span<const std::vector<OwnedPart>> parts,
                                    std::span<const std::optional<os::MemoryFile::Address>> offers);
  std::string encode() const;
  /// Fails with Errc::frame_damaged.
  static Result<RankPlaces> decode(std::string_view bytes);
};

}  // namespace torch_ckpt::planning
