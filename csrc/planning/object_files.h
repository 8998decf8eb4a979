#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "planning/box_runs.h"
#include "planning/safetensors_layout.h"

namespace torch_ckpt::planning {

// The assembly of a file of which several ranks have parts. Each of these ranks has stored its
// parts of the file as one object, packed in the order of the file. Objects are in a store, or are
// files in a directory.
class FileAssembly {
 public:
  /// A part of a tensor in an object.
  struct Part {
    std::uint64_t tensor = 0;  // offset of the tensor's data in the file
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> lengths;
    std::uint64_t item_bytes = 1;
  };
  /// Bytes of an object.
  struct Range {
    std::size_t object = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;

    bool operator==(const Range&) const = default;
  };

  FileAssembly(std::string name, std::string head, std::uint64_t bytes)
      : name_(std::move(name)), head_(std::move(head)), bytes_(bytes) {}

  /// Adds an object with these parts, in the order of their first bytes in the file. Fails with
  /// Errc::frame_damaged if a part does not lie within its tensor, or the tensor within the file.
  Result<> add_object(std::string name, std::span<const Part> parts);

  const std::string& name() const { return name_; }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t objects() const { return objects_.size(); }
  const std::string& object_name(std::size_t object) const { return objects_.at(object).name; }

  /// Returns the bytes of objects that the bytes [begin, end) of the file consist of, behind the
  /// head. Without gaps, an object has one range.
  std::vector<Range> ranges(std::uint64_t begin, std::uint64_t end) const;
  /// Copies the bytes of the head to `out`, which has the file's bytes from `begin` on.
  void copy_head(std::uint64_t begin, std::span<std::byte> out) const;
  /// Copies bytes of an object, from `offset` on, to their places in `out`, which has the file's
  /// bytes from `begin` on. Fails with Errc::internal if a place is outside of `out`.
  Result<> copy(const Range& range, std::span<const std::byte> data, std::uint64_t begin,
                std::span<std::byte> out) const;

  std::string encode() const;
  /// Fails with Errc::frame_damaged.
  static Result<FileAssembly> decode(std::string_view bytes);

 private:
  struct Placed {
    Part part;
    BoxRuns runs;
    std::uint64_t offset = 0;  // in the object
  };
  struct Object {
    std::string name;
    std::vector<Placed> parts;
  };

  std::string name_;
  std::string head_;
  std::uint64_t bytes_;
  std::vector<Object> objects_;
};

// Decides how the ranks store the files of a layout as objects, which one rank must write in order:
//
//   1. If one rank has all parts of a file, that rank writes the file.
//   2. Otherwise, each rank stores its parts of the file as a temporary object. When all of these
//      are complete, one rank assembles the file from them. The files are distributed over the
//      ranks by their sizes.
struct ObjectFiles {
  std::vector<RankPlaces> places;                     // by rank, for the first step
  std::vector<std::vector<FileAssembly>> assemblies;  // by rank
  std::vector<std::string> temporaries;               // names of the temporary objects

  /// parts: of each rank, as in RankPlaces::of(). prefix: of the names of temporary objects.
  static Result<ObjectFiles> of(const SafetensorsLayout& layout,
                                std::span<const std::vector<OwnedPart>> parts,
                                const std::string& prefix);
};

}  // namespace torch_ckpt::planning
